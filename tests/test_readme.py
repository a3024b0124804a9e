"""Every Python block of the README runs as it is written, each on its own."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


def _blocks():
    """(line of the first line of code, code) of each ```python block."""
    text = README.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 2, match[1]


@pytest.mark.parametrize("line, code", [pytest.param(*block, id=f"line {block[0]}") for block in _blocks()])
def test_block_runs(line, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what a block writes stays out of the repository
    # Blank lines in front, so that a traceback shows the line of the README.
    exec(compile("\n" * (line - 1) + code, str(README), "exec"), {"__name__": "__main__"})


def test_there_are_blocks():
    """The pattern still finds them."""
    blocks = list(_blocks())
    assert len(blocks) == README.read_text(encoding="utf-8").count("```python") >= 4
