"""What scaling.py measures on R devices of one host: links, kernels, attention to one sequence.

Training is in training_program.py. Each program knows what it is (`what`), which arguments it runs on, and what follows
from its time (`figures`). TFLOP/s are those of one device, of allowed pairs only, and sizes in bytes are those of one
device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from benchmarks.measure import Measured
from benchmarks.rows import Row
from benchmarks.workloads import Workload
from pallas_fa.context_parallel import all_to_all_attention, from_zigzag, ring_attention, to_zigzag

AXIS = "context"


def line(devices: int) -> Mesh:
    """The first `devices` devices, along one axis."""
    return jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices])


def _next(x: Any, devices: int) -> Any:
    return lax.ppermute(x, AXIS, [(i, (i + 1) % devices) for i in range(devices)])


def _exchanged(x: Any, devices: int) -> Any:
    del devices
    return lax.all_to_all(x, AXIS, 0, 0, tiled=True)


@dataclasses.dataclass
class Link(Measured):
    """`bytes` on each device, sent to the next device, or exchanged in equal parts with all."""

    kind = "link"
    repeats = 8  # in one program, as in a ring: the host's time for a call is not the link's

    collective: str
    bytes: int

    def _like(self):
        # A device's part has one row for each device that it may send to.
        shape = (self.devices**2, self.bytes // self.devices)
        return jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=NamedSharding(line(self.devices), P(AXIS)))

    def _compile(self):
        send = {"ppermute": _next, "all_to_all": _exchanged}[self.collective]
        travel = lambda x: lax.fori_loop(0, self.repeats, lambda _, x: send(x, self.devices), x)
        place = P(AXIS)
        over_devices = jax.shard_map(travel, mesh=line(self.devices), in_specs=place, out_specs=place)
        self._finish(jax.jit(over_devices), self._like())

    def what(self) -> Row:
        leaving = self.bytes if self.collective == "ppermute" else self.bytes * (self.devices - 1) // self.devices
        return {"collective": self.collective, "bytes": self.bytes, "sent_bytes": leaving}

    def arguments(self) -> tuple[Any, ...]:
        like = self._like()
        return (jax.device_put(np.random.default_rng(0).integers(0, 256, like.shape, np.uint8), like.sharding),)

    def figures(self, seconds: float) -> Row:
        return {"gb_per_s": self.what()["sent_bytes"] / seconds / 1e9}


def _directed(attend: Callable[..., Any], direction: str) -> Callable[..., dict[str, Any]]:
    """(arrays, d_out) -> {'out'}, with the gradients of the arrays where the direction is 'fwdbwd'."""

    def run(arrays, d_out):
        if direction == "forward":
            return {"out": attend(**arrays)}
        out, pullback = jax.vjp(lambda arrays: attend(**arrays), arrays)
        return {"out": out, **pullback(d_out)[0]}

    return run


def _described(workload: Workload, direction: str) -> Row:
    shape = {letter: getattr(workload, letter) for letter in ("B", "T", "S", "N", "K", "H", "Hv")}
    return {"direction": direction, "shape": shape, "dtype": workload.dtype, "mask": workload.mask}


@dataclasses.dataclass
class Kernel(Measured):
    """Attention on one device to blocks of the size that a hop of a ring computes: B = 1, no mask."""

    kind = "kernel"
    repeats = 8  # sets of inputs, one after the other in one program

    workload: Workload
    direction: str

    def _compile(self):
        run = _directed(pallas_fa.dot_product_attention, self.direction)
        many = lambda arrays, d_out: lax.map(lambda one: run(*one), (arrays, d_out))
        stacked = lambda x: jax.ShapeDtypeStruct((self.repeats, *x.shape), x.dtype)
        self._finish(jax.jit(many), *jax.tree.map(stacked, (self.workload.shapes(), self.workload.out_shape())))

    def what(self) -> Row:
        return _described(self.workload, self.direction)

    def arguments(self) -> tuple[Any, ...]:
        return jax.tree.map(lambda x: x[:, None], dataclasses.replace(self.workload, B=self.repeats).inputs())

    def figures(self, seconds: float) -> Row:
        return {"tflops": self.workload.flops(self.direction) / seconds / 1e12}


@dataclasses.dataclass
class Attention(Measured):
    """Attention to one sequence over all devices: 'ring', in zigzag order, or 'all_to_all'; on one device 'plain'."""

    kind = "attention"

    way: str
    workload: Workload
    direction: str

    def _compile(self):
        attend = {
            "plain": pallas_fa.dot_product_attention,
            "ring": functools.partial(ring_attention, axis_name=AXIS, placement="zigzag"),
            "all_to_all": functools.partial(all_to_all_attention, axis_name=AXIS),
        }[self.way]
        attend = functools.partial(attend, is_causal=self.workload.causal)
        if self.way != "plain":
            local, place = attend, P(None, AXIS)
            over_devices = jax.shard_map(
                lambda arrays: local(**arrays), mesh=line(self.devices), in_specs=place, out_specs=place
            )
            attend = lambda **arrays: over_devices(arrays)
        placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding())
        shapes = jax.tree.map(placed, (self.workload.shapes(), self.workload.out_shape()))
        self._finish(jax.jit(_directed(attend, self.direction)), *shapes)

    def _sharding(self):
        return NamedSharding(line(self.devices), P(None, AXIS))

    def what(self) -> Row:
        return {"way": self.way, **_described(self.workload, self.direction)}

    def arguments(self) -> tuple[Any, ...]:
        order = (lambda x: to_zigzag(x, 1, self.devices)) if self.way == "ring" else lambda x: x
        return jax.tree.map(lambda x: jax.device_put(order(x), self._sharding()), self.workload.inputs())

    def results(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Whole arrays on the first device, in the order of the sequence."""
        whole = {name: jax.device_put(x, jax.devices()[0]) for name, x in outputs.items()}
        return {name: from_zigzag(x, 1, self.devices) if self.way == "ring" else x for name, x in whole.items()}

    def figures(self, seconds: float) -> Row:
        return {"tflops": self.workload.flops(self.direction) / self.devices / seconds / 1e12}
