"""The part of the results page that says what the compiler says of every kernel (`python -m tests.elsewhere.rows`)."""

import ast
import dataclasses
from collections.abc import Sequence

from benchmarks.markdown import table
from benchmarks.rows import Row
from pallas_fa.backends.hopper import config as hopper
from pallas_fa.backends.mma import config as mma


def tables(found: Sequence[Row]) -> list[str]:
    """A table for the kernels of one kind of GPU, and one for those that are compiled for several."""
    by_call: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in found:
        by_call.setdefault(_call(row), {})[row["architecture"]] = row
    one_kind = {call: of for call, of in by_call.items() if call[0].startswith("hopper")}
    several = {call: of for call, of in by_call.items() if call not in one_kind}
    parts = [
        "Every configuration of the tables of tiles, by JAX's own compilers: registers of a thread at the kernel's start,"
        " bytes of registers that it spills, and shared memory of a CTA. Where CTAs have warpgroups of several kinds,"
        " these share the registers out anew. Seconds are those of lowering and compiling on the machine of these rows."
        " Tiles say what differs from the defaults of `ForwardConfig`, `BackwardConfig` or `DecodeConfig`.\n"
    ]
    if one_kind:
        lines = [
            [*call, *(str(row[name]) for name in ("registers", "spilled")), _kib(row), f"{row['compile_s']:.1f}"]
            for call, of in one_kind.items()
            for row in of.values()
        ]
        parts.append(table([*_CALL, "registers", "spilled", "KiB", "s"], lines, words=len(_CALL)))
    if several:
        architectures = list(dict.fromkeys(name for of in several.values() for name in of))
        lines = [
            [*call, *(_short(of[name]) if name in of else "" for name in architectures)] for call, of in several.items()
        ]
        parts.append("Registers, spilled bytes, KiB:\n")
        parts.append(table([*_CALL, *architectures], lines, words=len(_CALL)))
    return parts


_CALL = ("kernel", "H", "causal, or in pages", "tiles")


def _call(row: Row) -> tuple[str, ...]:
    return row["kernel"], str(row["H"]), "yes" if row["causal"] else "no", _tiles(row)


def _tiles(row: Row) -> str:
    """The fields of the tiles that differ from their defaults, as in a call of their class; or what is said in words."""
    if "(" not in row["tiles"]:
        return row["tiles"]
    call = ast.parse(row["tiles"], mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    kinds = hopper if row["kernel"].startswith("hopper") else mma
    defaults = {field.name: field.default for field in dataclasses.fields(getattr(kinds, call.func.id))}
    given = {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
    changed = [f"{name}={x}" for name, x in given.items() if x != defaults[name]]
    return f"`{', '.join(changed)}`" if changed else "the defaults"


def _kib(row: Row) -> str:
    return f"{row['shared_memory'] / 1024:.0f}"


def _short(row: Row) -> str:
    return f"{row['registers']}, {row['spilled']}, {_kib(row)}"
