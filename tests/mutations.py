"""Faults planted one at a time: each must be caught by the tests named beside it, as `make test` runs them.

usage: python -m tests.mutations [NUMBER ...]

In a copy of the tree, so that nothing here changes; first without a fault, where the tests must pass. Prints a line for
each, and exits with 1 if one survives.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tqdm import tqdm

ROOT = pathlib.Path(__file__).parent.parent


class Mutation(NamedTuple):
    """`old` becomes `new` in a file of pallas_fa/; `tests` are pytest arguments."""

    file: str
    old: str
    new: str
    tests: str


CONVERT, LOAD_NARROW = (f"backends/hopper/forward/{name}.py" for name in ("convert", "load_narrow"))
OF_EACH = "backends/hopper/backward/by_gradient.py"
CONVERTED = "tests/test_narrow_on_hopper.py -k where_each"
NARROW_ON_HOPPER = "tests/test_narrow_on_hopper.py -k free_of_races"
INTERVALS = "tests/test_documents.py -k ranges"
MASKS = "tests/test_masks.py tests/test_mask_ranges.py tests/test_mask_parts.py"
SCHEDULE = "tests/test_schedule.py"
FORWARD = "tests/test_kernel_interpreted.py -k interpreted"
COLUMNS = "tests/test_kernel_interpreted.py -k arrays_of_queries"
SPLIT = "tests/test_kernel_interpreted.py -k split_heads"
IN_TURNS = "tests/test_kernel_interpreted.py -k output"
BACKWARD = "tests/test_backward_interpreted.py -k free_of_races"
ORDER = "tests/test_backward_plan.py -k order_of_grouped"
HEAD_PARTS = "tests/test_backward_interpreted.py -k head_parts"
AT_192 = "tests/test_backward_interpreted.py -k head_dim_192"
BY_GRADIENT = "tests/test_backward_interpreted.py -k warpgroup_for_each"
PAST_128 = "tests/test_backward_plan.py -k passes_past"
LOWERED_192 = "tests/test_backward_lowering.py -k head_dim_192"
BLOCKS = "tests/test_block_masks.py"
OVER_DEVICES = "tests/test_decode_over_devices.py -k whole_cache"
APPEND = "tests/test_cache.py -k rows"
POSITIONS = "tests/test_cache_positions.py"
PAGES = "tests/test_paged_attention.py"
FLOAT32, PARTS = "tests/test_float32.py -k interpreted", "tests/test_float32.py -k parts"
FLOAT16 = "tests/test_float16_range.py"
COPIES = "tests/test_mma_copies.py"
MMA_DECODE, MMA_PAGES = (f"tests/test_mma_decode.py -k {name}" for name in ("one_piece", "pages"))
MMA_PLAN, MMA_PARTS = "tests/test_mma_backward_plan.py -k parts", "tests/test_mma_interpreted.py -k head_parts"
MMA_BACKWARD = "tests/test_mma_interpreted.py -k backward"
PADDING = "tests/test_padding_by_rows.py -k harmless"
WIDE_HEADS = "tests/test_wide_heads.py -k interpreted"
NARROW = " ".join(
    f"tests/test_narrow_keys.py::test_{name}"
    for name in (
        "a_cache_divides_rows_and_multiplies_results",
        "rows_past_the_largest_number_become_it",
        "a_scale_of_an_empty_prompt_is_one",
        "fewer_bits_are_refused",
        "what_is_not_read_is_converted_once_but_in_pages",
    )
)
NARROW_REGISTERS = "tests/test_mma_narrow.py"
LATENT, LATENT_MAXIMA = (f"tests/test_mla.py -k {name}" for name in ("interpreted", "grow"))
LATENT_COMPUTE = "backends/hopper/mla/compute.py"
MUTATIONS = (
    Mutation("masks/band.py", "return s <= t + self.offset", "return s < t + self.offset", MASKS),
    Mutation("masks/band.py", "add(t_hi, offsets.per_tile(self.offset))", "add(t_lo, offsets.per_tile(self.offset))", MASKS),
    Mutation("masks/band.py", "_before(t_hi - 1, left)", "_before(t_lo, left)", MASKS),
    Mutation("masks/segments.py", "return self.q_ids == self.kv_ids", "return self.q_ids <= self.kv_ids", MASKS),
    Mutation("masks/lengths.py", "t < self.q_lengths", "t <= self.q_lengths", MASKS),
    Mutation("masks/key_intervals.py", "starts < _of_columns(s_hi)", "starts < _of_columns(s_lo)", INTERVALS),
    Mutation("masks/key_intervals.py", "(starts, jnp.maximum(starts, ends))", "(starts, ends)", MASKS),
    Mutation("masks/base.py", "return intervals.maximum(*los)", "return intervals.minimum(*los)", MASKS),
    Mutation("masks/base.py", "intervals.where(a < b, b, -UNBOUNDED)", "intervals.where(a < b, a, -UNBOUNDED)", MASKS),
    Mutation("masks/tile_ranges.py", "hit &= (bits & other_bits) != 0", "hit &= (bits & other_bits) == 0", MASKS),
    Mutation("masks/tile_ranges.py", "return first * block, end * block", "return (first + 1) * block, end * block", MASKS),
    Mutation("masks/block_states.py", "jnp.minimum(i * q +", "jnp.minimum((i + 1) * q +", BLOCKS),
    Mutation("masks/blocks.py", "hi - 1 + start) // block", "lo + start) // block", MASKS),
    Mutation("masks/blocks.py", "pool(jnp.min) == FULL", "pool(jnp.max) == FULL", MASKS),
    Mutation("masks/block_bits.py", "i * self.counts[1] + j", "j * self.counts[1] + i", BLOCKS),
    Mutation("backends/gpu/visit_lists.py", "self.form.tiles - 1 - tile if", "tile if", BLOCKS),
    Mutation("masks/blocks.py", "moved if is_whole else", "moved if True else", BLOCKS),
    Mutation("backends/gpu/visit_lists.py", "& kv, FULL, BOUNDARY)", "& kv, FULL, FULL)", BLOCKS),
    Mutation("backends/gpu/schedule.py", "last = (hi + block - 1) // block", "last = hi // block", SCHEDULE),
    Mutation("backends/gpu/schedule.py", "maximum((lo + block - 1) // block,", "maximum(lo // block,", SCHEDULE),
    Mutation("backends/gpu/schedule.py", "intervals.minimum(hi // block, last)", "last", SCHEDULE),
    Mutation("backends/gpu/online_softmax.py", "l * lax.broadcast_in_dim(rescale, l.shape, [0])", "l", FORWARD),
    Mutation("backends/gpu/online_softmax.py", "growth(top) <= lag, m, new_m", "growth(top) <= lag, new_m, m", FORWARD),
    Mutation("backends/gpu/softmax_by_sums.py", "l * lax.broadcast_in_dim(rescale, l.shape, [0])", "l", FORWARD),
    Mutation("backends/gpu/softmax_by_sums.py", "any_above(sums, largest_sum", "any_above(sums, jnp.inf", FORWARD),
    Mutation("backends/gpu/online_softmax.py", "m * unit + jnp.log", "m * unit - jnp.log", FORWARD),
    Mutation("backends/hopper/forward/compute.py", "block.parts[0] == 0, sink", "block.parts[0] >= 0, sink", SPLIT),
    Mutation("backends/hopper/forward/partial_results.py", "- plan.whole_heads", "", SPLIT),
    Mutation("backends/hopper/forward/compute.py", 'of_kind("column"):\n', 'of_kind("none"):\n', COLUMNS),
    Mutation("backends/hopper/forward/work.py", "steps.boundary_end if part.starts_full else", "", SPLIT),
    Mutation("backends/hopper/forward/partial_results.py", "(first[0], 0, first[1], 0)", "(0, 0, 0, 0)", SPLIT),
    Mutation("backends/hopper/forward/epilogue.py", "slots - at_once if", "slots if", IN_TURNS),
    Mutation("backends/hopper/forward/epilogue.py", " if first else 0, wait_read", ", wait_read", IN_TURNS),
    Mutation("backends/hopper/products.py", "for i in range(total + 1))", "for i in range(total))", PARTS),
    Mutation("backends/hopper/wgmma.py", "first + of_b * len(accs) + i", "first + of_weights * len(accs) + i", FLOAT32),
    Mutation("backends/float16_range.py", "jnp.maximum(exponent, 0)", "jnp.zeros_like(exponent)", FLOAT16),
    Mutation("backends/gpu/online_softmax.py", "jnp.where(m == -jnp.inf, 0.0, m) if", "m if", FORWARD),
    Mutation("backends/mma/copies.py", "i32(width - _VECTOR)", "i32(0)", COPIES),
    Mutation("backends/mma/copies.py", "if at.end > whole", "if at.end < 0", COPIES),
    Mutation("backends/mma/decode/kernel.py", "weight / jnp.where(empty", "1 / jnp.where(empty", MMA_DECODE),
    Mutation("backends/mma/decode/kernel.py", "s0 + key, pages[", "s0, pages[", MMA_PAGES),
    Mutation("backends/mma/backward/fused.py", "self.cta.meet()\n        if not", "if not", MMA_BACKWARD),
    Mutation("backends/mma/backward/kernel.py", "+ self.first_streamed, smem", ", smem", MMA_BACKWARD),
    Mutation("backends/mma/backward/dq.py", "found[present] * scale", "found[present]", MMA_BACKWARD),
    Mutation("backends/mma/backward/dq.py", "tile * 8 + half", "tile * 8", COPIES),
    Mutation("backends/mma/backward/dq.py", "first_column // _COLUMNS + tile", "tile", COPIES),
    Mutation("backends/mma/backward/fused.py", "self.values)\n            self.cta.meet()", "self.values)", MMA_BACKWARD),
    Mutation("backends/mma/backward/fused.py", "at.streamed, first)", "at.streamed, 0)", MMA_BACKWARD),
    Mutation("backends/gpu/logits.py", "column + of_block * shape[1]", "column", MMA_DECODE),
    Mutation("backends/gpu/row_statistics.py", "is_empty, 0, -delta", "is_empty, 0, delta", BACKWARD),
    Mutation("backends/gpu/row_statistics.py", "zero_padding(products) - d_lse", "zero_padding(products)", BACKWARD),
    Mutation("backends/hopper/backward/backward.py", "(sums[present] * plan.qk_scale)", "(sums[present])", BACKWARD),
    Mutation("backends/gpu/online_softmax.py", "total * rescale + weight", "total * rescale", FORWARD),
    Mutation("softmax/sinks.py", "-p * delta", "p * delta", "tests/test_table.py"),
    Mutation("context_parallel/whole_blocks.py", "mask=mask, sinks=None)", "mask=mask)", "tests/test_context_parallel.py"),
    Mutation("context_parallel/decode_attention.py", "Part((0, 0, 0, start)", "Part((0, 0, 0, 0)", OVER_DEVICES),
    Mutation("context_parallel/decode_attention.py", "mask, dropout", "mask, operands.sinks, dropout", OVER_DEVICES),
    Mutation("cache/allocator.py", "if not self._users[page]", "", "tests/test_cache.py -k Alloc"),
    Mutation("cache/rows.py", "jnp.cumprod(real & has_room,", "jnp.cumprod(real,", APPEND),
    Mutation("cache/paged.py", "(index >= 0) & (index < P)", "(index < P)", APPEND),
    Mutation("cache/positions.py", "score.at_end()", "score", f"{POSITIONS} -k alibi"),
    Mutation("scores/relative_bias.py", "+ dims.S - start[..., 0]", "+ dims.S", f"{POSITIONS} -k program"),
    Mutation("operands/part.py", "axes=(2,))", "axes=(3,))", "tests/test_custom_functions.py -k aligned"),
    Mutation("cache/ragged_blocks.py", "- done - queries)", "- done)", "tests/test_ragged.py -k dense"),
    Mutation("cache/ragged_blocks.py", "size + empty + at % size", "size + at % size", "tests/test_ragged.py -k dense"),
    Mutation("cache/ragged_blocks.py", "whole, self.keys - rest", "whole, self.keys", "tests/test_ragged.py -k dense"),
    Mutation("cache/ragged_blocks.py", "where(is_query, rows,", "where(True, rows,", "tests/test_ragged.py -k reach"),
    Mutation("operands/pages.py", "table = jnp.clip(table, 0, self.count - 1)", "pass", f"{PAGES} -k nearest"),
    Mutation("backends/xla/matmuls.py", "else lengths - start", "else lengths", f"{PAGES} -k page_sizes"),
    Mutation("backends/hopper/pages.py", "pl.ds(i * box, box)", "pl.ds(0, box)", f"{PAGES} -k interpreted"),
    Mutation("nn/visible_keys.py", "kv_lengths=last + 1", "kv_lengths=last", "tests/test_flax_decoding.py -k filled_part"),
    Mutation("operands/layout.py", "else (b, n, t, h)", "else (b, t, n, h)", "tests/test_layouts.py"),
    Mutation("backends/gpu/gradient_tile.py", "jnp.where(self.allowed, x, 0.0)", "x", BACKWARD),
    Mutation("backends/hopper/backward/compute.py", "[times(x, qk_scale) for x in d_qk]", "d_qk", BACKWARD),
    Mutation("backends/hopper/backward/step.py", "times(x, w.qk_scale).astype", "x.astype", BACKWARD),
    Mutation("backends/hopper/backward/load.py", "self.plan.head_in_memory(head)", "head", HEAD_PARTS),
    Mutation("backends/gpu/backward_plan.py", "head_parts, self.problem.group)", "head_parts, 64)", HEAD_PARTS),
    Mutation("backends/hopper/backward/choose_order.py", "time + head_parts.cost(plan, _BYTES)", "time", ORDER),
    Mutation("backends/hopper/backward/choose_order.py", "math.log2(max(min(fills, grid.l2_head_group), 1))", "0", ORDER),
    Mutation("backends/hopper/backward/choose_order.py", "max(fills * seen, 1)", "1", ORDER),
    Mutation("backends/mma/backward/choose_parts.py", "time + head_parts.cost(plan, _BYTES)", "time", MMA_PLAN),
    Mutation("backends/mma/backward/kernel.py", "self.plan.head_in_memory(self.head)", "self.head", MMA_PARTS),
    Mutation("backends/mma/backward/fused.py", "pl.ds(self.cta.wg * count, count)", "pl.ds(0, count)", MMA_PARTS),
    Mutation("backends/gpu/streamed_visits.py", "mask = without_lengths(self.mask)", "mask = self.mask", ORDER),
    Mutation("backends/hopper/forward/plan.py", "count if count <= N else count - count % N", "count", SPLIT),
    Mutation("backends/gpu/backward_plan.py", "self.problem.dims.N // self.heads", "self.problem.group", HEAD_PARTS),
    Mutation("backends/hopper/backward/step.py", "() if plan.p_before_dp else accs.pv", "accs.pv", AT_192),
    Mutation("backends/hopper/backward/plan.py", "self.scored or self.padding.behind_mask", "self.scored", LOWERED_192),
    Mutation("backends/hopper/backward/step.py", "if plan.config.dk_last:", "if False:", BACKWARD),
    Mutation("backends/hopper/backward/scale_ds.py", "factor < 1", "factor < 0", FLOAT16),
    Mutation("backends/hopper/backward/work.py", "first + i * ctas", "first + i", BACKWARD),
    Mutation("backends/hopper/backward/tickets.py", "return number + ctas", "return number + ctas - 1", BACKWARD),
    Mutation("backends/xla/chunks.py", "self.index(i) >= i *", "self.index(i) > i *", "tests/test_table.py"),
    Mutation("softmax/tile.py", " | (lse != -jnp.inf)", " | True", "tests/test_all_at_once.py -k anything"),
    Mutation("softmax/tile.py", "(d_lse == 0)", "jnp.isfinite(d_lse)", "tests/test_whole_rows.py -k anything"),
    Mutation("operands/diagonals.py", "return T - rows - t + s", "return T - rows + t + s", "tests/test_relative_bias.py"),
    Mutation("backends/gpu/skewed.py", "self.origin + column - row", "self.origin + column", "tests/test_relative_bias.py"),
    Mutation(LATENT_COMPUTE, "(self._rescaled(acc, rescale), p, i, 0", "(acc, p, i, 0", LATENT_MAXIMA),
    Mutation(LATENT_COMPUTE, "(self._rescaled(acc, rescale), None, i, 1", "(acc, None, i, 1", LATENT_MAXIMA),
    Mutation(LATENT_COMPUTE, "acc = self._rescaled(acc, rescale)", "acc = acc", LATENT_MAXIMA),
    Mutation(LATENT_COMPUTE, "l = self._times(l, rescale)", "l = l", LATENT_MAXIMA),
    Mutation("backends/hopper/mla/load.py", 'scratch["p_smem"].at[1]', 'scratch["p_smem"].at[0]', LATENT),
    Mutation("backends/hopper/tiles.py", "else column_part * self.padded_dim", "else 0", WIDE_HEADS),
    Mutation("backends/hopper/backward/warpgroup.py", "self.column_part * len(accs)", "0", WIDE_HEADS),
    Mutation("backends/hopper/backward/probabilities.py", "if w.plan.padding.ds else ds", "if False else ds", PADDING),
    Mutation("backends/hopper/backward/compute.py", "if plan.padding.gradients:", "if False:", PADDING),
    Mutation("softmax/tile.py", "jnp.exp(state.max - finite_max)", "jnp.exp(finite_max - state.max)", "tests/test_table.py"),
    Mutation("cache/scales.py", "wide / scale.astype(wide.dtype)", "wide", NARROW),
    Mutation("cache/scales.py", "key_scale.astype(wide) * scale", "scale", NARROW),
    Mutation("cache/scales.py", "jnp.clip(x, -largest, largest)", "x", NARROW),
    Mutation("cache/scales.py", "jnp.where(jnp.abs(scale) < _SMALLEST, jnp.float32(1), scale)", "scale", NARROW),
    Mutation("operands/pytree.py", "jnp.finfo(dtype).bits == 8", "jnp.dtype(dtype).itemsize == 1", NARROW),
    Mutation("backends/mma/narrow.py", "([0, 2, 4, 6], [1, 3, 5, 7])", "([0, 1, 2, 3], [4, 5, 6, 7])", NARROW_REGISTERS),
    Mutation("backends/mma/narrow.py", "vector.shuffle(even, odd, [pair, 2 + pair])", "even", NARROW_REGISTERS),
    Mutation("backends/mma/narrow.py", "if rows_first else (self.high, self.low)", "", NARROW_REGISTERS),
    Mutation("backends/gpu/addresses.py", "i32(width - 16)", "i32(0)", NARROW_REGISTERS),
    Mutation(CONVERT, "i32(half * UNIT)", "i32((1 - half) * UNIT)", CONVERTED),
    Mutation("backends/gpu/addresses.py", "arith.xori(byte, self.row)", "byte", CONVERTED),
    Mutation(CONVERT, "arith.addi(byte, i32(first))", "byte", CONVERTED),
    Mutation(LOAD_NARROW, "plgpu.commit_smem()", "pass", NARROW_ON_HOPPER),
    Mutation(LOAD_NARROW, 'wait_free(plan, step, slot, scratch[f"{name}_free"])', "pass", NARROW_ON_HOPPER),
    Mutation(LOAD_NARROW, "jnp.minimum(later, steps.end - 1)", "i", NARROW_ON_HOPPER),
    Mutation(LOAD_NARROW, "at[number::_WARPS]", "at[0::_WARPS]", "tests/test_narrow_on_hopper.py -k in_pages"),
    Mutation("backends/gpu/narrow_keys.py", "problem.H % UNIT or problem.Hv % UNIT", "problem.H % 8", NARROW),
    Mutation(OF_EACH, 'w.barriers["weights_ready"].wait()', "pass", BY_GRADIENT),
    Mutation(OF_EACH, 'w.barriers["weights_free"].wait()', "pass", BY_GRADIENT),
    Mutation(OF_EACH, 'w.barriers["logits_done"].wait()', "pass", BY_GRADIENT),
    Mutation(OF_EACH, "tile.pullback(s, p, problem.scale)", "(p,)", BY_GRADIENT),
    Mutation("backends/hopper/backward/compute.py", " or plan.by_gradient:", ":", BY_GRADIENT),
    Mutation("backends/hopper/backward/plan.py", "not self.padding.behind_mask and not self.splits", "True", PAST_128),
)  # fmt: skip


def passes(tests: str, mutation: Mutation | None = None) -> bool:
    """Whether the tests pass, with the fault if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in ("pallas_fa", "tests", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        if mutation:
            path = tree / "pallas_fa" / mutation.file
            text = path.read_text()
            assert mutation.old in text, f"{mutation.file} has no {mutation.old!r}"
            path.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not full"]
        run = subprocess.run([*command, *tests.split()], cwd=tree, capture_output=True, text=True)
        assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
        return run.returncode == 0


def main(numbers: list[int]) -> int:
    """Plants the faults with these numbers, or all; returns how many survive, at most 1."""
    survivors, chosen = 0, numbers or range(len(MUTATIONS))
    for tests in sorted({MUTATIONS[i].tests for i in chosen}):
        assert passes(tests), f"{tests} fail without a fault"
    for i in tqdm(chosen, mininterval=10):
        mutation = MUTATIONS[i]
        alive = passes(mutation.tests, mutation)
        survivors += alive
        print(
            f"{i:2} {'SURVIVES' if alive else 'caught'}: {mutation.file}: {mutation.old.strip()} -> {mutation.new.strip()}"
        )
    print(f"{survivors} of {len(chosen)} survive")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main([int(x) for x in sys.argv[1:]]))
