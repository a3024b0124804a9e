"""Arguments of flash-attn, PyTorch, FlexAttention, Tokamax, Flax and JAX's TPU kernels, and what to write here."""

INSTEAD = {
    **dict.fromkeys(("softmax_scale", "sm_scale", "logits_scale", "scaling"), "Pass scale=."),
    "causal": "Pass is_causal=True; where T and S differ, flash-attn's is mask=pallas_fa.masks.Causal('bottom_right').",
    "window_size": "Pass local_window_size=, with None for -1; where T and S differ, flash-attn's is"
    " mask=pallas_fa.masks.Window(left, right, align='bottom_right').",
    "sliding_window": "Pass local_window_size=(n - 1, 0) for the query's own key and n - 1 before it.",
    **dict.fromkeys(("softcap", "soft_cap"), "Pass logits_soft_cap=, with None for 0."),
    **dict.fromkeys(("attn_mask", "attention_mask"), "Pass mask= (bool, True: may attend), or bias= if it is added."),
    **dict.fromkeys(("attn_bias", "ab", "attention_bias", "position_bias"), "Pass bias=."),
    "key_padding_mask": "Pass mask=~key_padding_mask[:, None, None, :]: here True is what a query may attend to.",
    **dict.fromkeys(
        ("block_table", "page_table", "page_indices"), "Call pallas_fa.paged_attention, which has page_table."
    ),
    "deterministic": "Pass deterministic_gradients=; in a Flax module attention_fn=pallas_fa.nn.attention_fn.",
    **dict.fromkeys(
        ("dtype", "dropout_rng", "module"), "In a Flax module pass attention_fn=pallas_fa.nn.attention_fn."
    ),
    "dropout_p": "Pass dropout_rate=, and a JAX PRNG key as dropout_key=.",
    "enable_gqa": "Leave it out: key and value may have fewer heads than query.",
    "score_mod": "Pass score=pallas_fa.scores.Custom(fn), with fn(x, b, n, t, s).",
    "mask_mod": "Pass mask=pallas_fa.masks.Custom(fn), with fn(b, n, t, s).",
    "block_mask": "Pass mask=, a pallas_fa.masks.Mask: block_mask(mask, T, S) there finds the blocks of one.",
    "alibi_slopes": "Pass score=pallas_fa.scores.Alibi(slopes, align='bottom_right').",
    **dict.fromkeys(("s_aux", "learnable_sink"), "Pass sinks=."),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "Pass mask=pallas_fa.masks.from_cu_seqlens(cu_q, cu_k, T=T)."),
    **dict.fromkeys(("return_lse", "return_attn_probs"), "Pass return_residual=True for (out, lse)."),
}
