"""Words for people: what a row measured, and why it has no time. Plots and the results page share them."""

import re
from collections.abc import Sequence

from benchmarks.rows import Row

# What is said together, because it is mostly equal: 'T=S=4096', 'N=32 K=4'.
_FIELDS = (("B",), ("T", "S"), ("N", "K"), ("H", "Hv"))
_REASONS = (
    (r"out of memory|RESOURCE_EXHAUSTED|Failed to get configs", "out of memory"),
    (r"not run: needs ([\d.]+ GiB)", r"needs \1"),
    (r"budget", "no time left"),
    (r"not finite", "wrong result"),
    (r"no soft cap", "no soft cap"),
    (r"Bias must have same seq length", "no mask [B, 1, 1, S]"),
)


def fields(row: Row) -> dict[str, str]:
    """dtype and shape in words, by what they speak of: {'dtype': 'bfloat16', 'TS': 'T=S=4096', 'NK': 'N=32 K=4', ...}."""
    words = {"dtype": row["dtype"]}
    for letters in _FIELDS:
        sizes = [row["shape"][letter] for letter in letters]
        names = letters[:1] if letters[0] == "H" else letters  # H alone says that Hv is the same
        joined = f"{'='.join(names)}={sizes[0]}"
        apart = " ".join(f"{letter}={size}" for letter, size in zip(letters, sizes, strict=True))
        words["".join(letters)] = joined if len(set(sizes)) == 1 else apart
    return words


def shared(found: Sequence[Row]) -> dict[str, str]:
    """Those fields that are the same in all rows."""
    first, *others = [fields(row) for row in found]
    return {name: text for name, text in first.items() if all(other[name] == text for other in others)}


def shape(row: Row, without: Sequence[str] = ()) -> str:
    """dtype and shape of a row as text, without these fields."""
    return " ".join(text for name, text in fields(row).items() if name not in without)


def reason(error: str | None) -> str:
    """Why there is no time, in a few words."""
    for pattern, words in _REASONS:
        if found := re.search(pattern, error or "", re.IGNORECASE):
            return found.expand(words)
    text = re.sub(r"^\w+(Error|Exception): ", "", error or "not measured")
    return text if len(text) <= 32 else f"{text[:29].rstrip()}..."


def unit(found: Sequence[Row]) -> tuple[str, float]:
    """(the unit in which the rows' speeds are readable, how many of it a TFLOP/s is)."""
    return ("TFLOP/s", 1) if max(row.get("tflops") or 0 for row in found) >= 1 else ("GFLOP/s", 1e3)


def number(x: float) -> str:
    """Two or three digits."""
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}"


def ours(names: Sequence[str]) -> str | None:
    """Which of the implementations the others are compared with: the first of this library."""
    return next((name for name in names if name.startswith("pallas_fa:")), None)


def source(found: Sequence[Row]) -> str:
    """Where and when rows of one run were measured."""
    first = found[0]
    return f"{first['device']}, jax {first['versions']['jax']}, commit {first['commit']}, {first['run'][:10]}"
