"""benchmarks/training.py: rows of the training step with one attention or another, and of the first losses."""

import json

import numpy as np
import pytest

from benchmarks import training
from benchmarks.loss_curves import KIND

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(rows, folder) of one run, in which one of three attentions can't run here."""
    folder = tmp_path_factory.mktemp("training")
    out = folder / "rows.jsonl"
    argv = ["--suite", "tiny", "--steps", str(STEPS), "--rounds", "2", "--target-ms", "1", "--out", str(out)]
    argv += ["--implementations", "jax.nn:xla", "pallas_fa:mosaic_gpu", "pallas_fa:xla"]
    return training.main(argv), folder


def test_a_row_for_each_attention_and_context(run):
    found, folder = run
    assert [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()] == found
    assert (folder / "rows.png").stat().st_size > 0
    times = [row for row in found if row["kind"] == "training"]
    assert len(times) == 2 * 3
    for row in times:
        if row["implementation"] == "pallas_fa:mosaic_gpu":
            assert "mosaic_gpu" in row["error"]
            continue
        assert row["error"] is None
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["context"] / row["p50_ms"] * 1e3, rel=1e-3)
        assert row["ratio"] == 1.0 if row["implementation"] == "jax.nn:xla" else row["ratio"] > 0
        assert row["peak_bytes"] >= row["argument_bytes"]


def test_all_attentions_learn_alike(run):
    curves = {row["implementation"]: row for row in run[0] if row["kind"] == KIND}
    assert len(curves) == 3
    assert curves["pallas_fa:mosaic_gpu"]["error"] is not None
    ours, base = (curves[name] for name in ("pallas_fa:xla", "jax.nn:xla"))
    assert len(ours["losses"]) == len(base["losses"]) == STEPS
    np.testing.assert_allclose(ours["losses"], base["losses"], rtol=1e-4)
    assert base["losses"][-1] < base["losses"][0]
    assert ours["max_difference"] == pytest.approx(np.abs(np.subtract(ours["losses"], base["losses"])).max(), abs=1e-6)
