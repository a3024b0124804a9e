"""The mesh axes that each dim of a sharded array lies over."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_fa.sharding.mesh_axes import SubAxes, axes_by_dim
from tests.partitioned_calls import mesh_of


@pytest.mark.parametrize(
    "axes",
    (
        ((), ()),
        (("data",), ("rows",)),
        (("model", "data"), ()),
        (("rows", "data", "model"), ()),
        ((), ("data", "rows")),
    ),
)
def test_axes_by_dim(axes):
    mesh = mesh_of(2, 2, 2)
    assert axes_by_dim(mesh, NamedSharding(mesh, P(*axes)), 2) == list(axes)


def test_axes_by_dim_of_parts_of_axes():
    mesh, finer = mesh_of(1, 8), jax.make_mesh((4, 2), ("head", "half"), axis_types=(AxisType.Auto,) * 2)
    heads, halves = axes_by_dim(mesh, NamedSharding(finer, P("head", "half")), 2)
    assert (heads, halves) == (("model",), ("model",))
    assert isinstance(heads, SubAxes) and isinstance(halves, SubAxes)
