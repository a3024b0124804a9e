"""Models communication against compute in context parallelism: `python -m benchmarks.distributed.comms_model ROWS`.

Reads the rows of scaling.py and measures nothing; docs/scaling.md explains it. Causal attention to one sequence of S tokens
over R devices, forward and backward, with the heads of the rows.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import command, rows

LENGTHS = tuple(2**n for n in range(16, 21))  # 64k to 1M tokens
DEVICES = tuple(2**n for n in range(1, 11))  # 2 to 1024
ACCUMULATOR_BYTES = 4  # of the gradients of keys and values on their way round the ring: float32


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds against size, from measured points: straight between them on logarithmic axes.

    Below the smallest point it is constant, since there latency rules; above the largest it grows as size**order.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    order: int

    def __call__(self, size: float) -> float:
        if size > self.sizes[-1]:
            return self.seconds[-1] * (size / self.sizes[-1]) ** self.order
        return float(np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(self.seconds))))


@dataclasses.dataclass(frozen=True)
class Network:
    """What one device gets of the network between hosts of `devices` devices each."""

    devices: int
    bytes_per_s: float
    latency_s: float

    def seconds(self, sent: float) -> float:
        return self.latency_s + sent / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured seconds. `pair` and `whole` by direction ('forward', 'backward')."""

    N: int
    K: int
    H: int
    itemsize: int
    pair: dict[str, Curve]  # of one pair of blocks, by the tokens of a block: no mask, all heads
    whole: dict[str, Curve]  # of one causal sequence on one device, by its tokens: all heads
    ring: Curve  # of a hop, by the bytes that each device sends
    exchange: Curve  # of an all-to-all, by the bytes that each device sends

    @classmethod
    def of(cls, found: list[rows.Row]) -> "Rates":
        """From rows of one device model; links are those of the most devices measured."""
        found = [row for row in found if row.get("p50_ms") is not None]
        needed = {"kernel", "attention", "link"} - {row["kind"] for row in found}
        plain = [row for row in found if row.get("way") == "plain"]
        if needed or not plain:
            raise SystemExit(
                f"These rows have no times of kind {', '.join(sorted(needed)) or 'attention on one device'}, which the model"
                " is made of. Measure them with benchmarks.distributed.scaling on 2 or more devices."
            )
        shape, dtype = plain[0]["shape"], plain[0]["dtype"]
        assert shape["H"] == shape["Hv"]
        return cls(
            N=shape["N"],
            K=shape["K"],
            H=shape["H"],
            itemsize=4 if dtype == "float32" else 2,
            pair=_directions([row for row in found if row["kind"] == "kernel"]),
            whole=_directions(plain),
            ring=_link(found, "ppermute"),
            exchange=_link(found, "all_to_all"),
        )


def _directions(found: list[rows.Row]) -> dict[str, Curve]:
    def seconds(direction):
        return {row["shape"]["S"]: row["p50_ms"] / 1e3 for row in found if row["direction"] == direction}

    forward, both = seconds("forward"), seconds("fwdbwd")
    # A backward has more to do than a forward: a difference that says less is noise, as on a busy CPU at tiny sizes.
    backward = {S: max(both[S] - forward[S], forward[S]) for S in both if S in forward}
    return {"forward": _curve(forward, 2), "backward": _curve(backward, 2)}


def _link(found: list[rows.Row], collective: str) -> Curve:
    links = [row for row in found if row.get("collective") == collective]
    most = max(row["devices"] for row in links)
    return _curve({row["sent_bytes"]: row["p50_ms"] / 1e3 for row in links if row["devices"] == most}, 1)


def _curve(points: dict[int, float], order: int) -> Curve:
    sizes = tuple(sorted(points))
    return Curve(sizes, tuple(points[size] for size in sizes), order)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one direction on each device."""

    compute: float
    communication: float
    overlapping: bool  # whether the two can go on at the same time
    exposed: float = 0.0  # further communication, with nothing to compute under it

    @property
    def best(self) -> float:
        together = max if self.overlapping else lambda *parts: sum(parts)
        return together(self.compute, self.communication) + self.exposed

    @property
    def worst(self) -> float:
        """Nothing overlaps."""
        return self.compute + self.communication + self.exposed


def ring(rates: Rates, S: int, R: int, direction: str, network: Network | None = None) -> Estimate:
    """In zigzag order: in each of R hops a device computes two pairs of blocks of S / 2R tokens, under which keys travel.

    They travel R - 1 times, and in the backward so do their gradients, which are sums, in float32, from the second time on.
    There the first keys come under nothing, unless what was before the backward hides them.
    """

    def hop(sent):
        seconds = rates.ring(sent)
        return max(seconds, network.seconds(sent)) if network and R > network.devices else seconds  # the slowest link

    keys = hop_bytes(rates, S, R, "forward")
    compute = R * 2 * rates.pair[direction](S / R / 2)
    if direction == "forward":
        return Estimate(compute, (R - 1) * hop(keys), overlapping=True)
    with_sums = (R - 2) * hop(hop_bytes(rates, S, R, direction))
    # The gradients that are no sums yet are as large as the keys.
    return Estimate(compute, with_sums + hop(keys), overlapping=True, exposed=hop(keys))


def hop_bytes(rates: Rates, S: int, R: int, direction: str) -> float:
    """What each device sends in a hop: keys and values, and in the backward their gradients so far."""
    each = rates.itemsize + (ACCUMULATOR_BYTES if direction == "backward" else 0)
    return 2 * (S / R) * rates.K * rates.H * each


def all_to_all(rates: Rates, S: int, R: int, direction: str, network: Network | None = None) -> Estimate | None:
    """N / R heads of the whole sequence on each device; None where there are not enough heads."""
    if rates.N % R:
        return None
    key_heads = rates.K * R // math.gcd(rates.K, R)  # repeated as little as it takes
    seconds = 0.0
    for heads in (rates.N, key_heads, key_heads, rates.N):  # there query, key, value, back the output; or gradients
        held = (S / R) * heads * rates.H * rates.itemsize
        seconds += rates.exchange(held * (R - 1) / R)
        if network and R > network.devices:
            seconds += network.seconds(held * (R - network.devices) / R)
    return Estimate(rates.whole[direction](S) / R, seconds, overlapping=False)


WAYS = {"ring": ring, "all_to_all": all_to_all}


def both(rates: Rates, way: str, S: int, R: int, network: Network | None = None) -> tuple[float, float] | None:
    """(best, worst) seconds of forward and backward together."""
    estimates = [WAYS[way](rates, S, R, direction, network) for direction in ("forward", "backward")]
    if any(e is None for e in estimates):
        return None
    return sum(e.best for e in estimates if e), sum(e.worst for e in estimates if e)


def scaling_table(rates: Rates, network: Network | None) -> str:
    """What each number of devices gives; efficiency: the time of one device over R times this time."""
    head = ["S", "R", "block", "hop needs GB/s", "ring ms", "eff.", "no overlap", "all-to-all ms", "eff.", "faster"]
    lines = [head]
    for S in LENGTHS:
        alone = sum(rates.whole[direction](S) for direction in rates.whole)
        for R in DEVICES:
            found = {way: both(rates, way, S, R, network) for way in WAYS}
            cells = {way: _cells(times, alone / R) for way, times in found.items()}
            faster = min((times[0], way) for way, times in found.items() if times)[1]
            needs = max(_needed(rates, S, R, direction) for direction in rates.pair) / 1e9
            start = [str(S), str(R), str(S // R // 2), f"{needs:.3g}"]
            lines.append([*start, *cells["ring"], *cells["all_to_all"][:2], faster])
    return _aligned(lines)


def _needed(rates, S, R, direction):
    """Bytes a second at which the keys arrive just as the hop's compute ends."""
    return hop_bytes(rates, S, R, direction) / (2 * rates.pair[direction](S / R / 2))


def _cells(times, ideal):
    if times is None:
        return ["-", "-", "-"]
    best, worst = times
    return [f"{best * 1e3:.4g}", f"{ideal / best:.2f}", f"{worst * 1e3:.4g}"]


def check_table(rates: Rates, found: list[rows.Row]) -> str:
    """The model beside each measured point that it was not made of."""
    lines = [["way", "S", "R", "direction", "measured ms", "model ms", "no overlap", "measured / model"]]
    for row in found:
        if row.get("way") not in WAYS or row.get("p50_ms") is None:
            continue
        way, S, R, direction = row["way"], row["shape"]["S"], row["devices"], row["direction"]
        estimate = WAYS[way](rates, S, R, "forward") if direction == "forward" else None
        times = (estimate.best, estimate.worst) if estimate else both(rates, way, S, R)
        assert times is not None  # it was measured, so there were heads enough
        best, worst = (1e3 * t for t in times)
        measured = row["p50_ms"]
        numbers = [f"{measured:.4g}", f"{best:.4g}", f"{worst:.4g}", f"{measured / best:.2f}"]
        lines.append([way, str(S), str(R), direction, *numbers])
    return _aligned(lines)


def _aligned(lines):
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.comms_model", description=__doc__)
    add = parser.add_argument
    add("rows", nargs="+", type=Path, help="JSONL files that benchmarks.distributed.scaling wrote, of one device model")
    add(
        "--host-devices",
        type=command.positive,
        metavar="R",
        help="devices of one host; past it, traffic crosses the network",
    )
    add("--network-gb-per-s", type=command.above_zero, metavar="GB/S", help="of the network, for each device")
    add("--network-us", type=command.not_negative, metavar="US", help="latency of the network")
    add("--no-plot", action="store_true", help="do not draw the efficiency, beside the first file")
    args = parser.parse_args(argv)
    given = (args.host_devices, args.network_gb_per_s, args.network_us)
    if any(x is not None for x in given) and None in given:
        parser.error(
            "--host-devices, --network-gb-per-s and --network-us describe the network together: give all three."
        )
    network = None if None in given else Network(given[0], given[1] * 1e9, given[2] / 1e6)
    found = command.read_rows(args.rows, "kind")
    rates = Rates.of(found)
    links = "the measured links of one host, between all devices" if network is None else f"{network}"
    print(f"{found[0]['device']}, N={rates.N} K={rates.K} H={rates.H}; links: {links}\n")
    print(check_table(rates, found), "\n")
    print(scaling_table(rates, network))
    if not args.no_plot:
        from benchmarks.distributed import comms_plot

        comms_plot.draw(found, rates, network, args.rows[0].with_suffix(".model.png"))


if __name__ == "__main__":
    command.start(main)
