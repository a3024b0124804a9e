"""The results page and the pictures say what the rows say: all of it, losses and failures included."""

import json
import re

import matplotlib.pyplot as plt
import pytest
from PIL import Image

from benchmarks import compiled_report, labels, plot, plot_style, readme_picture, report, row_file, rows
from pallas_fa.backends.hopper import config as hopper
from pallas_fa.backends.mma import config as mma

KEPT = row_file.kept()
REMEDY = "run `make results`"
ATTENTION = [
    path
    for path in KEPT
    if not path.stem.startswith(("training", "scaling", "decode", "generation", "compiled", "ragged"))
]


def test_the_page_is_the_one_that_the_rows_make():
    assert report.PAGE.read_text("utf-8") == report.page(KEPT), REMEDY


def test_a_file_is_one_run_of_one_commit():
    assert KEPT
    for path in KEPT:
        found = rows.read([path])
        for field in ("run", "commit", "device", "suite"):
            assert len({row[field] for row in found}) == 1, (path.name, field)
        assert not any("+dirty" in row["commit"] for row in found), path.name


def test_the_pictures_are_those_that_the_rows_make(monkeypatch):
    """By the digest of the rows that each carries."""
    wanted = {}
    save = lambda figure, path, found, dpi=110: wanted.update({path: plot_style.digest(found)}) or plt.close(figure)
    monkeypatch.setattr(plot_style, "save", save)
    plot.main([])
    assert len(wanted) >= len(ATTENTION) + 2
    for path, digest in wanted.items():
        with Image.open(path) as picture:
            assert picture.info["Description"] == digest, f"{path.name}: {REMEDY}"


def row(implementation, tflops=None, ratio=None, workload="causal", error=None, **more):
    shape = {"B": 1, "T": 8, "S": 8, "N": 2, "K": 2, "H": 64, "Hv": 64}
    common = {"run": "2026-01-02T03:04:05", "suite": "s", "device": "GPU", "versions": {"jax": "1"}, "commit": "abc"}
    what = {"workload": workload, "mask": workload, "series": "", "direction": "forward", "dtype": "bfloat16"}
    times = {"tflops": tflops, "p50_ms": 1 / tflops, "ratio": ratio, "baseline": "jax.nn:cudnn"} if tflops else {}
    return {**common, **what, "shape": shape, "implementation": implementation, "error": error, **times, **more}


ROWS = [
    row("jax.nn:cudnn", 400.0, 1.0),
    row("pallas_fa:mosaic_gpu", 300.0, 0.75),
    row("tokamax:mosaic", 200.0, 0.5),
    row("jax.nn:cudnn", workload="cap", error="NotImplementedError: jax.nn has no soft cap"),
    row("pallas_fa:mosaic_gpu", 50.0, workload="cap"),
    row("tokamax:mosaic", 100.0, workload="cap"),
    row("jax.nn:cudnn", 500.0, 1.0, workload="wrong", error="wrong: not finite where the truth is"),
    row("pallas_fa:mosaic_gpu", 400.0, 0.8, workload="wrong"),
]


def written(tmp_path, found):
    path = tmp_path / "gpu" / "some-rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(each) + "\n" for each in found))
    return path


def test_losses_are_as_plain_as_wins(tmp_path):
    lines = report.page([written(tmp_path, ROWS)]).splitlines()
    assert "| mask | pallas_fa:mosaic_gpu | jax.nn:cudnn | tokamax:mosaic |" in lines
    assert "| causal | 300 | **400 (0.75x) ▼** | 200 (1.50x) |" in lines
    assert "| cap | 50 | no soft cap | **100 (0.50x) ▼** |" in lines
    assert "| wrong | 400 | wrong result |  |" in lines
    assert "| tokamax:mosaic | 2 of 2 | 1.00x | 0.50 to 1.50 | 1 of 2 |  |  |" in lines
    assert "| jax.nn:cudnn | 1 of 3 | 0.75x | 0.75 to 0.75 | 1 of 1 |  |  |" in lines


def test_every_row_is_on_the_page():
    """As many cells with a speed, and with a reason, as rows with and without a time."""
    for path in ATTENTION:
        found, part = rows.read([path]), report.page([path])
        tables = re.findall(r"^\| mask .*\n(?:\|.*\n)+", part, re.MULTILINE)
        cells = [cell.strip() for table in tables for line in table.splitlines()[2:] for cell in line.split("|")[1:-1]]
        speeds = [cell for cell in cells if re.fullmatch(r"(\*\*)?[\d.]+( \([\d.]+x\))?( ▼\*\*)?", cell)]
        assert len(speeds) == sum(rows.has_time(each) for each in found), path.name
        for reason in {labels.reason(each["error"]) for each in found if not rows.has_time(each)}:
            wanted = sum(not rows.has_time(each) and labels.reason(each["error"]) == reason for each in found)
            assert cells.count(reason) == wanted, (path.name, reason)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn in place of files."""
    drawn = []
    monkeypatch.setattr(plot_style, "save", lambda figure, *_, **__: drawn.append(figure))
    yield drawn
    plt.close("all")


@pytest.mark.parametrize("path", ATTENTION, ids=lambda path: path.stem)
def test_every_row_is_on_the_picture(path, figures):
    found = rows.read([path])
    plot.draw(found, path.with_suffix(".png"))
    (figure,) = figures
    assert path.with_suffix(".png").exists()
    bars = [patch for axes in figure.axes for patch in axes.patches]
    gaps = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "x"]
    without = [labels.reason(each["error"]) for each in found if not rows.has_time(each)]
    assert len(bars) == len(found) - len(without) and len(gaps) == len(without)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sorted(text for text in texts if text in without) == sorted(without)
    assert len(texts) == len(found), "each has a number or a reason"
    title = figure.get_suptitle()
    for words in (path.stem, found[0]["device"], found[0]["commit"], *labels.shared(found).values()):
        assert words in title
    assert all(axes.get_title() for axes in figure.axes)


def test_legends_cover_no_axes(figures):
    plot.draw(ROWS, ATTENTION[0])
    (figure,) = figures
    figure.canvas.draw()
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert [text.get_text() for text in legend.get_texts()] == [
        "jax.nn:cudnn",
        "pallas_fa:mosaic_gpu",
        "tokamax:mosaic",
    ]


def test_a_colour_is_of_one_implementation():
    names = {each["implementation"].partition("+")[0] for path in ATTENTION for each in rows.read([path])}
    names.discard("pallas_fa:None")  # the default, in the colour of our kernels
    assert len({plot_style.look(name)["facecolor"] for name in names}) == len(names) >= 5
    dense, plain = (plot_style.look(f"jax.nn:cudnn{form}") for form in ("+dense", ""))
    assert dense["facecolor"] == plain["facecolor"] and dense["hatch"] != plain["hatch"]
    assert plot_style.look("new:peer") == plot_style.look("new:peer")


def test_the_readme_shows_any_number_of_peers(tmp_path, figures):
    readme_picture.draw()
    found = rows.read([readme_picture.ROWS[0]])
    more = [each | {"implementation": "peer:three"} for each in found if each["implementation"] == "jax.nn:cudnn"]
    path = written(tmp_path, found + more)
    readme_picture.draw(files=[path, readme_picture.ROWS[1]])
    before, after = ([text.get_text() for text in figure.legends[0].get_texts()] for figure in figures)
    assert "pallas_fa" in before and after == [*before, "peer:three"]
    bars = [sum(len(axes.patches) for axes in figure.axes) for figure in figures]
    assert bars[1] - bars[0] == 9, "at three head dims and three lengths"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 48.00GiB", "out of memory"),
        ("not run: needs 8.0 GiB of temporary memory", "needs 8.0 GiB"),
        ("not compiled: the budget was spent", "no time left"),
        ("wrong: not finite where the truth is", "wrong result"),
        ("ValueError: short", "short"),
        ("ValueError: " + "a long tale " * 9, "a long tale a long tale a lon..."),
        (None, "not measured"),
    ],
)
def test_reasons_are_short(error, words):
    assert labels.reason(error) == words


def test_what_the_compiler_says_is_a_table_of_each_kind_of_kernel():
    common = {"suite": "compiled", "H": 64, "causal": True, "compile_s": 3.21, "error": None}
    said = {"registers": 168, "spilled": 36, "shared_memory": 196608}
    wide = {"kernel": "hopper forward", "tiles": str(hopper.ForwardConfig(block_kv=176, ping_pong=True))}
    plain = {"kernel": "mma forward", "tiles": str(mma.ForwardConfig())}
    found = [
        {**common, **said, **wide, "architecture": "sm_90a"},
        {**common, **said, **plain, "architecture": "sm_80"},
        {**common, **said, **plain, "architecture": "sm_120a", "spilled": 4},
    ]
    text = "\n".join(compiled_report.tables(found))
    assert "| hopper forward | 64 | yes | `block_kv=176, ping_pong=True` | 168 | 36 | 192 | 3.2 |" in text
    assert "| tiles | sm_80 | sm_120a |" in text
    assert "| mma forward | 64 | yes | the defaults | 168, 36, 192 | 168, 4, 192 |" in text
