"""Checksums of the files in a folder, in a file that `sha256sum --check` reads too."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from models.folder import write_whole

SUMS = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Writes the checksum of every file under `folder` to its SHA256SUMS."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = [file.relative_to(folder).as_posix() for file in files]
    lines = [f"{digest}  {name}\n" for digest, name in zip(_digests(files), names, strict=True)]
    write_whole(folder / SUMS, "".join(lines))


def has_checksums(folder: Path) -> bool:
    return (folder / SUMS).exists()


def find_damage(folder: Path) -> str | None:
    """Says which file under `folder` is not as its SHA256SUMS has it; None if all are."""
    text = (folder / SUMS).read_text(encoding="utf-8", errors="replace")  # damage need not be UTF-8
    lines = [line.partition("  ") for line in text.rstrip("\n").split("\n")]
    files = [folder / name for _, _, name in lines]
    if missing := next((file for file in files if not file.is_file()), None):
        return f"{str(missing)!r} is missing"
    for (expected, _, _), digest, file in zip(lines, _digests(files), files, strict=True):
        if digest != expected:
            return f"{str(file)!r} differs from its checksum in {SUMS}"
    return None


def _digests(files: list[Path]) -> list[str]:
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter's lock to other threads
        return list(pool.map(_digest, files))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
