"""The environment of a process that compiles for GPUs that are not here: JAX's CUDA wheels and a stand-in driver."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax

_DRIVER = pathlib.Path(__file__).with_name("libcuda.c")
_ROOT = pathlib.Path(__file__).parent.parent.parent


def environment(folder: pathlib.Path) -> dict[str, str] | str:
    """Returns the environment variables, with what they name in `folder`; or the reason why there can be none."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler is on PATH"
    built = [compiler, "-shared", "-fPIC", "-Wall", "-Wno-unused-parameter", "-o", folder / "libcuda.so.1", _DRIVER]
    subprocess.run(built, check=True)
    wheels = folder / "wheels"
    names = [f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", wheels, *names]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        return f"JAX's CUDA wheels can't be installed: {done.stderr.strip().splitlines()[-1]}"
    return os.environ | {
        "PYTHONPATH": f"{_ROOT}:{wheels}",
        "LD_LIBRARY_PATH": str(folder),
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
    }
