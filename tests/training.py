"""What the tests of the training program share: text to train on, runs in this process or another, what they left."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from models.checkpoint import ARRAYS
from models.folder import list_steps
from models.metrics import read_rows

ROOT = Path(__file__).parent.parent
SENTENCE = "the quick brown fox number {} jumps over the lazy dog; "


def write_texts(folder):
    """Forty files of easy text, 2 kB each."""
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(SENTENCE.format(index) * 40)
    return folder


def arguments(folder, out, *more):
    """Those of a short run; a later one of the same name wins."""
    settings = ["--size", "nano", "--data", folder, "--out", out, "--steps", 60, "--checkpoint-every", 10]
    settings += ["--validate-every", 40, "--log-every", 5, "--sample-bytes", 0]
    return [str(argument) for argument in (*settings, *more)]


@contextlib.contextmanager
def compiled_once(folder):
    """What one run compiled, the next reads from `folder`; in other processes too."""
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def start(args, *program, **environment):
    """The real program in a process of its own; on the CPU, where its results are bitwise reproducible."""
    return subprocess.Popen(
        [sys.executable, *(program or ("-m", "models.train")), *args],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def final_state(out):
    """The arrays of the last checkpoint, read without knowing the model."""
    restored = ocp.StandardCheckpointer().restore(out / "checkpoints" / str(list_steps(out)[-1]) / ARRAYS)
    return jax.tree.map(np.asarray, restored)


def losses(out):
    """The log without what the clock says."""
    return [
        {name: value for name, value in row.items() if not name.endswith("_per_second")}
        for row in read_rows(out / "metrics.jsonl")
    ]
