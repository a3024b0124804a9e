"""Which tests every change runs (`make test`), and which wait for `make test-full`: those marked `full`.

`make test` sees every mask, score, dtype, head dim, pair of lengths and number of heads at least once; the rest of the
table of cases, and of the tests in `THINNED`, is full.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.cases import TABLE, Case


def representatives(cases: Iterable[Case]) -> frozenset[Case]:
    """Few rows that have every value of every factor that `cases` have, found greedily."""
    factors = lambda c: {("mask", c.mask), ("score", c.score), ("dtype", c.dtype), ("T, S", c.T, c.S),
                         ("N, K", c.N, c.K), ("H, Hv", c.H, c.Hv), ("batch", c.batch), ("sinks", c.sinks),
                         ("dropout", c.dropout)}  # fmt: skip
    left = set().union(*map(factors, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda c: (len(factors(c) & left), -c.T * c.S))
        chosen.append(best)
        left -= factors(best)
    return frozenset(chosen)


def of_table(only: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """Parameters for the rows of the table, all but representatives marked `full`."""
    rows = [case for case in TABLE if only(case)]
    few = representatives(rows)
    return [pytest.param(c, id=str(c), marks=() if c in few else pytest.mark.full) for c in rows]


# Of the parameters of these tests, `make test` runs so many, evenly spaced; none where it is 0. The others are full.
THINNED = {
    "test_all_at_once.py::test_table": 8,
    "test_backward_interpreted.py::test_a_cta_that_holds_all_keys_of_a_head_writes_all_of_dq": 1,
    "test_backward_interpreted.py::test_a_large_negative_bias_is_a_mask": 1,
    "test_backward_interpreted.py::test_head_dim_192_is_right_and_free_of_races": 2,
    "test_backward_interpreted.py::test_head_parts_are_right_and_free_of_races": 3,
    "test_backward_interpreted.py::test_heads_of_a_tile_before_the_next_tile": 0,
    "test_backward_interpreted.py::test_interpreted_kernel_is_right_and_free_of_races": 4,
    "test_backward_interpreted.py::test_large_sums_over_the_batch": 1,
    "test_backward_interpreted.py::test_padding_may_hold_nan": 1,
    "test_backward_interpreted.py::test_what_is_in_the_gradient_of_an_empty_rows_lse_is_harmless": 1,
    "test_backward_lowering.py::test_every_config_lowers": 2,
    "test_backward_lowering.py::test_every_head_dim_lowers": 2,
    "test_backward_lowering.py::test_every_length_lowers": 2,
    "test_backward_lowering.py::test_every_mask_lowers": 4,
    "test_backward_lowering.py::test_every_score_lowers": 4,
    "test_backward_lowering.py::test_head_dim_192_takes_one_pass_or_two_where_their_tiles_fit": 0,
    "test_backward_lowering.py::test_lengths_that_are_no_multiples_of_8_lower_with_a_bias": 6,
    "test_backward_lowering.py::test_options_of_a_config_lower": 3,
    "test_backward_plan.py::test_by_tile_only_where_visits_are_known_and_heads_have_nothing_of_their_own": 0,
    "test_benchmarks.py::test_decoding_steps_are_attention": 2,
    "test_benchmarks.py::test_every_form_agrees_with_truth": 10,
    "test_block_masks.py::test_a_computed_block_mask_is_its_mask": 3,
    "test_block_masks.py::test_interpreted_kernels_read_the_lists_of_the_mask": 1,
    "test_block_masks.py::test_kernels_lower": 1,
    "test_block_masks.py::test_random_blocks_are_dense_masks": 2,
    "test_block_masks.py::test_second_derivatives": 0,
    "test_cache.py::test_sharded_caches": 2,
    "test_cache_positions.py::test_steps_are_the_whole_sequences_whatever_counts_positions": 5,
    "test_checkpoint.py::test_a_kill_at_any_point_of_a_save_leaves_what_can_be_resumed": 0,
    "test_closed_over_arrays.py::test_indexed_arrays_are_right": 2,
    "test_context_parallel.py::test_all_to_all_attention_is_attention": 6,
    "test_context_parallel.py::test_ring_attention_is_attention": 6,
    "test_context_parallel.py::test_ring_of_any_size": 3,
    "test_context_parallel_costs.py::test_memory_falls_with_the_number_of_devices": 1,
    "test_decode.py::test_interpreted_kernel_is_right_and_free_of_races": 4,
    "test_decode.py::test_interpreted_rows_of_two_warpgroups": 0,
    "test_decode.py::test_interpreted_parts_without_keys_of_two_warpgroups": 1,
    "test_decode.py::test_lowers": 2,
    "test_decode.py::test_the_other_layout": 1,
    "test_decode_over_devices.py::test_is_attention_to_the_whole_cache": 7,
    "test_decoder.py::test_past_the_context_the_last_half_is_read_anew": 1,
    "test_documents.py::test_each_document_is_attention_of_its_own": 3,
    "test_documents.py::test_ranges_of_documents_are_those_of_their_tiles": 1,
    "test_dropout.py::test_a_tile_is_its_elements": 3,
    "test_dropout_registers.py::test_the_kernels_of_a_ring_lower": 1,
    "test_flax.py::test_equals_flax": 3,
    "test_flax_checkpoints.py::test_checkpoints_of_linen": 1,
    "test_flax_decoding.py::test_a_bound_score_counts_from_the_position_in_the_cache": 5,
    "test_flax_decoding.py::test_decode_reads_the_filled_part_of_the_cache": 3,
    "test_float16_range.py::test_gradients_of_logits_that_pass_the_largest_number": 2,
    "test_float32.py::test_few_queries": 0,
    "test_float32.py::test_interpreted_kernels_are_as_exact_as_their_products": 1,
    "test_float32.py::test_kernels_lower": 2,
    "test_float_functions.py::test_special_values_are_those_of_xla": 4,
    "test_forward.py::test_chunks_that_the_mask_rules_out_are_not_visited": 4,
    "test_forward_mode.py::test_arrays_that_jit_shards": 1,
    "test_forward_mode.py::test_eager_calls_linearize_and_scan": 0,
    "test_forward_mode.py::test_gradients_are_the_transpose_of_the_tangents": 1,
    "test_forward_mode.py::test_hessian_vector_products": 0,
    "test_forward_mode.py::test_shard_map_with_its_checks": 0,
    "test_forward_mode.py::test_tangents": 4,
    "test_forward_mode.py::test_the_others_may_stay": 1,
    "test_forward_mode.py::test_values_come_from_the_kernels": 0,
    "test_gradients.py::test_bias_gradient_has_the_shape_and_dtype_of_the_bias": 12,
    "test_gradients.py::test_gradients_are_finite_differences": 2,
    "test_gradients.py::test_what_varies_by_query_head_under_grouped_heads": 3,
    "test_head_dims.py::test_the_backward_reads_nothing_of_the_next_head": 0,
    "test_head_dims.py::test_the_default_is_the_kernels_in_both_directions": 1,
    "test_higher_derivatives.py::test_grad_of_grad_over_several_chunks_of_rows": 1,
    "test_higher_derivatives.py::test_jacrev_of_grad": 0,
    "test_higher_derivatives.py::test_jacrev_of_jacrev": 0,
    "test_higher_derivatives.py::test_third_derivatives": 0,
    "test_jax_nn.py::test_agrees": 4,
    "test_kernel_functions.py::test_scores_may_be_constant": 3,
    "test_kernel_functions.py::test_the_default_lowers_to_kernels": 2,
    "test_kernel_interpreted.py::test_a_large_negative_bias_is_a_mask": 1,
    "test_kernel_interpreted.py::test_interpreted_kernel_is_right_and_free_of_races": 6,
    "test_kernel_interpreted.py::test_interpreted_split_heads_are_right_and_free_of_races": 4,
    "test_kernel_lowering.py::test_a_lowering_takes_less_than_a_second": 0,
    "test_kernel_lowering.py::test_every_configuration_of_the_tables_lowers": 1,
    "test_kernel_lowering.py::test_every_head_dim_lowers": 1,
    "test_kernel_lowering.py::test_every_length_lowers": 4,
    "test_kernel_lowering.py::test_every_mask_lowers": 3,
    "test_kernel_lowering.py::test_every_score_lowers": 4,
    "test_kernel_lowering.py::test_kernels_lower_with_64_bit_types": 1,
    "test_kernel_lowering.py::test_kernels_lower_with_64_bit_types_under_vmap": 1,
    "test_kernel_lowering.py::test_key_blocks_of_multiples_of_16_lower": 2,
    "test_kernel_operations.py::test_claims_come_down_to_the_tables": 12,
    "test_kernel_operations.py::test_conversions_lower": 3,
    "test_kernel_operations.py::test_entries_of_the_tables_lower": 6,
    "test_kernel_operations.py::test_rewritten_operations_lower": 6,
    "test_kernel_transforms.py::test_kernels_of_a_transformed_program": 2,
    "test_layouts.py::test_arrays_that_jit_shards": 1,
    "test_layouts.py::test_context_parallelism": 2,
    "test_layouts.py::test_interpreted_backward": 0,
    "test_layouts.py::test_interpreted_forward": 1,
    "test_layouts.py::test_table": 2,
    "test_layouts.py::test_the_kernels_lower_without_a_transpose": 1,
    "test_mask_ranges.py::test_ranges_of_array_masks": 1,
    "test_mask_ranges.py::test_ranges_of_long_arrays": 1,
    "test_memory_and_time.py::test_memory_of_forward_mode_grows_with_the_length": 0,
    "test_mesh_training.py::test_every_mesh_gives_the_losses_of_one_device_and_resumes_on_any_other": 0,
    "test_mesh_training.py::test_steps_that_are_not_waited_for_do_not_wait_for_one_another": 0,
    "test_mesh_training.py::test_sums_of_gradients_are_made_before_the_backward_pass_goes_on": 0,
    "test_mesh_training.py::test_the_norm_of_gradients_takes_one_sum_over_devices": 0,
    "test_mesh_training.py::test_what_a_device_holds_and_what_devices_exchange": 0,
    "test_mla.py::test_interpreted_kernel_in_pages": 1,
    "test_mla.py::test_interpreted_kernel_is_right_and_free_of_races": 2,
    "test_mla.py::test_the_kernel_reads_one_array": 0,
    "test_mma_decode.py::test_arrays_of_every_width_lower": 4,
    "test_mma_decode.py::test_keys_in_one_piece": 2,
    "test_mma_decode.py::test_keys_in_pages": 1,
    "test_mma_decode.py::test_many_rows_are_several_query_blocks": 0,
    "test_mma_decode.py::test_the_other_layout": 0,
    "test_mma_interpreted.py::test_backward_is_right_and_free_of_races": 3,
    "test_mma_interpreted.py::test_forward_is_right_and_free_of_races": 2,
    "test_mma_interpreted.py::test_gradients_of_padding_that_holds_nan_are_zero": 0,
    "test_mma_interpreted.py::test_head_parts_are_right_and_free_of_races": 3,
    "test_models.py::test_decoding_with_a_cache_gives_the_logits_of_the_whole": 1,
    "test_narrow_keys.py::test_kernel_in_pages": 2,
    "test_narrow_keys.py::test_kernel_is_right_and_free_of_races": 4,
    "test_narrow_keys.py::test_lowers": 3,
    "test_narrow_on_hopper.py::test_kernel_in_pages": 1,
    "test_narrow_on_hopper.py::test_kernel_is_right_and_free_of_races": 4,
    "test_narrow_on_hopper.py::test_lowers": 3,
    "test_overhead.py::test_two_trees_are_compared": 0,
    "test_padding.py::test_empty_rows_give_zero_and_minus_infinity_and_no_gradients": 6,
    "test_padding.py::test_padding_may_hold_anything": 4,
    "test_padding.py::test_padding_may_hold_anything_in_second_derivatives": 1,
    "test_padding.py::test_padding_of_a_key_head_is_past_the_longest_of_its_group": 1,
    "test_padding_by_rows.py::test_padding_of_nan_changes_nothing_and_gets_zeros": 2,
    "test_paged_attention.py::test_interpreted_kernel_is_right_and_free_of_races": 2,
    "test_paged_attention.py::test_is_attention_to_the_rows_of_the_table": 3,
    "test_paged_attention.py::test_lowers": 1,
    "test_paged_attention.py::test_page_sizes_and_layouts": 2,
    "test_partitioned.py::test_every_device_computes_its_share": 4,
    "test_partitioned.py::test_explicit_axes": 1,
    "test_partitioned.py::test_transformations": 2,
    "test_partitioned_programs.py::test_the_kernels_of_one_device_lower": 1,
    "test_ragged.py::test_blocks_of_any_size": 1,
    "test_ragged.py::test_interpreted_kernel_finds_keys_and_values_between_each_other": 0,
    "test_ragged.py::test_is_what_jax_defines": 0,
    "test_ragged.py::test_rows_of_blocks_of_8_bits_are_few": 1,
    "test_relative_bias.py::test_aligned_to_the_end_the_last_query_is_at_the_last_key": 4,
    "test_relative_bias.py::test_is_the_bias_with_the_same_diagonals": 3,
    "test_relative_bias.py::test_the_form_that_kernels_read_has_every_tile": 2,
    "test_relative_bias.py::test_vmap": 1,
    "test_run_ends.py::test_a_batch_that_no_memory_holds": 0,
    "test_run_ends.py::test_however_it_ends_the_curve_goes_on_bit_for_bit": 0,
    "test_scaling.py::test_a_run_makes_complete_rows": 0,
    "test_scaling.py::test_variants_of_the_step_are_timed_beside_it": 0,
    "test_sharding.py::test_derivatives_of_gradients_on_explicit_axes": 0,
    "test_sharding.py::test_explicit_axes_outside_of_jit_and_under_vmap": 0,
    "test_sinks.py::test_a_sink_of_minus_infinity_is_no_sink": 1,
    "test_sinks.py::test_sinks_of_the_gpt_on_a_mesh": 1,
    "test_strict_modes.py::test_a_call_does_the_same": 4,
    "test_strict_modes.py::test_promotion_is_never_implicit": 4,
    "test_strict_modes.py::test_shards_without_jit": 3,
    "test_train.py::test_a_run_is_never_written_over": 0,
    "test_training_benchmark.py::test_a_row_for_each_attention_and_context": 0,
    "test_training_benchmark.py::test_all_attentions_learn_alike": 0,
    "test_transforms.py::test_remat_keeps_what_its_policy_names": 2,
    "test_transforms.py::test_vmap_over_any_subset_of_arguments_and_axes": 2,
    "test_whole_rows.py::test_table_in_chunks_of_rows": 4,
    "test_whole_rows.py::test_table_with_all_rows_at_once": 2,
    "test_wide_heads.py::test_both_directions_lower": 1,
    "test_wide_heads.py::test_interpreted_backward_is_right_and_free_of_races": 1,
    "test_wide_heads.py::test_interpreted_forward_is_right_and_free_of_races": 1,
    "test_wide_heads.py::test_xla_computes_gradients_that_it_computes_faster": 0,
}


def thin(items: list[pytest.Item]) -> None:
    """Marks what `THINNED` leaves out as full; what is marked smoke stays."""
    groups = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        groups.setdefault(f"{item.path.name}::{name}", []).append(item)
    for name, group in groups.items():
        wanted = THINNED.get(name, len(group))
        kept = {i * len(group) // wanted for i in range(wanted)} if wanted else set()
        for i, item in enumerate(group):
            if i not in kept and not item.get_closest_marker("smoke"):
                item.add_marker(pytest.mark.full)
