"""One run of the training program, from its settings to its curve.

The way of a run: settings -> task (data, model, loss) -> state, new or restored -> steps -> curve, sample, summary.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from tqdm import tqdm

import pallas_fa
from models.checkpoint import Checkpoints
from models.continuation import continued
from models.data import load_corpus, load_digits, to_bytes
from models.decoder import Decoder
from models.devices import check_devices
from models.errors import Interrupted, OutputError, TrainingError, UsageError
from models.folder import METRICS, SAMPLE, check_new, make_folder, write_whole
from models.gpt import GPTConfig
from models.images import ImageTask
from models.images import model_config as image_config
from models.interrupt import StopRequest
from models.lock import locked
from models.mesh import make_layout
from models.metrics import MetricsLog, Row, read_rows
from models.output import printing
from models.plot import plot_run
from models.sample import Sampling
from models.settings import Settings, read_record, write_record
from models.step import Batch, TrainState, init_state, make_optimizer, make_train_step, schedule
from models.text import TextTask
from models.text import model_config as text_config

Task = TextTask | ImageTask
Baseline = tuple[str, float]  # its name and loss, in the task's unit
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def run(settings: Settings) -> None:
    """The whole run, in `settings.out`."""
    started = time.monotonic()
    check_devices()
    task = make_task(settings)
    attention = explain_attention(settings, task)
    make_folder(settings.out)
    with locked(settings.out):
        if settings.resume:
            check_data(settings, task)
        else:
            check_new(settings.out)  # once more: another run may have come and gone since the settings were read
        run_task(settings, task, attention)
    with printing():
        print(f"{time.monotonic() - started:.0f} s in all.", flush=True)


def run_task(settings: Settings, task: Task, attention: str) -> None:
    """Trains, and draws and prints what came of it. The folder is this run's alone."""
    optimizer = make_optimizer(settings.optimizer, schedule(settings.learning_rate, settings.warmup, settings.steps))
    layout = task.layout
    state = layout.state(init_state(layout.state(task.init()), optimizer))
    checkpoints = Checkpoints(settings.out, settings.keep)
    if settings.resume:
        state = checkpoints.restore(state)
    with printing():
        baseline = introduce(settings, task, state, attention)
    log = MetricsLog(settings.out / METRICS, step=int(state.step))
    try:
        train_step = make_train_step(task.loss, optimizer, layout.shardings(state), task.options(state.params))
        state = train(settings, task, state, train_step, checkpoints, log)
    except (Interrupted, OutputError):
        plot_run(settings.out, task.unit, baseline)
        raise
    finally:
        log.close()
        checkpoints.close()
    picture = plot_run(settings.out, task.unit, baseline)
    sample = make_sample(settings, task, state) if isinstance(task, TextTask) else None
    with printing():
        if sample is not None:
            print(f"\n--- sampled, temperature {settings.temperature} ---\n{sample}\n---")
            print("More:", shlex.join(["python", "-m", "models.generate", "--run", str(settings.out)]))
        scores = [row for row in read_rows(log.path) if "validation_loss" in row][-1:]
        results = [f"Step {row['step']}: {_score_text(row, task)}" for row in scores] + _baseline_text(baseline)
        print("\n" + "; ".join([*results, f"the curve is {picture}"]) + ".")


def check_data(settings: Settings, task: Task) -> None:
    """Raises UsageError if a resumed run would read other data than those that it was started on."""
    if read_record(settings.out)["data_digest"] != task.data_digest():
        raise UsageError(
            f"--data={settings.data!r} no longer holds the text that the run in --out={str(settings.out)!r} was "
            "started on; a resumed run must read the same bytes: restore them, or start a new run with another --out."
        )


def make_task(settings: Settings) -> Task:
    model = (settings.size, settings.dtype, settings.implementation)
    is_text = settings.task == "text"
    if is_text:
        config = text_config(*model, settings.context, settings.sinks, settings.dropout)
    else:
        config = image_config(*model, settings.dropout)
    kv_heads = config.kv_heads if isinstance(config, GPTConfig) else config.heads
    shared = {"heads": config.heads, "kv_heads": kv_heads, "hidden": config.hidden}
    layout = make_layout(settings.mesh, settings.batch, settings.context or None, **shared)
    if isinstance(config, GPTConfig):
        corpus = load_corpus(settings.data, settings.context)
        return TextTask(config, corpus, settings.batch, settings.seed, settings.validation_bytes, layout)
    return ImageTask(config, load_digits(), settings.batch, settings.seed, layout)


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
    start, clock, recorded = int(state.step), time.monotonic(), False
    pending: list[dict[str, jax.Array]] = []  # left on the device, so that no step waits for the one before it
    interval = 0.5 if sys.stderr.isatty() else 10.0  # seconds between pictures of the bar: a log file needs few
    bar = tqdm(total=settings.steps, initial=start, unit="step", dynamic_ncols=True, mininterval=interval)
    with bar, StopRequest() as stop:
        for step in range(start, settings.steps):
            state, metrics = train_step(state, task.batch(step))
            task.layout.after_step(metrics)
            pending.append(metrics)
            done = step + 1
            stopping = stop.signal  # read once: a signal during what follows counts for the next step
            last = stopping is not None or done == settings.steps
            validating = done == settings.steps or done % settings.validate_every == 0
            saving = last or done % settings.checkpoint_every == 0
            if not (saving or validating or done % settings.log_every == 0):
                continue
            rows = _rows(pending, done, task)
            rate = task.items_per_step * len(rows) / (time.monotonic() - clock)
            rows = [{**row, f"{task.items}_per_second": round(rate)} for row in rows]
            scores = task.validate(state.params) if validating else {}
            if not recorded:  # not before: a run that fails at its first step leaves its folder free
                write_record(settings, task.data_digest())
                recorded = True
            # Before the checkpoint: a run resumed there must find its rows in the log.
            log.append([*rows, {"step": done, **scores}] if validating else rows)
            if saving:
                checkpoints.save(state)
            try:
                bar.set_postfix_str(f"{rows[-1]['loss']:.3f} {task.unit}, {rate:,.0f} {task.items}/s", refresh=False)
                bar.update(len(rows))
                if validating:
                    bar.write(f"step {done}: {_score_text(scores, task)}")
            except OSError as error:  # nobody reads on, or the terminal is closed: end here, with nothing lost
                bar.disable = True  # closing it would fail too
                checkpoints.save(state)
                raise OutputError from error
            if stopping is not None and done < settings.steps:
                raise Interrupted(done, stopping)
            pending, clock = [], time.monotonic()  # validating and saving is not training time
    return state


def make_sample(settings: Settings, task: TextTask, state: TrainState) -> str | None:
    """Text that continues the prompt, which is kept too; None if none is asked for."""
    if settings.sample_bytes == 0:
        return None
    prompt = to_bytes(settings.prompt)
    decoder = Decoder(task.config, state.params, Sampling(settings.temperature))
    window = prompt[-task.config.context :]
    *_, texts = continued(decoder, [window], settings.sample_bytes, settings.seed)
    text = (prompt + texts[0].data).decode("utf-8", errors="replace")
    write_whole(settings.out / SAMPLE, text)
    return text


def _rows(metrics: list[dict[str, jax.Array]], done: int, task: Task) -> list[Row]:
    """One row for each step up to `done`, its loss in the task's unit."""
    first = done - len(metrics) + 1
    rows = []
    for step, values in enumerate(jax.device_get(metrics), start=first):
        loss, norm = float(values["loss"]), float(values["gradient_norm"])
        for name, value in (("loss", loss), ("gradient norm", norm)):  # with either, the parameters are lost
            if not math.isfinite(value):
                raise TrainingError(f"The {name} at step {step} is {value}. Lower --learning-rate (in a new run)")
        rows.append({"step": step, "loss": loss / task.per_unit, "gradient_norm": norm})
    return rows


def _score_text(scores: Row, task: Task) -> str:
    text = f"validation {scores['validation_loss']:.4f} {task.unit}"
    return text + (f", accuracy {scores['validation_accuracy']:.2%}" if "validation_accuracy" in scores else "")


def _baseline_text(baseline: Baseline | None) -> list[str]:
    return [f"{baseline[0]} {baseline[1]:.4f} bits per byte"] if baseline else []
