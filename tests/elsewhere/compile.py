"""Compiles all calls for one GPU, and prints what their kernels need: a line of JSON each.

usage: python -m tests.elsewhere.compile ARCHITECTURE FOLDER      started by `tests/test_compiled.py`, with a stand-in driver
"""

import json
import os
import pathlib
import re
import sys
import time
from typing import Any

import jax

from tests.elsewhere.calls import Call, calls
from tests.elsewhere.targets import TARGETS


def compiled(call: Call, device: Any, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Compiles a call, and returns what the compiler says of each of its kernels."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    start = time.perf_counter()
    with jax.default_device(device):  # Mosaic GPU asks it for the compute capability
        traced = jax.jit(call.fn, in_shardings=sharding, out_shardings=sharding).trace(*call.args)
        traced.lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - start
    found = []
    for report in sorted(folder.glob("*.ptxas")):
        text, resources = report.read_text(), report.with_suffix(".resources.txt").read_text()
        number = lambda pattern, text: int(re.search(pattern, text)[1])  # type: ignore[index]
        found.append(
            {
                "architecture": re.search(r"for '(\w+)'", text)[1],  # type: ignore[index]
                "registers": number(r"Used (\d+) registers", text),
                "serialised": "C7512" in text,  # the matmuls of wgmma wait for each other: too few registers
                "spilled": number(r"(\d+) bytes spill stores", text),
                "shared_memory": number(r"smem_scratch_bytes=(\d+)", resources),
                "compile_s": round(seconds, 2),  # of the call, which mostly has one kernel
            }
        )
    for file in folder.iterdir():
        file.unlink()
    return found


def main(architecture: str, folder: pathlib.Path) -> None:
    """Compiles all calls."""
    target = TARGETS[architecture]
    device = target.device()
    for call in calls(target.gpu):
        what = {"kernel": call.kernel, "H": call.head_dim, "causal": call.causal, "tiles": str(call.tiles)}
        for kernel in compiled(call, device, folder):
            print(json.dumps(what | kernel), flush=True)


if __name__ == "__main__":
    assert os.environ["MOSAIC_GPU_DUMP_TO"] == sys.argv[2], "the compiler's reports go to this folder"
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
