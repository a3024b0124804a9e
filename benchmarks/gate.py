"""Whether a default call is nowhere slower than the same call through `jax.nn`, from the rows of a run.

python -m benchmarks.run --suite nowhere-slower      # measures and judges; nowhere-slower-cpu without a GPU
python -m benchmarks.gate ROWS                       # judges rows that are there; exits with 1 if a call is slower

The limits: 0.98 of the best peer's speed; 0.90 where XLA computes the call, the longer sequence has at least 4096
positions, and ours takes at most a fifth of the peer's temporary memory. `pallas_fa:None` is compared with every peer; a
named implementation of ours with `jax.nn:xla`, which runs wherever it does.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import command
from benchmarks.implementations import Implementation
from benchmarks.rows import Row, has_time
from benchmarks.workloads import Workload

LIMIT, LIMIT_WHERE_MEMORY_IS_SAVED = 0.98, 0.90
LONG = 4096
MEMORY_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One call of ours beside the fastest peer that computes it; `speed` is the peer's time over ours."""

    row: Row
    peer: Row | None
    speed: float
    limit: float

    @property
    def below(self) -> bool:
        """Whether it is slower than it may be."""
        return self.speed < self.limit

    def __str__(self) -> str:
        row = self.row
        call = f"{row['workload']:30} {row['direction']:8} {row['implementation']:18} by {row.get('runs') or '?':10}"
        if not has_time(row):
            return f"{call} no time: {row['error']}"
        if self.peer is None:
            return f"{call} {row['p50_ms'] * 1e3:9.1f} us, no peer"
        peer = f"{self.peer['p50_ms'] * 1e3:9.1f} us of {self.peer['implementation']}"
        return f"{call} {row['p50_ms'] * 1e3:9.1f} us, {peer}: {self.speed:.2f} of {self.limit:.2f}"


def runs(implementation: Implementation, workload: Workload) -> str | None:
    """The name of the implementation that the library chooses for a call; None for other libraries."""
    if implementation.library != "pallas_fa":
        return None
    import jax

    import pallas_fa

    def explained():
        arrays = {name: jax.numpy.zeros(x.shape, x.dtype) for name, x in workload.shapes().items()}
        keywords = implementation.keywords(workload, arrays, implementation.masks(workload))
        told.append(pallas_fa.explain(**keywords, implementation=implementation.backend))

    told: list[str] = []
    jax.eval_shape(explained)
    running = [line for line in told[0].splitlines() if ": runs this call" in line]
    here = [line for line in running if "on this machine's" in line]  # where the first runs on GPUs that are not here
    return next((line.split(":")[0] for line in here + running), None)


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """One for each row of ours, the slowest in comparison first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["direction"]), []).append(row)
    found = [_verdict(row, group) for group in groups.values() for row in group if _ours(row)]
    return sorted(found, key=lambda verdict: verdict.speed / verdict.limit)


def report(found: Sequence[Verdict]) -> str:
    """The rows that are below their limits, and how many there are in all."""
    below = [verdict for verdict in found if verdict.below]
    return "\n".join([*map(str, below), f"{len(below)} of {len(found)} calls are slower than they may be"])


def _ours(row):
    return row["implementation"].startswith("pallas_fa:")


def _verdict(row, group):
    default = row["implementation"] == "pallas_fa:None"
    peers = [r for r in group if not _ours(r) and has_time(r) and (default or r["implementation"] == "jax.nn:xla")]
    peer = min(peers, key=lambda r: r["p50_ms"], default=None)
    speed = 0.0 if not has_time(row) else float("inf") if peer is None else peer["p50_ms"] / row["p50_ms"]
    saves = row.get("runs") == "xla" and max(row["shape"]["T"], row["shape"]["S"]) >= LONG
    saves = saves and peer is not None and row["temp_bytes"] <= MEMORY_SHARE * peer["temp_bytes"]
    return Verdict(row, peer, speed, LIMIT_WHERE_MEMORY_IS_SAVED if saves else LIMIT)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", type=Path, help="JSONL files that the suite nowhere-slower wrote")
    fields = ("workload", "direction", "implementation", "shape", "error")
    found = verdicts(command.read_rows(parser.parse_args(argv).rows, *fields))
    print(report(found))
    if any(verdict.below for verdict in found):
        raise SystemExit(1)


if __name__ == "__main__":
    command.start(main)
