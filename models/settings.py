"""The command line of `models.train`: every argument, its default for each size, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from models.data import is_hidden
from models.errors import UsageError
from models.folder import RECORD, check_new, list_steps, unusable, write_whole
from models.lock import check_unlocked

RUNS = Path("runs")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run. `python -m models.train --help` says what each field means."""

    task: str
    size: str
    data: str | None
    steps: int
    batch: int
    context: int
    learning_rate: float
    warmup: int
    seed: int
    optimizer: str
    dtype: str
    sinks: bool
    dropout: float
    implementation: str | None
    mesh: str | None
    out: Path
    resume: bool
    checkpoint_every: int
    keep: int
    validate_every: int
    log_every: int
    validation_bytes: int
    sample_bytes: int
    prompt: str
    temperature: float


# What must be the same when a run is resumed: it fixes the parameters that come out.
FIXED = (
    *("task", "size", "steps", "batch", "context", "learning_rate", "warmup", "seed", "optimizer", "dtype"),
    *("sinks", "dropout"),
)


@dataclasses.dataclass(frozen=True)
class Preset:
    """The defaults of one size."""

    steps: int
    batch: int
    context: int
    learning_rate: float
    optimizer: str = "adamw"


# The tiny sizes are for two CPU cores, and were chosen there (models/README.md); the larger ones are for GPUs.
TASKS = {
    "text": {
        "nano": Preset(steps=200, batch=8, context=32, learning_rate=5e-3),
        "tiny": Preset(steps=1400, batch=16, context=128, learning_rate=6e-3, optimizer="muon"),
        "small": Preset(steps=3000, batch=32, context=512, learning_rate=1e-3),
        "gpt2-small": Preset(steps=10_000, batch=32, context=1024, learning_rate=6e-4),
        "gpt2-medium": Preset(steps=20_000, batch=32, context=1024, learning_rate=3e-4),
        "1b": Preset(steps=20_000, batch=16, context=2048, learning_rate=2e-4),
    },
    "images": {
        "nano": Preset(steps=100, batch=64, context=0, learning_rate=1e-2),
        "tiny": Preset(steps=1000, batch=64, context=0, learning_rate=2e-3),
    },
}

# The defaults that no size changes.
COMMON: dict[str, Any] = {
    "data": None,
    "seed": 0,
    "dtype": "float32",
    "sinks": False,
    "dropout": 0.0,
    "implementation": None,
    "mesh": None,
    "checkpoint_every": 200,
    "keep": 3,
    "validate_every": 200,
    "log_every": 10,
    "validation_bytes": 2**17,
    "sample_bytes": 500,
    "prompt": "def ",
    "temperature": 0.8,
}

Rule = tuple[str, Callable[[Any], bool]]
AT_LEAST_1: Rule = ("be at least 1 and below 2**31", lambda value: 1 <= value < 2**31)
AT_LEAST_0: Rule = ("not be negative, and be below 2**31", lambda value: 0 <= value < 2**31)
POSITIVE: Rule = ("be a positive finite number of float32", lambda value: 2**-126 <= value < 2**128)
CONTEXT: Rule = ("be at least 2 bytes, and below 2**31", lambda value: 2 <= value < 2**31)
RULES: dict[str, Rule] = {
    "steps": AT_LEAST_1, "batch": AT_LEAST_1, "checkpoint_every": AT_LEAST_1, "keep": AT_LEAST_1,
    "validate_every": AT_LEAST_1, "log_every": AT_LEAST_1, "validation_bytes": AT_LEAST_1,
    "learning_rate": POSITIVE, "temperature": POSITIVE, "warmup": AT_LEAST_0, "sample_bytes": AT_LEAST_0,
    "seed": ("lie between 0 and 2**32 - 1", lambda value: 0 <= value < 2**32),
    "optimizer": ("be 'adamw' or 'muon'", lambda value: value in ("adamw", "muon")),
    "dtype": ("be 'float32' or 'bfloat16'", lambda value: value in ("float32", "bfloat16")),
    "dropout": ("lie in [0, 1)", lambda value: 0 <= value < 1),
    "prompt": ("hold at least one character", lambda value: len(value) > 0),
}  # fmt: skip


def parse(argv: list[str] | None = None) -> Settings:
    """The settings that `argv` asks for. Raises UsageError; argparse itself exits on what is not its own."""
    given = vars(_parser().parse_args(argv))
    resume = given.pop("resume", False)
    for name in ("out", "data"):
        if given.get(name) == "":
            raise UsageError(f"{_flag(name)}='': it must name a path; '.' is the current directory.")
    task = given.get("task", "text")
    _check_choice("task", task, list(TASKS), "of models.train")
    out = Path(given.pop("out")) if "out" in given else _default_out(task, given.get("size", "tiny"), resume)
    _check_out(out, resume)
    saved = read_record(out) if resume else {}
    for name in FIXED:
        if name in given and name in saved and given[name] != saved[name]:
            raise UsageError(
                f"{_flag(name)}={given[name]!r} differs from the run in --out={str(out)!r}, which has {saved[name]!r}; "
                f"a resumed run keeps its settings: leave out {_flag(name)}, or start a new run with another --out."
            )
    asked = {name: value for name, value in {**saved, **given}.items() if name in Settings.__dataclass_fields__}
    task, size = asked.get("task", task), asked.get("size", "tiny")
    _check_choice("task", task, list(TASKS), "of models.train")
    _check_choice("size", size, list(TASKS[task]), f"of --task {task}")
    values = {**COMMON, **dataclasses.asdict(TASKS[task][size]), **asked, "task": task, "size": size}
    values.setdefault("warmup", min(100, values["steps"] // 10))
    settings = Settings(**values, out=out, resume=resume)
    _check(settings, given)
    return settings


def write_record(settings: Settings, data_digest: str) -> None:
    """Writes what `--resume` reads: the settings of this run, and which data they were for."""
    fields = dataclasses.asdict(settings)
    del fields["out"], fields["resume"]
    if settings.data is not None:
        fields["data"] = str(Path(settings.data).absolute())  # the run may be resumed from another directory
    write_whole(settings.out / RECORD, json.dumps({**fields, "data_digest": data_digest}, indent=1))


def read_record(
    out: Path, option: str = "--resume", remedy: str = "start a new run with another --out"
) -> dict[str, Any]:
    """What `write_record` wrote, for the `option` of a program. Raises UsageError, with a `remedy`, if it is damaged."""
    path = out / RECORD
    try:
        fields = json.loads(path.read_bytes())
        if isinstance(fields, dict):
            fields.setdefault("sinks", False)  # records from before there were sinks
            fields.setdefault("dropout", 0.0)  # and dropout
        damage = _find_damage(fields)
    except (OSError, ValueError) as error:  # no file, no JSON, or not even UTF-8
        damage = str(error)
    if damage:
        raise UsageError(
            f"{option} can't read {str(path)!r} ({damage}); it holds the settings of the run: repair it, or {remedy}."
        )
    return fields


def _find_damage(fields: Any) -> str | None:
    if not isinstance(fields, dict):
        return "it is no JSON object"
    types = {**get_type_hints(Settings), "data_digest": str}
    for name in (*FIXED, "data_digest", *fields):
        if name not in fields:
            return f"it lacks {name!r}"
        if not isinstance(fields[name], types.get(name, object)):
            return f"{name!r} can't be {fields[name]!r}"
    for name, known in (("task", TASKS), ("size", TASKS.get(fields["task"], {}))):
        if fields[name] not in known:
            return f"{name!r} can't be {fields[name]!r}: it must be one of {', '.join(known)}"
    rules = RULES | ({"context": CONTEXT} if fields["task"] == "text" else {})
    for name, (rule, holds) in rules.items():
        if name in fields and not holds(fields[name]):
            return f"{name!r} can't be {fields[name]!r}: it must {rule}"
    return None


def _default_out(task: str, size: str, resume: bool) -> Path:
    """runs/TASK-SIZE, or with a number where that is taken; to resume, the last of them that has a checkpoint."""
    first = RUNS / f"{task}-{size}"
    taken = []
    while (out := first if not taken else first.with_name(f"{first.name}-{len(taken) + 1}")).exists():
        taken.append(out)
    if not resume:
        return out
    return next((run for run in reversed(taken) if list_steps(run)), first)


def _check_out(out: Path, resume: bool) -> None:
    """Raises UsageError if nothing can be written into `out`, or nothing resumed from it."""
    if os.fsencode(out.absolute()) != str(out.absolute()).encode("utf-8", "replace"):
        raise UsageError(f"--out={str(out)!r}: its path must be UTF-8, as tensorstore's are; choose another.")
    try:
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out={str(out)!r} is a file; it must be a folder, or not exist: choose another.")
        check_unlocked(out)
        steps = list_steps(out)
    except OSError as error:
        raise unusable(out, error) from error
    if not steps or not resume:
        check_new(out)
    if resume and not steps:
        raise UsageError(
            f"--resume finds no checkpoint in --out={str(out)!r}; a run can be resumed once it has written one: leave "
            "out --resume to start, or name the run's folder with --out."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_choice(name: str, value: str, known: list[str], owner: str) -> None:
    if value not in known:
        raise UsageError(f"{_flag(name)}={value!r} is unknown; the {name}s {owner} are {', '.join(known)}: choose one.")


def _check(settings: Settings, given: dict[str, Any]) -> None:
    for name, (rule, holds) in RULES.items():
        value = getattr(settings, name)
        if not holds(value):
            raise UsageError(f"{_flag(name)}={value!r}: it must {rule}; change it, or leave it out for the default.")
    if settings.warmup >= settings.steps and settings.warmup > 0:
        raise UsageError(
            f"--warmup={settings.warmup} with --steps={settings.steps}: the warmup must end before the last step; "
            "lower --warmup or raise --steps."
        )
    if settings.task == "images":
        for name in ("data", "context", "sinks"):
            if name in given:
                raise UsageError(
                    f"{_flag(name)}={given[name]!r} goes with --task text; the images are scikit-learn's digits: "
                    "leave it out."
                )
    elif not CONTEXT[1](settings.context):
        raise UsageError(f"--context={settings.context}: it must {CONTEXT[0]}; change it.")
    if settings.data is not None and _reads_itself(Path(settings.data), settings.out):
        raise UsageError(
            f"--out={str(settings.out)!r} lies in --data={settings.data!r}, so that the run would read its own files "
            "and could not be resumed: choose an --out elsewhere."
        )


def _reads_itself(data: Path, out: Path) -> bool:
    data, out = data.resolve(), out.resolve()
    return data.is_dir() and out.is_relative_to(data) and not is_hidden(out, data)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.train",
        description="Trains a GPT on text, or a vision transformer on digits.",
        argument_default=argparse.SUPPRESS,  # what is absent here comes from the run that is resumed, or the size
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--task", help="text (default) or images")
    add("--size", help="; ".join(f"{task}: {', '.join(sizes)}" for task, sizes in TASKS.items()) + " (default tiny)")
    add("--data", metavar="PATH", help="a file or folder of text (default: the Python standard library's sources)")
    add("--steps", type=int, help="training steps in all")
    add("--batch", type=int, help="sequences or images in a step")
    add("--context", type=int, help="bytes in a sequence")
    add("--learning-rate", type=float, help="at its peak, after the warmup")
    add("--warmup", type=int, help="steps of linear warmup (default: a tenth of the steps, at most 100)")
    add("--seed", type=int, help="of the parameters, the order of the data and the sampled text (default 0)")
    add("--optimizer", help="adamw (the larger sizes' default) or muon (tiny text's), with the same learning rates")
    add("--dtype", help="of the computation: float32 (default) or bfloat16; parameters are always float32")
    add("--sinks", action="store_true", help="the GPT learns an attention sink for each query head of a layer")
    add("--dropout", type=float, metavar="RATE", help="of the attention's probabilities, in training (default 0)")
    add("--implementation", help="of the attention, as in pallas_fa.dot_product_attention (default: its own choice)")
    add(
        "--mesh",
        metavar="AXES",
        help="devices along each axis, as data=4,model=2,context=2 (default: one device); data cuts the batch, model "
        "the heads and hidden units, context the sequence",
    )
    add("--out", metavar="FOLDER", help="where the run is written (default runs/TASK-SIZE)")
    add("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    add("--checkpoint-every", type=int, metavar="STEPS", help="(default 200)")
    add("--keep", type=int, metavar="N", help="checkpoints to keep (default 3)")
    add("--validate-every", type=int, metavar="STEPS", help="(default 200)")
    add("--log-every", type=int, metavar="STEPS", help="how often losses are read from the device (default 10)")
    add("--validation-bytes", type=int, metavar="N", help="held-out bytes in a validation (default 131072)")
    add("--sample-bytes", type=int, metavar="N", help="length of the text sampled at the end (default 500)")
    add("--prompt", help="what the sampled text begins with (default 'def ')")
    add("--temperature", type=float, help="of the sampling (default 0.8)")
    return parser
