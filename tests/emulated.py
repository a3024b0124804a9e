"""Runs a lowered kernel that only copies, or adds to device memory, as its 128 threads would: JAX's interpreter has neither.

It evaluates the operations of the lowered program (`kernel_snapshots.kernels`) on NumPy arrays with one element per thread.
"""

import re
from typing import Any

import ml_dtypes
import numpy as np

_OPERATION = re.compile(
    r'^\s*(?:(%\w+) = )?"stable_mosaic_gpu\.([\w.]+)"\(([^)]*)\)(?: \{(.*?)\})?(?: : (.*)|\s*\(\{)?$'
)
_THREADS = 128
_ARITHMETIC = {  # of numbers that are not negative
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "divui": np.floor_divide, "divsi": np.floor_divide,
    "remui": np.remainder,
    "xori": np.bitwise_xor, "andi": np.bitwise_and, "shrui": np.right_shift, "index_cast": lambda x: x, "extui": lambda x: x,
}  # fmt: skip
_LESS = {"2", "6"}  # signed and unsigned, of numbers that are not negative


_FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


class Registers(list):
    """What an instruction with several results gives: for each, the bytes of every thread."""


class Pointer:
    """Bytes of a memory, and an offset for each thread."""

    def __init__(self, memory: np.ndarray, offset: Any):
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def at(self, thread: int, size: int = 16) -> np.ndarray:
        """So many bytes of a thread."""
        start = int(np.broadcast_to(self.offset, (_THREADS,))[thread])
        assert start % size == 0 and 0 <= start <= self.memory.size - size, "an access outside of the memory"
        return self.memory[start : start + size]


def run(text: str, ctas: int, arrays: list[np.ndarray], shared: int) -> list[np.ndarray]:
    """Runs the kernel, CTA after CTA, on device memory `arrays`, in place; returns what each leaves in shared memory."""
    memories = [x.reshape(-1).view(np.uint8) for x in arrays]
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "gpu.launch" in line)
    left = []
    for cta in range(ctas):
        smem = np.full(shared, 0xAA, np.uint8)
        _Threads(memories, smem, cta).run(lines, start)
        left.append(smem)
    return left


class _Threads:
    def __init__(self, memories, smem, cta):
        self.memories, self.smem, self.cta = memories, smem, cta
        self.values: dict[str, Any] = {}

    def run(self, lines, start):
        # Before the launch, the prologue makes arrays of the kernel's arguments.
        for line in lines[:start]:
            if found := re.search(r"(%\w+) = .*from_kernel_arg_idx = (\d+) .*-> memref<([\dx]+)x(\w+)>", line):
                name, number, shape, dtype = found.groups()
                self.values[name] = Pointer(self.memories[int(number)], 0), _strides(shape), _bytes(dtype)
            elif found := re.search(r'(%\w+) = "stable_mosaic_gpu.arith.constant".*value = (-?\d+) ', line):
                self.values[found[1]] = int(found[2])
        masks = [np.ones(_THREADS, bool)]
        for line in lines[start + 1 :]:
            if line.strip().startswith("}"):
                masks = masks[:-1] if len(masks) > 1 and not line.strip().startswith("}, {") else masks
                continue
            found = _OPERATION.match(line)
            if not found:
                continue
            result, name, operands, attributes, types = found.groups()
            operands = [self.values.get(x.strip()) for x in operands.split(",")] if operands else []
            if name == "scf.if":
                masks = [*masks, masks[-1] & operands[0]]
            else:
                value = self.value(name.removeprefix("arith."), operands, attributes or "", types or "", masks[-1])
                if result:
                    self.values[result] = value

    def value(self, name, operands, attributes, types, mask):
        number = lambda key: int(re.search(rf"\b{key} = (-?\d+)", attributes)[1])  # type: ignore[index]
        numbers = lambda key: [int(x) for x in re.search(rf"{key} = array<i\d+: ([^>]*)>", attributes)[1].split(",")]  # type: ignore[index]
        if name in ("constant", "llvm.mlir.constant"):
            found = re.search(r"value = (-?\d+) :", attributes)
            return int(found[1]) if found else None
        if name in ("gpu.thread_id", "gpu.block_id", "gpu.block_dim"):
            of_x = {"gpu.thread_id": np.arange(_THREADS), "gpu.block_id": self.cta, "gpu.block_dim": _THREADS}[name]
            return of_x if "dim<x>" in attributes else int(name == "gpu.block_dim")
        if name in _ARITHMETIC:
            return _ARITHMETIC[name](*operands) if all(x is not None for x in operands) else None
        if name == "cmpi":
            assert str(number("predicate")) in _LESS or operands[0] is None or number("predicate") == 0
            return None if operands[0] is None else np.less(*operands) if number("predicate") else np.equal(*operands)
        if name == "select":
            return np.where(*operands)
        if name == "memref.view":
            shape, dtype = re.search(r"-> memref<([\dx]+)x(\w+)", types).groups()  # type: ignore[union-attr]
            return Pointer(self.smem, operands[1]), _strides(shape), _bytes(dtype)
        if name == "memref.subview":
            (pointer, strides, itemsize), *dynamic = operands
            for offset, stride in zip(numbers("static_offsets"), strides, strict=True):
                pointer = pointer + (dynamic.pop(0) if offset < 0 else offset) * stride * itemsize
            kept = re.search(r"strided<\[([\d, ]+)\]", types.split("->")[1])
            return pointer, [int(x) for x in kept[1].split(",")] if kept else strides, itemsize
        if name in ("builtin.unrealized_conversion_cast", "memref.expand_shape", "llvm.addrspacecast"):
            return operands[0]
        if name == "nvvm.ldmatrix":
            return _matrices(operands[0], number("num"), "mma_layout<col>" in attributes)
        if name == "vector.extract" and (found := re.search(r"\(vector<[2-9]xi32>", types)):
            word = numbers("static_position")[0]
            return [None if x is None else x[4 * word : 4 * word + 4] for x in operands[0]]
        if name == "vector.from_elements":
            return [None if x[0] is None else np.concatenate(x) for x in zip(*operands, strict=True)]
        if name in ("vector.bitcast", "vector.broadcast", "vector.extract") and isinstance(operands[0], list):
            return operands[0]  # all of a register
        if name == "vector.shuffle":
            both, chosen = zip(*operands, strict=True), numbers("mask")
            return [np.concatenate(pair).view(np.uint32)[chosen].view(np.uint8) for pair in both]
        if name == "llvm.inline_asm" and (found := re.search(r"cvt\.rn\.f16x2\.(\w+)x2", attributes)):
            wide = ml_dtypes.bfloat16 if "bf16x2" in attributes else np.float16
            return _converted(operands[0], _FLOAT8[found[1]], wide, interleaved="prmt" in attributes)
        if name == "llvm.extractvalue" and isinstance(operands[0], Registers):
            return operands[0][numbers("position")[0]]
        if name == "llvm.extractvalue":  # the pointer has the offset already
            return operands[0][0] if numbers("position") == [1] else 0
        if name in ("llvm.ptrtoint", "llvm.inttoptr"):
            return operands[0]
        if name in ("llvm.mul", "llvm.add"):
            return operands[0] * operands[1] if name == "llvm.mul" else operands[0] + operands[1]
        if name == "llvm.getelementptr":
            size = _size(re.search(r"elem_type = ([^,}]+)", attributes)[1])  # type: ignore[index]
            return operands[0] + (operands[1] if len(operands) > 1 else numbers("rawConstantIndices")[0]) * size
        if name == "nvvm.cp.async.shared.global":
            target, source, kept = operands if len(operands) == 3 else (*operands, 16)
            for thread in np.flatnonzero(mask):
                count = int(np.broadcast_to(kept, (_THREADS,))[thread])
                target.at(thread)[:] = 0
                if count:
                    target.at(thread)[:count] = source.at(thread)[:count]
            return None
        if name == "llvm.load":
            size = _size(types.rsplit("-> ", 1)[1])
            return (
                [operands[0].at(i, size).copy() if mask[i] else None for i in range(_THREADS)] if operands[0] else None
            )
        if name == "llvm.extractelement":
            return [x.view(np.float32)[operands[1]] for x in operands[0]]
        if name == "llvm.inline_asm" and (found := re.search(r"red[.\w]*add\.f32 \[\$0\+(\d+)\]", attributes)):
            for thread in np.flatnonzero(mask):
                (operands[0] + int(found[1])).at(thread, 4).view(np.float32)[:] += operands[1][thread]
            return None
        if name == "llvm.store":
            for thread in np.flatnonzero(mask):
                operands[1].at(thread, operands[0][thread].size)[:] = operands[0][thread]
        return None


def _matrices(pointer, count, transposed):
    """What `ldmatrix` gives: of each 8 x 8 matrix, to whose rows eight lanes point, a thread gets two 16-bit elements."""
    found = Registers()
    for matrix in range(count):
        of_threads = []
        for thread in range(_THREADS):
            warp, lane = thread // 32 * 32, thread % 32
            rows = np.stack([pointer.at(warp + 8 * matrix + i) for i in range(8)]).view(np.uint16)
            of_threads.append((rows.T if transposed else rows)[lane // 4, 2 * (lane % 4) :][:2].copy().view(np.uint8))
        found.append(of_threads)
    return found


def _converted(threads, narrow, wide, interleaved):
    """Two registers of each thread's four numbers of 8 bits: the first two and the others, or the even ones and the odd."""
    halves = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 2), slice(2, 4))
    convert = lambda x: x.copy().view(narrow).astype(wide).view(np.uint8)
    return Registers([[convert(x[half]) for x in threads] for half in halves])


def _strides(shape):
    sizes = [int(x) for x in shape.split("x")]
    return [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]


def _size(element):
    """Bytes of an element such as f32, i8 or vector<2xf32>; of a pointer's that no test looks at, 16."""
    found = re.fullmatch(r"(?:vector<(\d+)x)?[fi](\d+)>?", element.strip())
    return int(found[1] or 1) * int(found[2]) // 8 if found else 16


def _bytes(dtype):
    return int(re.search(r"\d+", dtype)[0]) // 8  # type: ignore[index]
