"""Addresses that each thread of a warpgroup computes, in the terms of MLIR."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

WARPGROUP = 128  # threads
_GROUP = 8  # rows of a piece of swizzled memory


def i32(value: int) -> Any:
    """Returns an int32 constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def thread_index() -> Any:
    """Returns the number of this thread in its warpgroup."""
    return arith.remui(mgpu.thread_idx(), i32(WARPGROUP))


def pointer_to(ref: Any) -> Any:
    """Returns a pointer to the first element of a ref, in the address space of its memory."""
    pointer = mgpu.utils.memref_ptr(ref)
    is_gmem = llvm.PointerType(pointer.type).address_space == 0
    return as_global(pointer) if is_gmem else pointer


def as_global(pointer: Any) -> Any:
    """Returns a pointer to device memory in its own address space."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)


def plus_bytes(pointer: Any, offset: Any) -> Any:
    """Returns a pointer so many bytes further."""
    return mgpu.utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def swizzled(offset: Any, width: int) -> Any:
    """Returns where an offset in a piece of shared memory [8, width bytes] lies: 16 bytes of a row, XORed with the row."""
    return arith.xori(offset, arith.andi(arith.shrui(offset, i32(3)), i32(width - 16)))


class SwizzledRow:
    """A row of a tile in shared memory, which lies in pieces [8, width bytes], group after group of eight rows."""

    def __init__(self, smem: Any, group: Any, row: Any, width: int):
        """`row`: in its group."""
        self.width, self.group_bytes = width, ir.MemRefType(smem.type).shape[1] * _GROUP * width
        self.start = plus_bytes(pointer_to(smem), arith.muli(group, i32(self.group_bytes)))
        self.row = swizzled(arith.muli(row, i32(width)), width)

    def place(self, byte: Any) -> Any:
        """Returns a pointer to the 16 bytes at `byte` of the row."""
        piece, byte = arith.divui(byte, i32(self.width)), arith.remui(byte, i32(self.width))
        start = plus_bytes(self.start, arith.muli(piece, i32(_GROUP * self.width)))
        return plus_bytes(start, arith.xori(byte, self.row))

    def later(self, place: Any, groups: int) -> Any:
        """Returns a pointer to the same place so many groups later: the same register, and a constant."""
        return plus_bytes(place, i32(groups * self.group_bytes))
