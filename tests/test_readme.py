"""The pages: every Python block runs as it is written, each on its own; links lead somewhere; figures are those of rows."""

import json
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "models" / "README.md"]
PAGES = [*GUIDES, *OTHERS, *sorted((ROOT / "docs" / "decisions").rglob("*.md"))]
# Every other guide shows code.
WITHOUT_CODE = {"benchmarks.md", "results.md", "scaling.md", "vocabulary.md"}


def _blocks(page):
    """(line of the first line of code, code) of each ```python block."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 2, match[1]


BLOCKS = [
    pytest.param(page, *block, id=f"{page.relative_to(ROOT)}:{block[0]}") for page in PAGES for block in _blocks(page)
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("page, line, code", BLOCKS)
def test_block_runs(page, line, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what a block writes stays out of the repository
    # Blank lines in front, so that a traceback shows the line of the page.
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_guides_show_code(page):
    found = list(_blocks(page))
    assert len(found) == page.read_text(encoding="utf-8").count("```python")  # the pattern finds them all
    assert bool(found) == (page.name not in WITHOUT_CODE)


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) < 150


# ---- links ------------------------------------------------------------------------------------------------------------


def _prose(page):
    """The text of a page without code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`(?:[^`\n]|\n(?!\n))*`", "code", text)


def _links(page):
    return re.findall(r"\]\(([^)\s]+)\)", _prose(page))


def _anchors(page):
    """What GitHub calls the headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken(page, target):
    """Why a link to `target` on `page` leads nowhere, or None."""
    if re.match(r"https?://", target):
        return None
    path, _, anchor = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    if not found.exists():
        return f"{target}: no such file"
    return f"{target}: no such heading" if anchor and anchor not in _anchors(found) else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    assert not [reason for target in _links(page) if (reason := _broken(page, target))]


def test_links_that_lead_nowhere_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A heading, with `code`\n[a](nothing.md) [b](#a-heading-with-code) [c](#no) `[d](code.md)`\n")
    assert _links(page) == ["nothing.md", "#a-heading-with-code", "#no"]
    assert _broken(README, "nothing.md") and _broken(page, "#no") and not _broken(page, "#a-heading-with-code")


def test_every_page_is_linked():
    """From the README or a page that is."""
    reached, new = set(), {README}
    while new:
        reached |= new
        targets = {(page.parent / link.partition("#")[0]).resolve() for page in new for link in _links(page)}
        new = {path for path in targets if path.suffix == ".md" and path.is_file()} - reached
    assert reached == set(PAGES)


def test_records_have_the_form_of_their_index():
    """The index names each record by its own title, and a record says first what it is about."""
    index = ROOT / "docs" / "decisions" / "README.md"
    listed = re.findall(r"^- \[(.+)\]\((\S+\.md)\)$", index.read_text(encoding="utf-8"), re.MULTILINE)
    records = {path: path.read_text(encoding="utf-8") for path in index.parent.rglob("*.md") if path != index}
    assert len(listed) == len(records)
    for title, target in listed:
        assert records[index.parent / target].startswith(f"# {title}\n\n**Context.** "), target


def test_the_page_of_the_package_stands_alone():
    """A registry shows it apart from the repository: no relative link or image works there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = ROOT / project["readme"]
    assert page in GUIDES  # its blocks run
    assert all(re.match(r"https://|#", target) for target in _links(page))


# ---- figures ----------------------------------------------------------------------------------------------------------


def test_speed_in_the_readme_is_that_of_the_rows():
    """The table is made of `ratio`: ours over the peer's, the least and the greatest over lengths."""
    lines = ["| beside | | H=64 | H=128 | H=256 |", "|---|---|---|---|---|"]
    rows = ROOT / "benchmarks" / "results" / "nvidia-h200"
    for peer, of in {"cuDNN": "jax.nn:cudnn", "FlashAttention-3": "dew_flash_attn:fa3"}.items():
        for direction in ("forward", "backward"):
            text = (rows / f"hopper-{direction}.jsonl").read_text(encoding="utf-8")
            found = {(r["implementation"], r["workload"]): r.get("ratio") for r in map(json.loads, text.splitlines())}
            for mask in ("full", "causal"):
                cells = []
                for dim in (64, 128, 256):
                    names = [f"h{dim}-{mask}-{length}" for length in (1024, 4096, 16384)]
                    ratios = [found["pallas_fa:mosaic_gpu", name] / found[of, name] for name in names]
                    cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
                lines.append(f"| {peer} | {direction}, {mask} | {' | '.join(cells)} |")
    assert "\n".join(lines) in README.read_text(encoding="utf-8"), "The rows say:\n" + "\n".join(lines)


def test_records_that_code_cites_exist():
    group = "|".join(path.name for path in (ROOT / "docs" / "decisions").iterdir() if path.is_dir())
    cited = re.compile(rf"\b((?:{group})/[a-z0-9][a-z0-9-]+)\b(?!\.py)")
    found = {x for path in (ROOT / "pallas_fa").rglob("*.py") for x in cited.findall(path.read_text())}
    assert len(found) > 20
    assert not [x for x in found if not (ROOT / "docs" / "decisions" / f"{x}.md").exists()]
