"""The training step of the GPT as a program that is measured, with the attention of any library in it."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.implementations import Implementation, parse
from benchmarks.measure import Compiled, Measured
from benchmarks.rows import Row
from benchmarks.workloads import Workload, self_attention
from models.attention import Dropout
from models.data import Corpus
from models.gpt import SIZES
from models.mesh import ONE_DEVICE, Layout, make_layout
from models.step import TrainState, init_state, make_optimizer, make_train_step
from models.text import TextTask, model_config


@dataclasses.dataclass(frozen=True)
class AttentionOf:
    """The attention of any library, in the place of `models.attention.causal_attention`."""

    library: Implementation
    workload: Workload

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        implementation: str | None,
        sinks: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        del implementation  # the config's, which is for pallas_fa
        arrays = {"query": query, "key": key, "value": value}
        if sinks is not None or dropout is not None:
            raise NotImplementedError("the training benchmarks have neither sinks nor dropout")
        return self.library.attend(self.workload, arrays, self.library.masks(self.workload))


def noise(context: int) -> Corpus:
    """Random bytes, where only the time matters."""
    text = np.random.default_rng(0).integers(0, 256, 2**16 + context, np.uint8)
    return Corpus(text, text, "noise", 1)


@functools.cache
def initial_parameters(size: str) -> Any:
    """Those of step 0, on the first device; the same for every attention, batch and context."""
    return TextTask(model_config(size, "float32", None, 2), noise(2), batch=1, seed=0, validation_bytes=2).init()


@dataclasses.dataclass
class InitialParameters(Compiled):
    """Makes `initial_parameters` while other programs compile."""

    size: str

    def _compile(self):
        initial_parameters(self.size)


@dataclasses.dataclass
class Training(Measured):
    """A training step, data parallel: `batch` sequences of `context` tokens on each device.

    Each program has a state of its own, which its steps consume: 12 bytes for each parameter.
    """

    kind = "training"
    way = "data parallel"

    size: str
    batch: int
    context: int
    dtype: str
    implementation: Implementation = parse("pallas_fa:None")  # several devices: of pallas_fa, without a form
    learning_rate: optax.ScalarOrSchedule = 1e-4
    corpus: Corpus | None = None  # None: noise
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # XLA's, beside those of the task
    state: TrainState | None = None
    _step: Callable[..., Any] | None = dataclasses.field(default=None, init=False)

    def _compile(self):
        self._layout = self._make_layout()
        self._task = self._make_task(self._layout)
        self._optimizer = make_optimizer("adamw", self.learning_rate)
        self._finish(*self._program(jax.eval_shape(lambda: init_state(self._task.init(), self._optimizer))))
        self._step, self.run = self.run, self._advance

    def _make_layout(self) -> Layout:
        if self.devices == 1:
            return ONE_DEVICE
        return make_layout(f"data={self.devices}", self.batch * self.devices, self.context)

    def _program(self, state: TrainState) -> tuple[Any, Any, Any]:
        """(the step, shapes of the state, shapes of a batch), from shapes of the state of one device."""
        shardings = self._layout.shardings(state)
        if shardings is not None:
            placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            state = jax.tree.map(placed, state, shardings)
        options = self._task.options(state.params) | self.options
        step = make_train_step(self._task.loss, self._optimizer, shardings, options)
        return step, state, self._task.batch(0)

    def _make_task(self, layout: Layout) -> TextTask:
        size = SIZES[self.size]
        heads = {"N": size.heads, "K": size.kv_heads, "H": size.head_dim}
        workload = self_attention("training", B=self.batch, S=self.context, causal=True, dtype=self.dtype, **heads)
        config = model_config(self.size, self.dtype, self.implementation.backend, self.context)
        attention = AttentionOf(self.implementation, workload)
        config = dataclasses.replace(config, attention=attention)
        corpus = noise(self.context) if self.corpus is None else self.corpus
        return TextTask(config, corpus, self.batch * layout.size("data"), 0, self.context, layout)

    def what(self) -> Row:
        fields = {name: getattr(self, name) for name in ("size", "batch", "context", "dtype")}
        way = {"way": self.way} if self.devices > 1 else {}
        return way | fields | {"implementation": self.implementation.name}

    def known(self) -> Row:
        row, memory = super().known(), self.memory
        if memory:  # the new state takes the place of the old one
            row["peak_bytes"] = memory["temp"] + memory["argument"] + memory["output"] - memory["alias"]
        return row

    def collectives(self, names: Sequence[str]) -> list[int]:
        """How many of each the compiled step has."""
        compiled: Any = self._step
        text = compiled.as_text()
        return [len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names]

    def begin(self) -> None:
        """The state of step 0."""
        params = jax.tree.map(jnp.copy, initial_parameters(self.size))  # a step consumes its state
        self.state = self._layout.state(init_state(self._layout.state(params), self._optimizer))

    def _advance(self, batch):
        assert self._step is not None
        self.state, metrics = self._step(self.state, batch)
        return metrics

    def losses(self, steps: range) -> list[float]:
        """The losses of these steps, on the corpus, in TextTask's unit."""
        metrics = [self._advance(self._task.batch(step)) for step in steps]
        return [float(values["loss"]) / TextTask.per_unit for values in jax.device_get(metrics)]

    def end(self) -> None:
        """Lets go of the state; `begin` makes another."""
        self.state = None

    def arguments(self) -> tuple[Any, ...]:
        self.begin()
        return (jax.device_put(self._task.batch(0)),)

    def figures(self, seconds: float) -> Row:
        return {"tokens_per_s": self.batch * self.devices * self.context / seconds}

    def release(self) -> None:
        super().release()
        self._step = None
        self.end()


@dataclasses.dataclass
class SideBySide(Training):
    """The step of one device on each of several, with nothing sent: what linear is on these very devices.

    GPUs at full power differ, and those that train together all take as long as the slowest.
    """

    way = "side by side"

    def _make_layout(self) -> Layout:
        return ONE_DEVICE

    def _program(self, state: TrainState) -> tuple[Any, Any, Any]:
        mesh = Mesh(np.array(jax.devices()[: self.devices]), ("device",))
        self._each = NamedSharding(mesh, P("device"))
        step, *one = super()._program(state)

        @functools.partial(jax.jit, donate_argnums=0)
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("device"), out_specs=P("device"))
        def steps(state, batch):
            own = jax.tree.map(lambda x: x[0], (state, batch))
            return jax.tree.map(lambda x: x[None], step(*own))

        def stacked(x):
            return jax.ShapeDtypeStruct((self.devices, *x.shape), x.dtype, sharding=self._each)

        return steps, *jax.tree.map(stacked, one)

    def begin(self) -> None:
        self.state = self._copies(init_state(initial_parameters(self.size), self._optimizer))

    def arguments(self) -> tuple[Any, ...]:
        self.begin()
        return (self._copies(self._task.batch(0)),)

    def _copies(self, tree: Any) -> Any:
        """One of each array for each device."""
        return jax.tree.map(lambda x: jax.device_put(np.broadcast_to(x, (self.devices, *x.shape)), self._each), tree)
