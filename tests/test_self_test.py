"""The program that checks the kernels on a GPU which no developer has: its tables, here with XLA in the place of kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import self_test

FEW = tuple(case._replace(T=case.T // 8) for case in self_test.CASES if case.name in ("full", "sinks"))


def test_a_right_implementation_passes():
    lines = list(self_test.error_table("reference", FEW))
    assert len(lines) == 2 + len(FEW)
    assert all(well for _, well in lines)


def test_wrong_results_fail(monkeypatch):
    right = self_test.dot_product_attention

    def wrong(*args, implementation, **keywords):
        out = right(*args, implementation=implementation, **keywords)
        return out * 1.1 if implementation == "reference" and out.dtype == "bfloat16" else out

    monkeypatch.setattr(self_test, "dot_product_attention", wrong)
    *_, (line, well) = self_test.error_table("reference", FEW[:1])
    assert not well and "FAILED" in line


def test_an_error_fails_and_is_said():
    *_, (line, well) = self_test.error_table("mosaic_gpu", FEW[:1])  # on a CPU
    assert not well and "NotImplementedError" in line


def test_the_kernels_take_every_case():
    for case in self_test.CASES:
        shapes = (case.T, case.N, case.H), (case.S, case.K, case.H), (case.S, case.K, case.Hv)
        arrays = {name: make(np.random.default_rng(0), case.T, case.S, case.N) for name, make in case.arrays.items()}
        qkv = (jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16) for shape in shapes)
        said = pallas_fa.explain(*qkv, **case.keywords, **arrays, implementation="mma").splitlines()[1]
        assert said.startswith("mma: runs this call") and "computes its gradients" not in said


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(self_test, "cuda_devices", list)
    assert self_test.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_options_are_checked():
    with pytest.raises(SystemExit):
        self_test.main(["--only", "nothing"])
