"""What `python -m models.generate` does: from the settings of a trained run to text on the terminal."""

from __future__ import annotations

import sys
import time

import jax
from flax import nnx

from models.checkpoint import restore_params
from models.continuation import Continuation, continued
from models.data import to_bytes
from models.decoder import Decoder
from models.devices import check_devices
from models.errors import UsageError
from models.generation_settings import Settings
from models.gpt import GPT
from models.output import printing
from models.sample import Sampling
from models.screen import Screen
from models.text import model_config


def run(settings: Settings) -> None:
    """Prints each prompt and what follows it, and then, to the standard error, how fast that was."""
    check_devices()
    started = time.monotonic()
    prompts, stop = [to_bytes(prompt) for prompt in settings.prompts], to_bytes(settings.stop or "")
    screen, steps, first, texts = Screen(prompts), 0, 0.0, []
    decoder = make_decoder(settings)
    try:
        for texts in continued(decoder, prompts, settings.count, settings.seed, stop):
            with printing():
                screen.show(texts)
            steps += 1
            first = first if steps > 1 else time.monotonic()
    except (ValueError, NotImplementedError) as error:  # of the attention, while it is traced
        if settings.implementation is None:
            raise
        raise UsageError(f"--implementation={settings.implementation!r}: {error}") from error
    ended = time.monotonic()
    with printing():
        screen.show(texts, complete=True)
        print(flush=True)
    print(summary(len(prompts), steps, first - started, ended - first), file=sys.stderr)
    if reproach := unstopped(settings, texts):
        print(reproach, file=sys.stderr)


def make_decoder(settings: Settings) -> Decoder:
    """The model of a run, with the parameters of one of its checkpoints."""
    config = model_config(
        settings.size, settings.dtype, settings.implementation, settings.context, sinks=settings.sinks
    )
    like = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(0)))))
    params = restore_params(settings.run, settings.step, like)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    return Decoder(config, params, sampling, settings.page_size)


def summary(sequences: int, steps: int, first: float, rest: float) -> str:
    """How fast it was. The first token waits for the checkpoint and the compiler; the rate is that of the others."""
    words = f"{sequences} x {steps} bytes; the first after {first:.1f} s"
    if steps > 1 and rest > 0:
        words += (
            f", the others at {sequences * (steps - 1) / rest:,.0f} tokens/s ({rest / (steps - 1) * 1e3:.2f} ms a step)"
        )
    return words + "."


def unstopped(settings: Settings, texts: list[Continuation]) -> str | None:
    """What to say of texts that never reached the stop string."""
    count = sum(not text.stopped for text in texts)
    if settings.stop is None or not count:
        return None
    return (
        f"--stop={settings.stop!r} did not come within --bytes={settings.count} in {count} of {len(texts)} texts: raise "
        "--bytes, or choose a stop string that is frequent in the text that the model was trained on."
    )
