"""benchmarks/overhead.py measures the tree that it is told to, in figures that are all there."""

import pytest

from benchmarks import overhead


def test_two_trees_are_compared(capsys, monkeypatch):
    monkeypatch.chdir(overhead.ROOT)
    overhead.main([str(overhead.ROOT), ".", "--rounds", "1", "--cases", "import", "xla forward"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == [".", ":", str(overhead.ROOT)]
    names = ["import after jax, ms", "first trace, ms", "trace, ms", "first lowering, ms", "lowering, ms"]
    assert len(lines) == len(names) and all(name in line for name, line in zip(names, lines, strict=True))
    for line in lines:
        before, after, ratio = map(float, line.split()[-3:])
        assert before > 0 and after > 0 and ratio == pytest.approx(after / before, rel=0.02)


def test_jit_saves_most_of_the_dispatch():
    found = overhead.measured(overhead.ROOT, "dispatch")
    assert 0 < 2 * found["jitted call, us"] < found["call without jit, us"]
    assert found["jitted sum, us"] > 0


def test_a_tree_without_the_library_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="there is no pallas_fa in it. Name the root of a checkout"):
        overhead.measured(tmp_path, "import")
