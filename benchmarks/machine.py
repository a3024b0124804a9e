"""What a row says of where it was measured: device, versions, commit, load. No host names and no paths."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import jax

_PACKAGES = ("jax", "jaxlib", "numpy", "tokamax", "dew-flash-attn-cu13", "torch")
_CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def device_kind() -> str:
    """The device's model: of a GPU as JAX names it, of a CPU from the system, with the number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    model = found[1].strip() if found else platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def folder() -> str:
    """The folder of results for this device: 'cpu', or the GPU's model such as 'nvidia-h200'."""
    device = jax.devices()[0]
    name = "cpu" if device.platform == "cpu" else device.device_kind
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str]:
    import pallas_fa

    found = {"python": platform.python_version(), "pallas_fa": pallas_fa.__version__}
    for package in (*_PACKAGES, *_CUDA):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the working tree, '+dirty' where tracked files differ from it; None outside a repository."""
    root = Path(__file__).resolve().parent.parent

    def git(*args):
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = [line for line in git("status", "--porcelain").splitlines() if "benchmarks/results/" not in line]
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def load() -> float | None:
    """Runnable processes of the last minute, this one among them: on a quiet machine at most the number of cores."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def gpu_state() -> str | None:
    """'SM clock, power, temperature' as nvidia-smi reads them just now; None without one."""
    if jax.devices()[0].platform == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
