"""The numbers of one call of the generator, the decisions they give, and what is selected, in a thread's registers."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_fa.softmax.dropout import DECISION_BITS, ROUNDS
from pallas_fa.softmax.philox import KEY_STEP, MULTIPLIER

THREADS = 128  # of a warpgroup
# What elements that are kept are multiplied by: the bits of 1 in float16, which comparisons of float16 numbers give. For
# bfloat16's own 1 numbers would be compared as bfloat16, without the operand modifier for absolute values.
FACTORS = {"float16": 1.0, "bfloat16": 2.0**-7}


def keys_of_rounds(key: Any) -> list[Any]:
    """Returns what `philox2x32` takes, from the seed `key`."""
    return [arith.addi(key, constant(i * KEY_STEP)) for i in range(ROUNDS)]


def philox2x32(first: Any, second: Any, round_keys: Sequence[Any]) -> tuple[Any, Any]:
    """As `philox.philox2x32`, with the hardware's product of 64 bits."""
    for key in round_keys:
        low, high = arith.mului_extended(first, constant(MULTIPLIER))
        first, second = arith.xori(arith.xori(high, key), second), low
    return first, second


def numbers(first: Any, second: Any, is_far: Any) -> tuple[Any, ...]:
    """As `dropout.numbers`, those of keys with the bit `FAR` or of the others; `is_far`: a bool, or all bits or none."""
    rotated = lambda x, which: bytes_of(x, x, constant(which))
    x, y = rotated(first, 0x0321), rotated(second, 0x0321)
    near = first, arith.xori(x, second), second, arith.xori(y, first)
    if is_far is False:
        return near
    z = rotated(first, 0x2103)
    if is_far is True:
        of_x, of_first = (arith.xori(i, z) for i in (x, first))
        return arith.xori(near[3], of_x), arith.xori(near[1], y), arith.xori(near[1], of_first), arith.xori(y, z)
    here = lambda i: arith.andi(i, is_far)
    of_x, of_y, of_first = here(arith.xori(x, z)), here(y), here(first)
    changes = arith.xori(of_x, of_y), of_y, arith.xori(of_x, of_first), arith.xori(of_first, here(z))
    return tuple(map(arith.xori, near, changes))


def at_least(word: Any, threshold: int, answer: str = "u32") -> Any:
    """Returns for each half of `word` whether its low 15 bits are at least the threshold.

    As float16 numbers >= 0 they are in the order of their bits. NaN has the highest: it is at least any number, and where
    the threshold would itself be NaN the bits are inverted, of which those of less than a number are asked for.

    Args:
      answer: "u32" for all bits or none of each half, "f16x2" for the bits of 1 or 0 in float16.
    """
    if threshold <= 0x7C00:  # infinity
        bits, test = word, "geu"
    else:
        bits, test, threshold = arith.xori(word, constant(0x7FFF7FFF)), "lt", 2**DECISION_BITS - threshold
    text = f"{{ .reg .b32 x; abs.f16x2 x, $1; set.{test}.{answer}.f16x2 $0, x, $2; }}"
    return asm(text, bits, constant(threshold * 0x10001))


def selected(x: Any, words: Sequence[Any], places: Iterable[tuple[tuple[int, int, int], int, tuple[int, int]]]) -> Any:
    """Returns the elements of a tile that are kept, and 0 for others.

    Args:
      x: [rows, columns], in registers of two columns: [rows / 64, columns / 8, row or row + 8].
      words: of decisions, arrays [128].
      places: for each register where it is, the number of its word, and the bits of the two columns.
    """
    decisions = [element(word.registers[0], 0) for word in words]
    results = x.registers.reshape(x.shape[0] // 64, x.shape[1] // 8, 2).copy()
    kind = results.flat[0].type.element_type
    zero = arith.constant(kind, ir.FloatAttr.get(kind, 0.0))
    for at, word, bits in places:
        values = []
        for lane, bit in enumerate(bits):
            decision = arith.andi(decisions[word], constant(1 << bit))
            keeps = arith.cmpi(arith.CmpIPredicate.ne, decision, constant(0))
            values.append(arith.select(keeps, element(results[at], lane), zero))
        results[at] = vector.from_elements(results[at].type, values)
    return mgpu.FragmentedArray(_registers=results.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)


def bytes_of(x: Any, y: Any, which: Any) -> Any:
    """Returns the four bytes of x (numbers 0 to 3) and y (4 to 7) that the hexadecimal digits of `which` name."""
    return asm("prmt.b32 $0, $1, $2, $3;", x, y, which)


def asm(text: str, *operands: Any, has_side_effects: bool = False) -> Any:
    """Returns the word that instructions of PTX compute from words."""
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(("=r", *("r" for _ in operands)))
    return llvm.inline_asm(i32, list(operands), text, constraints, has_side_effects=has_side_effects)


def constant(x: int) -> Any:
    """Returns a constant word, of the low 32 bits of `x`."""
    i32 = ir.IntegerType.get_signless(32)
    x %= 2**32
    return arith.constant(i32, ir.IntegerAttr.get(i32, x - 2**32 if x >= 2**31 else x))


def element(x: Any, i: int) -> Any:
    """Returns an element of a vector."""
    return vector.extract(x, dynamic_position=[], static_position=[i])


def word_type() -> Any:
    """Returns the type of a vector of one word."""
    return ir.VectorType.get((1,), ir.IntegerType.get_signless(32))


def per_thread(x: Any) -> Any:
    """Returns an array [128] that has a word for each thread of a warpgroup."""
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1).to_mgpu()
    registers = np.array([vector.from_elements(word_type(), [x])], object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
