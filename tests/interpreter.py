"""Kernels in JAX's GPU interpreter, which also looks for data races."""

import contextlib
import io
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

# So many that hardly two copies of a kernel share one: who waits for a later copy of a thread seems to have waited for all
# copies before it.
TMA_THREADS = 1000


def interpreted(run, *arrays):
    """What `run` returns of the arrays, and whether races were found.

    All of it is one program: compiled one by one, the operations around a kernel take longer than the kernel.
    """
    # Its only door is private: pallas has no public name for what the race detector found.
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: TID251

    parameters = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=TMA_THREADS)
    with contextlib.redirect_stdout(io.StringIO()), plgpu.force_gpu_interpret_mode(parameters), _callbacks_of_numpy():
        results = jax.block_until_ready(jax.jit(run)(*arrays))
        return results, gpu_callbacks.get_races().races_found


@contextlib.contextmanager
def _callbacks_of_numpy():
    """The interpreter's callbacks get NumPy arrays. Making some ten scalars of each call arrays of JAX, and integers again,
    takes twice as long as all that they do."""
    from jax._src import callback  # noqa: TID251
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory  # noqa: TID251

    to_int = shared_memory._to_int

    def call(*args, callback, **_):
        with jax.default_device(jax.devices("cpu")[0]):
            return jax.tree.map(np.asarray, callback(*map(np.array, args)))

    with (
        mock.patch.object(callback, "io_callback_impl", call),
        mock.patch.object(shared_memory, "_to_int", lambda x: int(x) if isinstance(x, np.ndarray) else to_int(x)),
    ):
        yield
