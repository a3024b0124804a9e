"""What ring and all-to-all attention refuse, and the remedy that they name."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_fa import masks
from pallas_fa.context_parallel import all_to_all_attention, ring_attention
from tests.context_parallel_calls import N, tokens


def call(attention=ring_attention, length=4, specs=None, heads=2, **keywords):
    """A call on 4 devices."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.ones((2, length * 4, heads, 8))
    keywords = {"axis_name": "ring", "is_causal": True, "placement": "zigzag", **keywords}
    local = lambda q, k, v: attention(q, k, v, **keywords)
    specs = specs or (P(None, "ring"),) * 3
    return jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, ("data", "ring"))), x, x, x)


@pytest.mark.parametrize(
    ("error", "message", "keywords"),
    (
        (ValueError, "axis_name='rings' is not an axis of a mesh that is manual here", {"axis_name": "rings"}),
        (TypeError, r"axis_name=\('data', 'ring'\) must be one name", {"axis_name": ("data", "ring")}),
        (ValueError, "axis_name=3 is not an axis of a mesh that is manual here", {"axis_name": 3}),
        (ValueError, "axis_name={} is not an axis of a mesh that is manual here", {"axis_name": {}}),
        (ValueError, "placement='zig' is not a way", {"placement": "zig"}),
        *(
            (
                TypeError,
                "return_residual='no' must be True or False",
                {"attention": x, "heads": 4, "return_residual": "no"},
            )
            for x in (ring_attention, all_to_all_attention)
        ),
        (TypeError, "softmax_scale=1.0 is not an argument here. Pass scale=", {"softmax_scale": 1.0}),
        (
            TypeError,
            "query_segment_ids is a str",
            {"attention": all_to_all_attention, "heads": 4, "query_segment_ids": "a"},
        ),
        (
            ValueError,
            r"query_segment_ids.shape=\(2, 16\) must be \[\*B, T\] = \(2, 4\)",
            {"attention": all_to_all_attention, "heads": 4, "query_segment_ids": jnp.ones((2, 16), int)},
        ),
        (NotImplementedError, "forward_mode=True: .* reverse mode only", {"forward_mode": True}),
        (ValueError, "dropout_rate=0.1, but dropout_key=None", {"dropout_rate": 0.1}),
        (ValueError, "query has the odd length 3 on each of 4 devices", {"length": 3}),
        (ValueError, "key is the same on all devices", {"specs": (P(None, "ring"), P(), P(None, "ring"))}),
        (ValueError, "query is the same on all devices", {"specs": (P(), P(None, "ring"), P(None, "ring"))}),
        (ValueError, "leave S whole", {"bias": jnp.ones((4, 4))}),
        (ValueError, "leave S whole", {"mask": masks.Segments(jnp.ones(16, int), jnp.ones(16, int))}),
        (ValueError, "query_segment_ids.shape=.* must be", {"query_segment_ids": jnp.ones((2, 16), int)}),
        (NotImplementedError, "'reference'", {"implementation": ("xla", "reference")}),
        (NotImplementedError, "mosaic_gpu: config=3", {"implementation": "mosaic_gpu", "config": 3}),
        (ValueError, "query has N=2 heads.* Use ring_attention", {"attention": all_to_all_attention}),
        (
            ValueError,
            "odd length 3",
            {"attention": all_to_all_attention, "heads": 4, "length": 3, "placement": "zigzag"},
        ),
        (ValueError, "key is the same", {"attention": all_to_all_attention, "specs": (P(None, "ring"), P(), P())}),
    ),
)
def test_errors(error, message, keywords):
    keywords = (
        {"key_value_segment_ids": jnp.ones((2, 4), int), **keywords} if "query_segment_ids" in keywords else keywords
    )
    with pytest.raises(error, match=message):
        call(**keywords)


@pytest.mark.parametrize("attention", (ring_attention, all_to_all_attention))
def test_explicit_axes_beside_a_manual_one(attention):
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(tokens(N)["query"], NamedSharding(mesh, P("data", "ring")))
    local = lambda x: attention(x, x, x, axis_name="ring", placement="zigzag")
    with pytest.raises(ValueError, match="query is sharded over the explicit mesh axes \\['data'\\]"):
        jax.shard_map(local, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring"), axis_names={"ring"})(x)


def test_a_ring_must_be_told_the_placement():
    """In the wrong order of the sequence the results are wrong without an error."""
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match="placement"):
        ring_attention(x, x, x, axis_name="ring")  # pyright: ignore[reportCallIssue]
