"""What the models are trained on, and the yardstick that is fitted to it."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from models.baseline import OrderTwo
from models.data import Corpus, load_corpus, load_digits
from models.errors import UsageError


def test_order_two_against_counts_by_hand():
    """Text "abababac": what follows "ab", "ba" and, unseen, "ca"."""
    model = OrderTwo(np.frombuffer(b"abababac", np.uint8))
    # Order 0: a 4, b 3, c 1 of 8, 3 kinds. Order 1 after a: b 3, c 1 of 4, 2 kinds; after b: a 3 of 3, 1 kind.
    p0 = {"a": (4 + 3 / 256) / 11, "b": (3 + 3 / 256) / 11, "c": (1 + 3 / 256) / 11}
    b_after_a, c_after_a = (3 + 2 * p0["b"]) / 6, (1 + 2 * p0["c"]) / 6
    a_after_b = (3 + 1 * p0["a"]) / 4
    # Order 2 after "ab": a 3 of 3, 1 kind; after "ba": b 2, c 1 of 3, 2 kinds; "ca" was never seen.
    a_after_ab = (3 + 1 * a_after_b) / 4
    b_after_ba, c_after_ba = (2 + 2 * b_after_a) / 5, (1 + 2 * c_after_a) / 5
    bits = model.bits(np.frombuffer(b"abac", np.uint8))
    np.testing.assert_allclose(bits, [-math.log2(a_after_ab), -math.log2(c_after_ba)], rtol=1e-12)
    bits = model.bits(np.frombuffer(b"bab", np.uint8))
    np.testing.assert_allclose(bits, [-math.log2(b_after_ba)], rtol=1e-12)
    bits = model.bits(np.frombuffer(b"cab", np.uint8))  # backs off to what follows "a"
    np.testing.assert_allclose(bits, [-math.log2(b_after_a)], rtol=1e-12)


def test_order_two_is_a_distribution():
    model = OrderTwo(np.frombuffer(b"abababac" * 3, np.uint8))
    for context in (b"ab", b"ca", b"zz", b"cz"):
        text = b"".join(context + bytes([byte]) for byte in range(256))
        bits = model.bits(np.frombuffer(text, np.uint8))[::3]
        assert (2.0**-bits).sum() == pytest.approx(1, abs=1e-9)


def test_the_standard_library_is_read_without_what_was_installed():
    first, second = load_corpus(None, context=128), load_corpus(None, context=128)
    assert first.digest() == second.digest()
    assert len(first.train) > 2e6 and 0.04 < len(first.validation) / (len(first.train) + len(first.validation)) < 0.2
    text = first.train.tobytes() + first.validation.tobytes()
    assert json.__doc__ is not None and json.__doc__.encode() in text
    assert pytest.__file__ is not None and Path(pytest.__file__).read_bytes() not in text


def test_files_are_split_whole_and_each_goes_to_one_side(tmp_path):
    for index in range(40):
        (tmp_path / f"{index:02}.txt").write_text(f"file {index} " * 50)
    corpus = load_corpus(str(tmp_path), context=32)
    sides = [set(side.tobytes().split(b"\x00")) for side in (corpus.train, corpus.validation)]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {file.read_bytes() for file in tmp_path.iterdir()}
    assert len(sides[1]) == 2  # a twentieth of forty files


def test_a_single_file_is_cut_so_that_both_sides_get_some(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(1, 201)) * 10)
    corpus = load_corpus(str(file), context=32)
    assert len(corpus.validation) == 100
    assert len(corpus.train.tobytes().replace(b"\x00", b"")) == 1900


@pytest.mark.parametrize("size", [1, 32, 1000])
def test_what_is_said_of_a_text_adds_up_to_its_bytes(tmp_path, size):
    """The bytes put between the pieces of a file are none of its."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * size)
    try:
        said = load_corpus(str(file), context=2).source
    except UsageError as error:  # where it is too short
        said = str(error)
    counts = re.search(r"([\d,]+) bytes to train on and ([\d,]+) held out", said)
    assert counts is not None and sum(int(count.replace(",", "")) for count in counts.groups()) == size, said


def test_batches_depend_on_seed_and_step_alone():
    corpus = Corpus(np.arange(256, dtype=np.uint8), np.arange(64, dtype=np.uint8), "count", 1)
    batch = corpus.batch(seed=1, step=7, batch=50, context=16)
    np.testing.assert_array_equal(batch, corpus.batch(seed=1, step=7, batch=50, context=16))
    assert (np.diff(batch.astype(int), axis=1) == 1).all()  # windows of the text
    for seed, step in [(1, 8), (2, 7)]:
        assert (batch != corpus.batch(seed=seed, step=step, batch=50, context=16)).any()
    edges = np.concatenate([corpus.batch(seed=0, step=step, batch=500, context=250) for step in range(4)])
    assert edges.min() == 0 and edges.max() == 255  # the first and the last byte are reached


def test_validation_windows_are_disjoint_and_bounded():
    corpus = Corpus(np.zeros(9, np.uint8), np.arange(100, dtype=np.uint8), "count", 1)
    targets = corpus.validation_windows(context=8, at_most=1000)[:, 1:]
    np.testing.assert_array_equal(targets.ravel(), np.arange(2, 2 + 12 * 8))  # all that fit, in order
    few = corpus.validation_windows(context=8, at_most=24)[:, 1:]
    assert few.shape == (3, 8) and len(np.unique(few)) == 24
    assert few.min() == 2 and few.max() == 97  # from one end to the other


def test_digits_are_split_and_moved_by_a_pixel_at_most():
    digits = load_digits()
    assert digits.train_images.shape == (1438, 8, 8, 1) and digits.validation_images.shape == (359, 8, 8, 1)
    images, labels = digits.batch(seed=0, step=3, batch=64)
    again, _ = digits.batch(seed=0, step=3, batch=64)
    np.testing.assert_array_equal(images, again)
    assert images.shape == (64, 8, 8, 1) and images.max() <= 1 and labels.dtype == np.int32
    padded = np.pad(digits.train_images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    moved = np.stack([padded[:, d : d + 8, r : r + 8] for d in range(3) for r in range(3)], axis=1)  # [n, 9, 8, 8, 1]
    moves = set()
    for image, label in zip(images, labels, strict=True):
        found = np.argwhere((moved == image).all(axis=(2, 3, 4)))
        assert any(digits.train_labels[index] == label for index, _ in found)
        moves |= {move for _, move in found}
    assert len(moves) == 9
