"""Pieces of the generated results page."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Row

_ROOT = "../benchmarks/results"  # from docs/


def heading(path: Path, found: Sequence[Row]) -> str:
    """Title of a file of rows, when and with what it was measured, and its picture."""
    first, where = found[0], f"{_ROOT}/{path.parent.name}"
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        f"### {path.stem}\n",
        f"{first['run'][:10]}, commit `{first['commit']}`; {versions}. Rows: [{path.name}]({where}/{path.name}).\n",
    ]
    pictures = sorted(path.parent.glob(f"{path.stem}.png")) + sorted(path.parent.glob(f"{path.stem}.model.png"))
    return "\n".join([*lines, *(f"![{path.stem}]({where}/{picture.name})\n" for picture in pictures)])


def slower(text: str, ratio: float) -> str:
    """A cell of a peer; marked where ours is slower."""
    return f"**{text} ▼**" if ratio < 1 else text


def table(head: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table, whose first columns, as many as `words`, are text, and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)) + "\n"
