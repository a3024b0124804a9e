"""The best configurations of the tables compile for every kind of GPU, within its shared memory, spill few registers, and
wait for no matmul before the next; and all configurations do where `python -m tests.elsewhere.rows` compiled them last.

The compilers are those of JAX's CUDA wheels, which run without a GPU where something stands for the driver.
"""

import dataclasses

import pytest

from benchmarks.row_file import RESULTS
from benchmarks.rows import read
from pallas_fa.backends.hopper import config as hopper
from pallas_fa.backends.mma import config as mma
from tests.elsewhere.environment import environment
from tests.elsewhere.fusions import SHAPES
from tests.elsewhere.kernels import kernels, lines_of
from tests.elsewhere.targets import TARGETS
from tests.hopper_tiles import BY_TICKETS, FORWARD_BY_TICKETS, PAIRS_IN_TURN

SPILLED = 32  # bytes that a kernel may spill
# What may spill more, in steps of 32 bytes, and for which GPUs. What it costs was measured on Hopper alone.
EXCEPTIONS = {
    ("mma forward", 128, mma.ForwardConfig(1, 128, 64)): {"sm_80": 128, "sm_90a": 128, "sm_100a": 160},
    ("mma backward dk dv dq", 64, mma.FusedBackwardConfig(1, 128, 32)): dict.fromkeys(
        ("sm_86", "sm_89", "sm_120a"), 96
    ),
    ("mma backward dk dv dq", 128, mma.FusedBackwardConfig(2, 128, 32)): {"sm_80": 96},
    ("mma backward dk dv dq", 128, mma.FusedBackwardConfig(2, 128, 32, stages=1)): {
        "sm_80": 96,
        **dict.fromkeys(("sm_90a", "sm_100a"), 64),
    },
    ("mma backward dk dv dq", 256, mma.FusedBackwardConfig(2, 64, 32, stages=1)): {"sm_80": 64},
    # The figures for 99 KB in backward/mma-tiles are of kernels that spill what they do on sm_90a: up to 88 bytes.
    **dict.fromkeys(
        (
            ("mma backward dk dv dq", 128, mma.FusedBackwardConfig(2, 128, 16, stages, values_in_registers=True))
            for stages in (1, 2)
        ),
        dict.fromkeys(TARGETS, 96),
    ),
    ("mma backward dk dv dq", 256, mma.FusedBackwardConfig(2, 64, 16, stages=1, values_in_registers=True)): {
        "sm_80": 64,
        **dict.fromkeys(("sm_86", "sm_89", "sm_90a", "sm_100a"), 96),
        "sm_120a": 128,
    },
    ("mma backward dk dv", 64, mma.BackwardConfig(1, 128, 32)): {
        **dict.fromkeys(("sm_80", "sm_100a", "sm_120a"), 64),
        **dict.fromkeys(("sm_86", "sm_89"), 96),
    },
    ("mma backward dk dv", 128, mma.BackwardConfig(2, 64, 64)): {"sm_80": 96, "sm_90a": 256, "sm_100a": 160},
    ("mma backward dq", 128, mma.BackwardConfig(1, 128, 32, stages=1)): {"sm_80": 128, "sm_90a": 128, "sm_100a": 128},
    ("mma backward dq", 256, mma.BackwardConfig(1, 64, 32, stages=1)): {"sm_90a": 64, "sm_100a": 64, "sm_120a": 128},
    # None of it in the loops over key blocks (evidence: forward/persistent-ctas, forward/by-tickets).
    **{
        ("hopper forward", 128, tiles): {"sm_90a": 64}
        for tiles in (
            dataclasses.replace(PAIRS_IN_TURN, q_block_pairs=2),
            dataclasses.replace(PAIRS_IN_TURN, pin_softmax=True),
            dataclasses.replace(PAIRS_IN_TURN, pin_softmax=True, l2_head_group=8, persistent_ctas=0),
        )
    },
    ("hopper forward, lengths", 128, FORWARD_BY_TICKETS): {"sm_90a": 64},
    # Faster than what spills nothing (evidence: forward/arrays-of-masks).
    (
        "hopper forward, segments",
        128,
        hopper.ForwardConfig(2, l2_head_group=1, q_block_pairs=4, ping_pong=True),
    ): {"sm_90a": 96},
    # None of it in the loop over full tiles; faster than a CTA for each block (evidence: backward/persistent-ctas).
    **{
        (kernel, 64, dataclasses.replace(BY_TICKETS, ds_stages=ds_stages)): {"sm_90a": 96}
        for kernel, ds_stages in (("hopper backward", 1), ("hopper backward", 2), ("hopper backward, long", 2))
    },
    # Nearly all of it in the loop over boundary tiles; faster than two passes (evidence: backward/one-pass-at-192). The last
    # is taken where arrays leave room for no other, and not timed.
    **{
        (
            "hopper backward, values of 128",
            192,
            hopper.BackwardConfig(2, 64, stages, ds_stages, stagger=2, p_before_dp=True),
        ): {"sm_90a": spilled}
        for stages, ds_stages, spilled in (((2, 1), 2, 128), ((2, 2), 1, 96), ((2, 1), 1, 192), ((1, 1), 1, 256))
    },
    # Taken where arrays leave no room for the first tile of H=96; not timed.
    ("hopper backward", 96, hopper.BackwardConfig(2, 64, (1, 1), 1, stagger=2, statistics_last=True)): {"sm_90a": 96},
    ("hopper backward", 128, hopper.BackwardConfig(2, 64, (2, 1), 1, stagger=2)): {"sm_90a": 64},
    ("hopper backward", 128, hopper.BackwardConfig(2, 64, (1, 1), 1, stagger=2)): {"sm_90a": 96},
    ("hopper backward", 128, hopper.BackwardConfig(1, 64, (1, 1), 1)): {"sm_90a": 96},
    ("hopper backward", 256, hopper.BackwardConfig(1, 64, (1, 1), 2, statistics_last=True)): {"sm_90a": 192},
    # The load warpgroup has 56 registers to convert; with 40 less is spilled, and it is slower
    # (evidence: decode/narrow-keys).
    **{
        (
            "hopper forward, prompt in pages of float8_e4m3fn",
            128,
            hopper.ForwardConfig(
                pin_softmax=False, ping_pong=True, rescale_under_qk=True, kv_splits=parts, split_heads=16
            ),
        ): {"sm_90a": 128}
        for parts in (8, 2)
    },
    ("hopper backward", 512, hopper.BackwardConfig(2, 64, (1, 1), chunk_slots=4)): {"sm_90a": 96},
}
# What waits for each matmul before the next: taken where arrays leave no room for other tiles; not timed.
SERIALISED = {
    ("hopper backward", 128, str(hopper.BackwardConfig(1, 64, stages, ds_stages)))
    for stages, ds_stages in (((2, 2), 2), ((2, 2), 1), ((1, 1), 1))
}


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """The environment variables of a process that compiles; or the reason why there can be none."""
    return environment(tmp_path_factory.mktemp("elsewhere"))


def cannot_compile(variables, record_property):
    """Whether there are no compilers here, for a reason that is known and recorded."""
    if not isinstance(variables, str):
        return False
    record_property("not compiled", variables)
    assert "compiler" in variables or "can't be installed" in variables
    return True


@pytest.mark.full
@pytest.mark.parametrize("architecture", TARGETS)
def test_the_best_configurations_compile_and_fit(variables, architecture, record_property):
    if cannot_compile(variables, record_property):
        return
    found = kernels(architecture, variables, only_best=True)
    assert len(found) > 20
    assert_fit(found, architecture)


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_configuration_fitted_when_all_were_compiled(architecture):
    found = rows_of(architecture)
    assert len(found) > 70
    assert_fit(found, architecture)


@pytest.mark.parametrize("architecture", TARGETS)
def test_what_may_spill_more_does(architecture):
    found = {named(row) for row in rows_of(architecture) if row["spilled"] > SPILLED}
    assert not {kernel for kernel, spilled in exceptions(architecture).items() if spilled} - found


def rows_of(architecture):
    return [row for row in read([RESULTS / "elsewhere" / "compiled.jsonl"]) if row["architecture"] == architecture]


def named(kernel):
    return kernel["kernel"], kernel["H"], kernel["tiles"]


def exceptions(architecture):
    """Bytes that kernels may spill there, by what `named` returns of them."""
    return {(kernel, H, str(tiles)): spilled.get(architecture, 0) for (kernel, H, tiles), spilled in EXCEPTIONS.items()}


def assert_fit(found, architecture):
    target, more = TARGETS[architecture], exceptions(architecture)
    too_much = []
    for kernel in found:
        assert kernel["architecture"] == architecture
        assert kernel["shared_memory"] <= target.gpu.shared_memory, kernel
        assert kernel["registers"] <= 255
        assert not kernel["serialised"] or named(kernel) in SERIALISED, kernel
        if kernel["spilled"] > max(SPILLED, more.get(named(kernel), 0)):
            too_much.append(kernel)
    assert not too_much, "\n".join(map(str, too_much))


@pytest.mark.full
def test_no_pass_transposes_row_sums_while_it_computes_them(variables, record_property):
    if cannot_compile(variables, record_property):
        return
    found = lines_of("tests.elsewhere.fusions", variables)
    assert len(found) == len(SHAPES)
    for shape, passes in found:
        (operations,) = passes
        assert "transpose" not in operations, shape
