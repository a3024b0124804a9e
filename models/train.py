"""Trains a model: `python -m models.train --help`.

The way of a run: settings -> task (data, model, loss) -> state, new or restored -> steps -> curve, sample, summary.
"""

from __future__ import annotations

import logging
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

import pallas_fa
from models.checkpoint import Checkpoints, list_steps
from models.data import load_corpus, load_digits
from models.errors import Interrupted, TrainingError, UsageError, is_disk_full
from models.gpt import GPTConfig
from models.images import ImageTask
from models.images import model_config as image_config
from models.interrupt import StopRequest
from models.mesh import make_layout
from models.metrics import MetricsLog, Row, read_rows
from models.plot import METRICS, plot_run
from models.sample import sample_text
from models.settings import CHECKPOINTS, Settings, parse, record, recorded_digest
from models.step import Batch, TrainState, init_state, make_optimizer, make_train_step, schedule
from models.text import TextTask
from models.text import model_config as text_config

Task = TextTask | ImageTask
Baseline = tuple[str, float]  # its name and loss, in the task's unit
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 bad arguments or data, 130 interrupted."""
    try:
        settings = parse(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        run(settings)
    except (Exception, KeyboardInterrupt) as error:
        explained = _explain(error, settings)
        if explained is None:
            raise
        print(explained[1], file=sys.stderr)
        return explained[0]
    return 0


def run(settings: Settings) -> None:
    """The whole run, in `settings.out`."""
    started = time.monotonic()
    task, data_digest = make_task(settings)
    if settings.resume and recorded_digest(settings.out) != data_digest:
        raise UsageError(
            f"--data={settings.data!r} no longer holds the text that the run in --out={str(settings.out)!r} was "
            "started on; a resumed run must read the same bytes: restore them, or start a new run with another --out."
        )
    attention = explain_attention(settings, task)
    _make_folder(settings.out)
    record(settings, data_digest)
    optimizer = make_optimizer(settings.optimizer, schedule(settings.learning_rate, settings.warmup, settings.steps))
    layout = task.layout
    state = layout.state(init_state(layout.state(task.init()), optimizer))
    checkpoints = Checkpoints(settings.out / CHECKPOINTS, settings.keep)
    if settings.resume:
        state = checkpoints.restore(state)
    baseline = introduce(settings, task, state, attention)
    log = MetricsLog(settings.out / METRICS, step=int(state.step))
    try:
        train_step = make_train_step(task.loss, optimizer, layout.shardings(state), task.options(state.params))
        state = train(settings, task, state, train_step, checkpoints, log)
    except Interrupted:
        plot_run(settings.out, task.unit, baseline)
        raise
    finally:
        log.close()
        checkpoints.close()
    picture = plot_run(settings.out, task.unit, baseline)
    if isinstance(task, TextTask):
        write_sample(settings, task, state)
    scores = [row for row in read_rows(log.path) if "validation_loss" in row][-1]
    print(f"\nStep {scores['step']}: " + "; ".join([_score_text(scores, task), *_baseline_text(baseline)]) + ".")
    print(f"{time.monotonic() - started:.0f} s in all. The curve is {picture}.")


def make_task(settings: Settings) -> tuple[Task, str]:
    """The task, and a digest of its data."""
    model = (settings.size, settings.dtype, settings.implementation)
    config = text_config(*model, context=settings.context) if settings.task == "text" else image_config(*model)
    kv_heads = config.kv_heads if isinstance(config, GPTConfig) else config.heads
    shared = {"heads": config.heads, "kv_heads": kv_heads, "hidden": config.hidden}
    layout = make_layout(settings.mesh, settings.batch, settings.context or None, **shared)
    if isinstance(config, GPTConfig):
        corpus = load_corpus(settings.data, settings.context)
        task = TextTask(config, corpus, settings.batch, settings.seed, settings.validation_bytes, layout)
        return task, corpus.digest()
    return ImageTask(config, load_digits(), settings.batch, settings.seed, layout), "digits"


def explain_attention(settings: Settings, task: Task) -> str:
    """Which implementation the attention takes. Lowers one call: what can't be done is said before the long work."""
    t, n, k, h = task.attention_shape
    query, key = (jax.ShapeDtypeStruct((settings.batch, t, heads, h), settings.dtype) for heads in (n, k))

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return task.attention(query, key, value, settings.implementation).sum(dtype=jnp.float32)

    try:
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, key)
        query, key = (jax.ShapeDtypeStruct(task.layout.attention_part(x.shape), x.dtype) for x in (query, key))
        causal = isinstance(task, TextTask)
        return pallas_fa.explain(query, key, key, is_causal=causal, implementation=settings.implementation)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"--implementation={settings.implementation!r}: {error}") from error


def introduce(settings: Settings, task: Task, state: TrainState, attention: str) -> Baseline | None:
    """Prints what is about to happen; returns what the losses are to be compared with."""
    devices = jax.devices()
    parameters = sum(param.size for param in jax.tree.leaves(state.params))
    print(f"{task.name}: {settings.size}, {parameters:,} parameters, {settings.dtype}, {settings.optimizer}")
    print(f"Device: {len(devices)} x {devices[0].device_kind} ({devices[0].platform}).")
    if task.layout.mesh is not None:
        print(f"Mesh: {settings.mesh}, on the first {task.layout.mesh.size} of them.")
    print("Attention:", attention.replace("\n", "\n  "), sep="\n  ")
    print(f"Data: {task.source}.")
    print(f"Steps {int(state.step)} to {settings.steps} of {task.items_per_step} {task.items}, into {settings.out}.")
    if not isinstance(task, TextTask):
        return None
    baseline = ("order-2 byte model", task.order_two())
    print(*_baseline_text(baseline), "on the same held-out bytes.", flush=True)
    return baseline


def train(
    settings: Settings, task: Task, state: TrainState, train_step: TrainStep, checkpoints: Checkpoints, log: MetricsLog
) -> TrainState:
    """Steps until `settings.steps` are done. Raises Interrupted, with a checkpoint written, if a signal asks for it."""
    start, clock = int(state.step), time.monotonic()
    pending: list[dict[str, jax.Array]] = []  # left on the device, so that no step waits for the one before it
    interval = 0.5 if sys.stderr.isatty() else 10.0  # seconds between pictures of the bar: a log file needs few
    bar = tqdm(total=settings.steps, initial=start, unit="step", dynamic_ncols=True, mininterval=interval)
    with bar, StopRequest() as stop:
        for step in range(start, settings.steps):
            state, metrics = train_step(state, task.batch(step))
            task.layout.after_step(metrics)
            pending.append(metrics)
            done = step + 1
            stopping = stop.requested  # read once: a signal during what follows counts for the next step
            last = stopping or done == settings.steps
            if last or done % settings.log_every == 0:
                rows = _rows(pending, done, task)
                rate = task.items_per_step * len(rows) / (time.monotonic() - clock)
                log.append([{**row, f"{task.items}_per_second": round(rate)} for row in rows])
                bar.set_postfix_str(f"{rows[-1]['loss']:.3f} {task.unit}, {rate:,.0f} {task.items}/s", refresh=False)
                bar.update(len(rows))
                pending, clock = [], time.monotonic()
            # Before the checkpoint: a run resumed there must find its row in the log.
            if done == settings.steps or done % settings.validate_every == 0:
                scores = task.validate(state.params)
                log.append([{"step": done, **scores}])
                bar.write(f"step {done}: {_score_text(scores, task)}")
            if last or done % settings.checkpoint_every == 0:
                checkpoints.save(state)
            if len(pending) == 0:
                clock = time.monotonic()  # validating and saving is not training time
            if stopping and done < settings.steps:
                raise Interrupted(done)
    return state


def write_sample(settings: Settings, task: TextTask, state: TrainState) -> None:
    """Prints text that continues the prompt, and keeps it."""
    if settings.sample_bytes == 0:
        return
    text = sample_text(
        task.graph,
        task.config,
        state.params,
        settings.prompt,
        settings.sample_bytes,
        settings.temperature,
        settings.seed,
    )
    (settings.out / "sample.txt").write_text(text, encoding="utf-8")
    print(f"\n--- sampled, temperature {settings.temperature} ---\n{text}\n---")


def _rows(metrics: list[dict[str, jax.Array]], done: int, task: Task) -> list[Row]:
    """One row for each step up to `done`, its loss in the task's unit."""
    first = done - len(metrics) + 1
    rows = []
    for step, values in enumerate(jax.device_get(metrics), start=first):
        loss = float(values["loss"])
        if not math.isfinite(loss):
            raise TrainingError(f"The loss at step {step} is {loss}. Lower --learning-rate (in a new run)")
        rows.append({"step": step, "loss": loss / task.per_unit, "gradient_norm": float(values["gradient_norm"])})
    return rows


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise UsageError(
            f"--out={str(out)!r} can't be made ({error.strerror}); it must be a folder that you may write to: choose "
            "another."
        ) from error


def _explain(error: BaseException, settings: Settings) -> tuple[int, str] | None:
    """(exit status, message) of an end that a user can act on; None for a bug, which keeps its traceback."""
    steps = list_steps(settings.out / CHECKPOINTS)
    how = f"python -m models.train --out {shlex.quote(str(settings.out))} --resume"
    saved = f"The last checkpoint is step {steps[-1]}; continue with: {how}" if steps else "No checkpoint was written."
    if isinstance(error, UsageError):
        return 2, f"error: {error}"
    if isinstance(error, Interrupted):
        return 130, f"Interrupted after step {error.step}. {saved}"
    if isinstance(error, KeyboardInterrupt):
        return 130, f"\nInterrupted. {saved}"
    if isinstance(error, TrainingError):
        return 1, f"error: {error}. {saved}"
    if is_disk_full(error):
        # asyncio would log, at any time from now on, Orbax's other writes that failed for the same reason.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        return 1, f"error: the disk that holds --out={str(settings.out)!r} is full. Free some space. {saved}"
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        return 1, f"error: the device is out of memory. Lower --batch, --context or --size (in a new run). {saved}"
    return None


def _score_text(scores: Row, task: Task) -> str:
    text = f"validation {scores['validation_loss']:.4f} {task.unit}"
    return text + (f", accuracy {scores['validation_accuracy']:.2%}" if "validation_accuracy" in scores else "")


def _baseline_text(baseline: Baseline | None) -> list[str]:
    return [f"{baseline[0]} {baseline[1]:.4f} bits per byte"] if baseline else []


def _quiet_orbax() -> None:
    """Keeps the pages of traceback of a failed read or write off the screen; `_explain` says it in two lines.

    Orbax logs it, and then each of tensorstore's threads finds the event loop closed that it was to report to.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def filtered(unraisable: sys.UnraisableHookArgs) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = filtered


if __name__ == "__main__":
    _quiet_orbax()
    sys.exit(main())
