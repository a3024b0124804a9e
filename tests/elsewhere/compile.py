"""Compiles all calls for one GPU, and prints what their kernels need: a line of JSON each.

usage: python -m tests.elsewhere.compile ARCHITECTURE all|best  started by `tests/test_compiled.py`, with a stand-in driver

Mosaic GPU prints what it is asked for to standard output. Asked to write files, it writes all that it has, and making texts
of layouts and passes takes longer than compiling.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from tests.elsewhere.calls import Call, calls
from tests.elsewhere.targets import TARGETS

_STDOUT = 1


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """Gathers what compilers print to standard output: one string in the list, once the block has ended."""
    found: list[str] = []
    kept = os.dup(_STDOUT)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), _STDOUT)
        try:
            yield found
        finally:
            sys.stdout.flush()
            os.dup2(kept, _STDOUT)
            os.close(kept)
        file.seek(0)
        found.append(file.read())


def compiled(call: Call, device: Any) -> list[dict[str, Any]]:
    """Compiles a call, and returns what the compiler says of each of its kernels."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    start = time.perf_counter()
    with printed() as reports, jax.default_device(device):  # Mosaic GPU asks it for the compute capability
        traced = jax.jit(call.fn, in_shardings=sharding, out_shardings=sharding).trace(*call.args)
        traced.lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - start
    numbers = lambda pattern: map(int, re.findall(pattern, reports[0]))
    memory = numbers(r"smem_scratch_bytes=(\d+)")
    of_kernels = reports[0].split("Compile time")[:-1]  # which ends what is said of a kernel
    found = []
    for text, shared_memory in zip(of_kernels, memory, strict=True):
        number = lambda pattern, text=text: int(re.search(pattern, text)[1])  # type: ignore[index]
        found.append(
            {
                "architecture": re.search(r"for '(\w+)'", text)[1],  # type: ignore[index]
                "registers": number(r"Used (\d+) registers"),
                "serialised": "C7512" in text,  # the matmuls of wgmma wait for each other: too few registers
                "spilled": number(r"(\d+) bytes spill stores"),
                "shared_memory": shared_memory,
                "compile_s": round(seconds, 2),  # of the call, which mostly has one kernel
            }
        )
    return found


def main(architecture: str, which: str) -> None:
    """Compiles all calls, or those of the best tiles alone."""
    target = TARGETS[architecture]
    device = target.device()
    for call in calls(target.gpu, only_best={"all": False, "best": True}[which]):
        what = {"kernel": call.kernel, "H": call.head_dim, "causal": call.causal, "tiles": str(call.tiles)}
        for kernel in compiled(call, device):
            print(json.dumps(what | kernel), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
