"""How one implementation is compiled for one workload, and how several are timed side by side.

Directions: `forward`; `backward`, the pullback alone, with the residuals as its inputs, so that no forward work is in
it; `fwdbwd`, output and gradients in one program.

Time: a sample is a number of calls in a row (enough to last `target_s`), over its number. On a GPU the host waits
once, after the last call: a stream runs its work in order, so the sum is the device's. On a CPU it waits after each
call, since independent calls may overlap there. On a GPU, inputs that would stay in its cache are several sets in turn.
"""

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, ClassVar, Self

import jax
import numpy as np

from benchmarks import progress
from benchmarks.implementations import Implementation
from benchmarks.workloads import Workload

_CACHE_BYTES = 128 * 2**20  # more than any device's last-level cache: inputs in turn exceed it on a GPU
_MAX_INPUT_SETS = 4
_COMPILER = "benchmarks-compile"  # how the names of threads begin
# Python traces one program at a time whatever we do: in turn, the first compiles while the others are traced.
_TRACING = threading.Lock()


@dataclasses.dataclass(kw_only=True)
class Compiled:
    """What is known of a program once it is compiled; `error` says why it is not. Sizes are those of one device."""

    run: Callable[..., Any] | None = None
    trace_s: float | None = None
    compile_s: float | None = None
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str | None = None

    def compile(self) -> None:
        """Traces, lowers and compiles; never raises."""
        try:
            self._compile()
        except Exception as error:  # whatever a library raises is this row's result
            self.error = error_text(error)

    def end(self) -> None:
        """Lets go of what the last call left on the devices."""

    def _compile(self) -> None:
        raise NotImplementedError

    def _finish(self, function, *shapes):
        with _TRACING:
            start = time.perf_counter()
            lowered = function.lower(*shapes)
            middle = time.perf_counter()
        compiled = lowered.compile()
        self.trace_s, self.compile_s = middle - start, time.perf_counter() - middle
        analysis = compiled.memory_analysis()
        for name in ("temp", "argument", "output", "alias"):
            self.memory[name] = int(getattr(analysis, f"{name}_size_in_bytes", 0) or 0)
        self.run = compiled


def compile_all(programs: Sequence[Compiled], threads: int, deadline: float, give_up: float | None = None) -> None:
    """Compiles everything before anything is timed; what does not start by `deadline` says so.

    So does what is not ready by `give_up`. It can't be stopped: it goes on in its thread (`still_compiling`).
    """

    def one(program):
        if time.monotonic() > deadline:
            program.error = "not compiled: the budget was spent"
        else:
            program.compile()

    pool = ThreadPoolExecutor(threads, _COMPILER)
    futures = {pool.submit(one, program): program for program in programs}
    timeout = None if give_up is None else max(0.0, give_up - time.monotonic())
    try:
        with contextlib.suppress(TimeoutError), progress.bar(len(programs), "compile") as bar:
            for _ in as_completed(futures, timeout):
                bar.update()
        for future, program in futures.items():
            if not future.done():
                program.error = "not compiled: it takes longer than the budget allows"
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def still_compiling() -> bool:
    """Whether `compile_all` gave something up that goes on."""
    return any(thread.name.startswith(_COMPILER) for thread in threading.enumerate())


@dataclasses.dataclass
class Program(Compiled):
    """One implementation compiled for one workload and direction."""

    implementation: Implementation
    workload: Workload
    direction: str
    repeats: int = 1  # calls of what is timed in one call of the program, each with inputs made of the results before
    residuals: Callable[..., Any] | None = None  # backward only: arrays, masks -> (out, leaves of the pullback)

    def _compile(self):
        w, implementation = self.workload, self.implementation
        arrays, d_out = w.shapes(), w.out_shape()
        masks = jax.eval_shape(lambda: implementation.masks(w))
        attend = lambda arrays, masks: implementation.attend(w, arrays, masks)

        def both(arrays, masks, d_out):
            out, pullback = jax.vjp(lambda arrays: attend(arrays, masks), arrays)
            return out, pullback(d_out)[0]

        def program(arrays, masks, *d_out):
            fn = both if d_out else attend
            of = lambda query, *d_out: fn(arrays | {"query": query}, masks, *d_out)
            return _repeated(of, self.repeats, arrays["query"], *d_out)

        if self.direction == "backward":
            self._compile_pullback(attend, arrays, masks, d_out)
        else:
            self._finish(jax.jit(program), arrays, masks, *([d_out] if self.direction == "fwdbwd" else []))

    def _compile_pullback(self, attend, arrays, masks, d_out):
        structures = []

        def forward(arrays, masks):
            out, pullback = jax.vjp(lambda arrays: attend(arrays, masks), arrays)
            leaves, structure = jax.tree.flatten(pullback)
            structures.append(structure)
            return out, leaves

        def program(leaves, d_out):
            return _repeated(lambda d_out: jax.tree.unflatten(structures[0], leaves)(d_out)[0], self.repeats, d_out)

        lowered = jax.jit(forward).lower(arrays, masks)
        self.residuals = lowered.compile()
        self._finish(jax.jit(program), lowered.out_info[1], d_out)

    def bind(self, inputs: list[tuple[dict[str, Any], Any]]) -> "Bound[Program]":
        """The program on input sets (arrays, d_out), as functions without arguments."""
        assert self.run is not None
        masks = self.implementation.masks(self.workload)
        calls = []
        for arrays, d_out in inputs:
            if self.direction == "backward":
                assert self.residuals is not None
                args = (self.residuals(arrays, masks)[1], d_out)
            else:
                args = (arrays, masks, d_out)[: 3 if self.direction == "fwdbwd" else 2]
            calls.append(args)
        return Bound(self, calls)

    def results(self, outputs: Any) -> dict[str, Any]:
        """Outputs by name: 'out', and gradients by the names of the inputs."""
        if self.direction == "forward":
            return {"out": outputs}
        return outputs if self.direction == "backward" else {"out": outputs[0], **outputs[1]}


def _repeated(fn: Callable[..., Any], repeats: int, *inputs: Any) -> Any:
    """Returns the results of the last of `repeats` calls fn(*inputs) in a loop of the program.

    Before each call the first element of each input becomes itself plus a sum, of an element of each result of the call
    before, times a zero that the compiler does not know. So it can't drop a call or a part of it, nor move anything out of
    the loop that depends on the inputs; and since the loop carries them, nothing is copied.
    """
    if repeats == 1:
        return fn(*inputs)
    element = lambda x: x[(0,) * x.ndim]
    zero = jax.numpy.minimum(jax.numpy.abs(element(inputs[0])), 0).astype("float32")
    firsts = tuple(map(element, inputs))  # read before the loop, which spares a kernel for each input in each turn

    def moved(x, first, by):
        return jax.lax.dynamic_update_slice(x, (first + by).astype(x.dtype).reshape((1,) * x.ndim), (0,) * x.ndim)

    def body(_, carry):
        inputs, results = carry
        by = zero * sum(element(leaf).astype("float32") for leaf in jax.tree.leaves(results))
        inputs = tuple(moved(x, first, by) for x, first in zip(inputs, firsts, strict=True))
        return inputs, fn(*inputs)

    return jax.lax.fori_loop(1, repeats, body, (inputs, fn(*inputs)))[1]


@dataclasses.dataclass
class Measured(Compiled):
    """A program of one kind on `devices` devices."""

    kind: ClassVar[str]
    repeats: ClassVar[int] = 1  # how often one call does what is timed

    devices: int

    def what(self) -> dict[str, Any]:
        """What tells this row from the others of its kind."""
        raise NotImplementedError

    def known(self) -> dict[str, Any]:
        """What is known of the program before it runs."""
        row = {"kind": self.kind, "devices": self.devices, **self.what()}
        row |= {"trace_s": self.trace_s, "compile_s": self.compile_s}
        return row | {f"{name}_bytes": size for name, size in self.memory.items()} | {"error": self.error}

    def arguments(self) -> tuple[Any, ...]:
        """Random arguments, on the devices."""
        raise NotImplementedError

    def bind(self) -> "Bound[Self]":
        """The program on its arguments, as a function without arguments."""
        return Bound(self, [self.arguments()])

    def figures(self, seconds: float) -> dict[str, Any]:
        """What follows from the time."""
        raise NotImplementedError

    def release(self) -> None:
        """Lets go of what the program holds on the devices."""
        self.run = None


@dataclasses.dataclass
class Bound[P: Compiled]:
    """A program with its arguments on the device, and its samples: seconds a call, wall-clock and of the process.

    `dispatch_s`: how long a call takes to return to the host, where it returns before the work ends.
    """

    program: P
    arguments: list[Any]
    calls: int = 1
    dispatch_s: float | None = None
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    def first(self) -> tuple[Any, float]:
        """(outputs, seconds) of the first call, in which a library may still prepare something."""
        assert self.program.run is not None
        start = time.perf_counter()
        outputs = jax.block_until_ready(self.program.run(*self.arguments[0]))
        return outputs, time.perf_counter() - start

    def warm_up(self, target_s: float, dispatches: int) -> None:
        """Chooses the number of calls in a sample; on a GPU also times the dispatch of a call, the best of `dispatches`."""
        self.calls = 1
        self.sample()
        if dispatches and jax.devices()[0].platform != "cpu":
            self.dispatch_s = min(self._dispatch() for _ in range(dispatches))
        self.calls = int(np.clip(np.ceil(target_s / max(self.wall[-1], 1e-7)), 1, 1000))
        self.wall.clear()
        self.cpu.clear()

    def _dispatch(self):
        assert self.program.run is not None
        start = time.perf_counter()
        outputs = self.program.run(*self.arguments[0])
        seconds = time.perf_counter() - start
        jax.block_until_ready(outputs)
        return seconds

    def sample(self) -> float:
        """One sample: seconds a call."""
        run, arguments = self.program.run, self.arguments
        assert run is not None
        wait_each = jax.devices()[0].platform == "cpu"
        outputs = None
        start, start_cpu = time.perf_counter(), time.process_time()
        for i in range(self.calls):
            outputs = run(*arguments[i % len(arguments)])
            if wait_each:
                jax.block_until_ready(outputs)
        jax.block_until_ready(outputs)
        wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        self.wall.append(wall / self.calls)
        self.cpu.append(cpu / self.calls)
        return self.wall[-1]


def start[P: Compiled](
    bind: Callable[[], Bound[P]],
    row: dict[str, Any],
    end: float,
    target_s: float,
    check: Callable[[Any], None] = lambda outputs: None,
    dispatches: int = 0,
) -> Bound[P] | None:
    """Binds a program, runs it once, checks the outputs and warms up; None where it can't be timed.

    The reason is then in the `error` of its row, where an earlier one stays. No call starts after `end`.
    """
    if row["error"] is None and time.monotonic() > end:
        row["error"] = "not run: the budget was spent"
    if row["error"] is not None:
        return None
    bound = None
    try:
        bound = bind()
        outputs, row["first_call_s"] = bound.first()
        check(outputs)
        del outputs
        bound.warm_up(target_s, dispatches)
    except Exception as error:  # out of memory, or what a library raises at run time: the row's result
        row["error"] = error_text(error)
        if bound is not None:
            bound.program.end()
        return None
    return bound


def input_sets(workload: Workload) -> list[tuple[dict[str, Any], Any]]:
    """Random inputs; on a GPU several sets where one would stay in its cache."""
    size = sum(x.size * x.dtype.itemsize for x in (*workload.shapes().values(), workload.out_shape()))
    on_cpu = jax.devices()[0].platform == "cpu"
    count = 1 if on_cpu else int(np.clip(-(-_CACHE_BYTES // size), 1, _MAX_INPUT_SETS))
    return [workload.inputs(seed) for seed in range(count)]


def take_turns(
    others: list[Bound[Any]],
    baseline: Bound[Any] | None,
    rounds: int,
    deadlines: tuple[float, float],
    after: Callable[[], object],
) -> dict[str, list[float]]:
    """Samples all: in each round the others in random order, each next to a sample of the baseline, in random order.

    Returns, by the name of its program's implementation, baseline time over own time for each pair. Of the two
    deadlines (of time.monotonic) the first ends the rounds once there are three, the second once there is one.
    """
    order = random.Random(0)
    ratios: dict[str, list[float]] = {b.program.implementation.name: [] for b in others}
    for i in range(rounds):
        if (i >= 3 and time.monotonic() > deadlines[0]) or (i >= 1 and time.monotonic() > deadlines[1]):
            break
        shuffled = order.sample(others, len(others))
        for bound in shuffled:
            if baseline is None:
                bound.sample()
            elif order.random() < 0.5:
                ratios[bound.program.implementation.name].append(baseline.sample() / bound.sample())
            else:
                own = bound.sample()
                ratios[bound.program.implementation.name].append(baseline.sample() / own)
        if baseline is not None and not others:
            baseline.sample()
        after()
    return ratios


def error_text(error: Exception) -> str:
    """The first lines of an error, as one line without paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)[:300]
    words = [word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in text.split(" ")]
    return f"{type(error).__name__}: {' '.join(words)}"
