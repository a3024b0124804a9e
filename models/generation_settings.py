"""The command line of `models.generate`, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from models.data import to_bytes
from models.errors import UsageError
from models.folder import CHECKPOINTS, RECORD, list_steps
from models.settings import AT_LEAST_1, RULES, RUNS, Rule, read_record

SPECIES = 256  # of bytes


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to generate, and the model. `python -m models.generate --help` says what each field means."""

    run: Path
    step: int
    prompts: list[str]
    count: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: str | None
    seed: int
    page_size: int | None
    implementation: str | None
    # Of the run:
    size: str
    dtype: str
    context: int
    sinks: bool


_OWN_RULES: dict[str, Rule] = {
    "bytes": AT_LEAST_1,
    "temperature": ("be 0 (greedy), or a positive finite number of float32", lambda x: x == 0 or 2**-126 <= x < 2**128),
    "top-k": (f"lie between 1 and {SPECIES}, of which one is drawn", lambda x: 1 <= x <= SPECIES),
    "top-p": ("be above 0 and at most 1: the probability of what is drawn from", lambda x: 0 < x <= 1),
    "stop": ("hold at least one character", lambda x: len(x) > 0),
    "seed": RULES["seed"],
    "page-size": ("lie between 1 and 4096", lambda x: 1 <= x <= 4096),
}


def parse(argv: list[str] | None = None) -> Settings:
    """The settings that `argv` asks for. Raises UsageError; argparse itself exits on what is not its own."""
    given = _parser().parse_args(argv)
    for name, (rule, holds) in _OWN_RULES.items():
        value = getattr(given, name.replace("-", "_"))
        if value is not None and not holds(value):
            raise UsageError(f"--{name}={value!r}: it must {rule}; change it, or leave it out for the default.")
    for name in ("top_k", "top_p"):
        if given.temperature == 0 and getattr(given, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')}={getattr(given, name)!r} with --temperature=0: greedy takes the most probable "
                "byte, whatever else could be drawn; leave one of the two out."
            )
    run = _default_run() if given.run is None else Path(given.run)
    steps = _steps(run)
    if given.step is not None and given.step not in steps:
        raise UsageError(
            f"--step={given.step}: --run={str(run)!r} has checkpoints of the steps {', '.join(map(str, steps))}; name one "
            "of these, or leave --step out for the last."
        )
    record = read_record(run, "--run", "name another run")
    if record["task"] != "text":
        raise UsageError(f"--run={str(run)!r} is a run of --task {record['task']}; only text can be continued.")
    prompts = given.prompt or ["def "]
    _check_prompts(prompts, record["context"])
    return Settings(
        run=run,
        step=steps[-1] if given.step is None else given.step,
        prompts=prompts,
        count=given.bytes,
        implementation=given.implementation,
        **{name: getattr(given, name) for name in ("temperature", "top_k", "top_p", "stop", "seed", "page_size")},
        **{name: record[name] for name in ("size", "dtype", "context", "sinks")},
    )


def _default_run() -> Path:
    """The run in `runs/` whose last checkpoint is the youngest."""
    with_steps = [run for run in RUNS.glob("text-*") if list_steps(run)]
    if not with_steps:
        raise UsageError(
            f"There is no run with a checkpoint in {str(RUNS.absolute())!r}: train one with `make train`, or `python -m "
            "models.train`, or name a run's folder with --run."
        )
    return max(with_steps, key=lambda run: (run / CHECKPOINTS / str(list_steps(run)[-1])).stat().st_mtime)


def _steps(run: Path) -> list[int]:
    """The checkpoints of a run. Raises UsageError if there are none."""
    try:
        steps = list_steps(run)
    except OSError as error:
        raise UsageError(f"--run={str(run)!r} can't be read ({error.strerror}): name another.") from error
    if steps:
        return steps
    if not run.is_dir():
        raise UsageError(
            f"--run={str(run)!r} is no folder; it must be one that models.train wrote, such as runs/text-tiny: check the "
            "path, or train a model with `make train`."
        )
    advice = (
        "let it write its first" if (run / RECORD).exists() else "name the folder that holds run.json and checkpoints"
    )
    raise UsageError(f"--run={str(run)!r} has no checkpoint in {CHECKPOINTS!r}: {advice}.")


def _check_prompts(prompts: list[str], context: int) -> None:
    for index, prompt in enumerate(prompts, start=1):
        length = len(to_bytes(prompt))
        where = f" (number {index} of {len(prompts)})" if len(prompts) > 1 else ""
        if not length:
            raise UsageError(
                f"--prompt=''{where}: it must hold at least one character, from which the model goes on; a line's end "
                "will do: --prompt $'\\n'."
            )
        if length > context:
            shown = prompt if len(prompt) <= 40 else prompt[:40] + "..."
            raise UsageError(
                f"--prompt={shown!r}{where} has {length} bytes, but the model was trained on a context of {context}: "
                "shorten it, or train a model with a larger --context."
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.generate",
        description="Continues text with a GPT that models.train has trained.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", metavar="FOLDER", help="where models.train wrote the run (default: the one in runs/ that wrote last)")
    add("--step", type=int, help="the checkpoint (default: the last)")
    add("--prompt", nargs="+", action="extend", metavar="TEXT", help="texts to continue, all at once (default 'def ')")
    add("--bytes", type=int, default=500, metavar="N", help="how many follow each prompt (default 500)")
    add("--temperature", type=float, default=0.8, help="0: always the most probable byte (default 0.8)")
    add("--top-k", type=int, metavar="K", help="draw from the K most probable bytes only")
    add("--top-p", type=float, metavar="P", help="draw from the most probable bytes that together have probability P")
    add("--stop", metavar="TEXT", help="end a text where this comes; it is not printed")
    add("--seed", type=int, default=0, help="of what is drawn (default 0)")
    add("--page-size", type=int, metavar="N", help="keep keys and values in pages of N bytes (default: in one piece)")
    add("--implementation", help="of the attention, as in pallas_fa.dot_product_attention (default: its own choice)")
    return parser
