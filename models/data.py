"""What the models are trained on: text as bytes, and scikit-learn's digits.

Batches are pure functions of (seed, step): a resumed run sees exactly the data that it would have seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from models.errors import UsageError

SPLIT_SEED = 0  # of the split, not of the run: runs with different seeds stay comparable
VALIDATION_SHARE = 0.05
END_OF_FILE = b"\x00"  # between files; never part of a Python source
FEWEST_DOCUMENTS = 20  # with fewer files than this, files are cut, so that both splits get a part of each


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, in two splits of whole documents."""

    train: np.ndarray  # uint8 [bytes]
    validation: np.ndarray  # uint8 [bytes]
    source: str  # where it is from, and how many bytes
    files: int

    def digest(self) -> str:
        """Names these very bytes in this very split, so that a resumed run can tell whether they have changed."""
        return hashlib.blake2b(self.train.tobytes() + b"|" + self.validation.tobytes(), digest_size=16).hexdigest()

    def batch(self, seed: int, step: int, batch: int, context: int) -> np.ndarray:
        """uint8 [batch, context + 1]: random windows of the training split; inputs are [:, :-1], targets [:, 1:]."""
        starts = np.random.default_rng((seed, step)).integers(0, len(self.train) - context, batch)
        return self.train[starts[:, None] + np.arange(context + 1)]

    def validation_starts(self, context: int, at_most: int) -> np.ndarray:
        """int64 [windows]: disjoint windows, evenly spread, whose targets together are at most `at_most` bytes.

        Window i reads validation[start : start + context] and predicts validation[start + 1 : start + context + 1].
        Starts are 1 or more, so that each target has the two previous bytes which an order-2 model reads.
        """
        available = (len(self.validation) - 2) // context
        wanted = max(1, min(available, at_most // context))
        return 1 + context * np.unique(np.linspace(0, available - 1, wanted).astype(np.int64))

    def validation_windows(self, context: int, at_most: int) -> np.ndarray:
        """uint8 [windows, context + 1]."""
        starts = self.validation_starts(context, at_most)
        return self.validation[starts[:, None] + np.arange(context + 1)]


def to_bytes(text: str) -> bytes:
    """Also the bytes of a command line that is not UTF-8."""
    return text.encode(errors="surrogateescape")


def load_corpus(path: str | None, context: int) -> Corpus:
    """The file or folder at `path`, or the Python standard library's own sources."""
    if path is None:
        root, name = Path(sysconfig.get_path("stdlib")), "the Python standard library's sources"
        files = [file for file in root.rglob("*.py") if not _is_installed(file.relative_to(root))]
        remedy = "this Python comes without its sources; name a file or folder with --data"
    else:
        root, name = Path(path), path
        if not root.exists():
            raise UsageError(f"--data={path!r} does not exist; it must be a file or a folder of text: check the path.")
        files = [root] if root.is_file() else [file for file in root.rglob("*") if not is_hidden(file, root)]
        remedy = "name a file or a folder that holds text"
    # A fixed order, whatever the file system's own: the split depends on it.
    files = sorted((file for file in files if file.is_file()), key=lambda file: file.relative_to(root).as_posix())
    documents = [content for file in files if (content := _read(file, path))]
    if not documents:
        raise UsageError(f"--data={path!r} holds no text: it has no files, or only empty ones; {remedy}.")
    train, validation = _split(documents)
    # Of the text: END_OF_FILE is no byte of it.
    sizes = f"{sum(map(len, train)):,} bytes to train on and {sum(map(len, validation)):,} held out"
    corpus = Corpus(_join(train), _join(validation), f"{name}: {sizes}", len(documents))
    shortest = context + 2  # validation_starts begins at 1 and needs one byte past the window
    if min(len(corpus.train), len(corpus.validation)) < shortest:
        raise UsageError(
            f"--data={path!r} is too short: it gives {sizes}, and --context={context} needs at least {shortest} of "
            "each; give more text or a smaller --context."
        )
    return corpus


def _is_installed(relative: Path) -> bool:
    return any(part in ("site-packages", "dist-packages", "__pycache__") for part in relative.parts)


def is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _read(file: Path, path: str | None) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--data={path!r}: {str(file)!r} can't be read ({error.strerror}); every file must be readable: change "
            "its permissions, or name a folder without it."
        ) from error


def _split(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """(train, validation): random whole documents fill the validation split until it has its share of the bytes."""
    if len(documents) < FEWEST_DOCUMENTS:
        documents = [piece for document in documents for piece in _pieces(document)]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
    shuffled = [documents[index] for index in order]
    sizes = np.cumsum([len(document) for document in shuffled])
    held_out = 1 + int(np.searchsorted(sizes, VALIDATION_SHARE * sizes[-1]))
    return shuffled[held_out:], shuffled[:held_out]


def _pieces(document: bytes) -> list[bytes]:
    size = -(-len(document) // FEWEST_DOCUMENTS)
    return [document[start : start + size] for start in range(0, len(document), size)]


def _join(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(END_OF_FILE.join(documents), np.uint8)


@dataclasses.dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits, 8x8 pixels: images float32 [n, 8, 8, 1] in [0, 1], labels int32 [n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    validation_images: np.ndarray
    validation_labels: np.ndarray

    def batch(self, seed: int, step: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """(images [batch, 8, 8, 1], labels [batch]): a random draw, each image moved by up to one pixel each way."""
        rng = np.random.default_rng((seed, step))
        chosen = rng.choice(len(self.train_labels), batch, replace=batch > len(self.train_labels))
        padded = np.pad(self.train_images[chosen], ((0, 0), (1, 1), (1, 1), (0, 0)))  # [batch, 10, 10, 1]
        down, right = rng.integers(0, 3, (2, batch, 1, 1))
        rows, columns = np.arange(8)[:, None] + down, np.arange(8)[None, :] + right
        return padded[np.arange(batch)[:, None, None], rows, columns], self.train_labels[chosen]


def load_digits() -> Digits:
    """All 1797 digits; a random fifth, the same in every run, is held out."""
    from sklearn.datasets import load_digits as load  # takes a second to import, and text needs none of it

    bunch = load()
    images = (bunch.images[..., None] / 16).astype(np.float32)  # pyright: ignore[reportAttributeAccessIssue]
    labels = bunch.target.astype(np.int32)  # pyright: ignore[reportAttributeAccessIssue]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    held_out, kept = np.split(order, [len(order) // 5])
    return Digits(images[kept], labels[kept], images[held_out], labels[held_out])
