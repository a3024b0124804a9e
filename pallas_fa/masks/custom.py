"""`Custom`: any elementwise function as a mask."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa.masks.base import BOUNDARY, EVERYTHING, Mask, Tiles, remedy_for
from pallas_fa.operands import closure, custom, elementwise, intervals, offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import Range
from pallas_fa.operands.part import AtGlobalIndices, Part, at_positions


@dataclasses.dataclass(frozen=True, init=False)
class Custom(Mask):
    """fn(b, n, t, s, *slices) -> bool: any elementwise rule in jnp.

    Each of `arrays` is broadcastable to [*B, N, T, S]; `fn` gets its values at (b, n, t, s), already broadcast or
    broadcastable, so it never indexes an argument; those of a 16-bit float dtype come as float32. `fn` may index an array
    that it closes over by b, n, t and s; the kernels can't do that. `ranges`: a mask known to allow all that `fn` allows;
    only its ranges are used, to skip tiles (without it every tile is visited), or its blocks, if it is or holds a
    `BlockMask`. `align`: as in `Causal`, how t is counted: "bottom_right" gives the last query the position of the last
    key. Arrays are those of the call in either case.

    `fn` is traced once, as by `jax.jit`: a Python number that it reads from outside keeps the value of the first call. Pass
    what changes as an array.

    A call raises ValueError while it is traced if `fn` is not elementwise, and TypeError if its result is not bool.
    """

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]
    ranges: Mask | None
    align: offsets.Align

    def __init__(
        self, fn: Callable[..., Any], *arrays: Any, ranges: Mask | None = None, align: offsets.Align = "top_left"
    ):
        offsets.check_align("Custom", align)
        custom.check_function(fn, "fn(b, n, t, s, *slices) -> bool")
        if ranges is not None and not isinstance(ranges, Mask):
            raise TypeError(
                f"ranges={ranges!r} must be a Mask that contains this one, such as Window(128, 0) or a BlockMask, or None."
                f" {remedy_for(ranges, '')}".rstrip()
            )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", tuple(custom.array("arrays", x) for x in arrays))
        object.__setattr__(self, "ranges", ranges)
        object.__setattr__(self, "align", align)

    def bind(self, dims: Dims, lengths: Any) -> "Custom":
        arrays = [dims.broadcastable(f"arrays[{i}]", x) for i, x in enumerate(self.arrays)]
        dtype, closed_over = elementwise.checked(self.fn, arrays, of_logit=False)
        if dtype != jnp.bool_:
            raise TypeError(
                f"masks.Custom: fn={self.fn!r} returned an array of dtype {dtype}; it must be bool (True: may attend). Where"
                " any other value than 0 means that, return `result != 0`."
            )
        fn, closed_over = closure.convert(self.fn, closed_over)
        fn, start = at_positions(fn, 0, self.align, dims, lengths)
        ranges = None if self.ranges is None else self.ranges.bind(dims, lengths)
        return Custom(fn, *start, *arrays, *closed_over, ranges=ranges)

    def counted_from_start(self, dims: Dims) -> str | None:
        arrays = [dims.broadcastable(f"arrays[{i}]", x) for i, x in enumerate(self.arrays)]
        alone = self.align == "top_left" and elementwise.uses_queries(self.fn, arrays, of_logit=False)
        if alone or self.ranges is None:
            return "Custom" if alone else None
        return self.ranges.counted_from_start(dims)

    def at_end(self) -> "Custom":
        ranges = None if self.ranges is None else self.ranges.at_end()
        return Custom(self.fn, *self.arrays, ranges=ranges, align="bottom_right")

    def moved(self, part: Part) -> "Custom":
        ranges = None if self.ranges is None else self.ranges.moved(part)
        return Custom(AtGlobalIndices(self.fn, 0), *part.origin, *self.arrays, ranges=ranges)

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        # As kernels have them; scores convert theirs to the dtype of the logit.
        is_half = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return self.fn(b, n, t, s, *(x.astype(jnp.float32) if is_half(x) else x for x in self.arrays))

    def tile_states(self, queries: Tiles, keys: Tiles) -> Any:
        if self.ranges is None:
            return Mask.tile_states(self, queries, keys)
        return intervals.minimum(self.ranges.tile_states(queries, keys), np.int8(BOUNDARY))

    def in_tiles(self, sizes: tuple[int, int], tiles: tuple[int, int]) -> "Custom":
        return Custom(self.fn, *self.arrays) if self.has_blocks else self

    @property
    def has_blocks(self) -> bool:
        return self.ranges is not None and self.ranges.has_blocks

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return EVERYTHING if self.ranges is None else self.ranges.kv_range(t_lo, t_hi)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return EVERYTHING if self.ranges is None else self.ranges.q_range(s_lo, s_hi)
