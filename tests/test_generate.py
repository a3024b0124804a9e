"""`python -m models.generate`: what it prints, what it refuses, and how it ends."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import models.generation
from benchmarks import generation, report, rows
from benchmarks.implementations import parse as parse_implementation
from models import generate
from models.checkpoint import Checkpoints
from models.continuation import Continuation
from models.generation import make_decoder
from models.generation_settings import parse
from models.gpt import GPT
from models.sample import Sampling
from models.screen import Screen
from models.settings import parse as parse_training
from models.settings import write_record
from models.step import init_state, make_optimizer
from models.text import model_config
from tests.training import ROOT, arguments

pytestmark = pytest.mark.usefixtures("quick_compilation", "compiled_once")
CONTEXT, COUNT = 64, 30
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with checkpoints of two steps, of models that write letters."""
    folder = tmp_path_factory.mktemp("runs") / "text-nano"
    config = model_config("nano", "float32", None, CONTEXT, sinks=True)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(0)))))()
    checkpoints = Checkpoints(folder, 3)
    for step in (10, 20):
        table = np.zeros_like(params["embedding"]["embedding"])
        table[LETTERS] = 3 * np.random.default_rng(step).standard_normal((len(LETTERS), table.shape[1]))
        params["embedding"]["embedding"] = jax.numpy.asarray(table)
        state = init_state(params, make_optimizer("adamw", 1e-3))
        checkpoints.save(state._replace(step=jax.numpy.int32(step)))
    checkpoints.close()
    given = arguments(".", folder.with_name("other"), "--context", CONTEXT, "--sinks")
    settings = parse_training(given)
    write_record(dataclasses.replace(settings, out=folder), "digest")
    return folder


def printed(capsys, run, *more):
    """(what the program prints, what it says of it); greedy."""
    arguments = ("--run", run, "--temperature", 0, "--bytes", COUNT, *more)
    assert generate.main([str(x) for x in arguments]) == 0
    return capsys.readouterr()


def test_prompts_and_what_follows_them(run, capsys):
    prompts = ["def ", "a longer prompt"]
    decoder = make_decoder(parse(["--run", str(run), "--temperature", "0"]))
    tokens = np.stack(list(decoder.tokens([list(prompt.encode()) for prompt in prompts], COUNT, 0)), axis=1)
    first, second = (bytes(row.tolist()).decode() for row in tokens)
    out, err = printed(capsys, run, "--prompt", *prompts)
    assert out == f"--- 1 of 2 ---\ndef {first}\n--- 2 of 2 ---\na longer prompt{second}\n"
    assert re.fullmatch(r"2 x 30 bytes; the first after [\d.]+ s, the others at [\d,]+ tokens/s .*ms a step\)\.\n", err)
    assert printed(capsys, run, "--step", 20).out == f"def {first}\n"  # the last step, the default prompt
    assert printed(capsys, run, "--step", 10).out != f"def {first}\n"


def test_a_stop_string_ends_a_text(run, capsys):
    _, text = printed(capsys, run).out.rstrip("\n").split(" ")
    stop = text[12:15]
    out, err = printed(capsys, run, "--stop", stop)
    assert out == f"def {text[: text.index(stop)]}\n"
    assert err.startswith("1 x") and "did not come" not in err
    almost = text[-2:] + "0"  # its beginning waits to the end
    out, err = printed(capsys, run, "--stop", almost)
    assert out == f"def {text}\n"
    assert f"--stop={almost!r} did not come within --bytes=" in err and "in 1 of 1 texts: raise" in err


def test_what_is_drawn_follows_the_seed(run, capsys):
    first, second = (printed(capsys, run, "--temperature", 3, "--seed", seed).out for seed in (1, 2))
    assert first != second


def test_how_it_is_drawn_is_what_was_asked_for(run, monkeypatch):
    monkeypatch.setattr(models.generation, "Decoder", lambda *arguments: arguments[2:])
    decoder = lambda *more: make_decoder(parse(["--run", str(run), *more]))
    assert decoder() == (Sampling(0.8), None)
    assert decoder("--top-k", "5", "--page-size", "16") == (Sampling(0.8, top_k=5), 16)
    assert decoder("--temperature", "2", "--top-p", "0.9") == (Sampling(2.0, top_p=0.9), None)


@pytest.mark.parametrize(
    ("more", "words"),
    (
        (["--run", "no/such"], ["--run='no/such' is no folder", "make train"]),
        (["--run", "docs"], ["--run='docs' has no checkpoint", "run.json"]),
        (["--step", "15"], ["--step=15", "10, 20", "leave --step out"]),
        (["--prompt", ""], ["--prompt=''", "at least one character"]),
        (["--prompt", "a", ""], ["--prompt='' (number 2 of 2)"]),
        (["--prompt", "\xe9" * 33], ["66 bytes", "context of 64", "shorten", "larger --context"]),
        (["--bytes", "0"], ["--bytes=0", "at least 1"]),
        (["--temperature", "-1"], ["--temperature=-1.0", "0 (greedy)"]),
        (["--temperature", "nan"], ["--temperature=nan", "finite"]),
        (["--top-k", "0"], ["--top-k=0", "between 1 and 256"]),
        (["--top-k", "257"], ["--top-k=257", "256"]),
        (["--top-p", "0"], ["--top-p=0.0", "above 0 and at most 1"]),
        (["--top-p", "1.5"], ["--top-p=1.5", "above 0 and at most 1"]),
        (["--top-p", "0.9", "--temperature", "0"], ["--top-p=0.9 with --temperature=0", "leave one"]),
        (["--stop", ""], ["--stop=''", "at least one character"]),
        (["--seed", "-1"], ["--seed=-1", "between 0"]),
        (["--page-size", "0"], ["--page-size=0", "between 1 and"]),
        (["--implementation", "nonsense"], ["--implementation='nonsense'", "xla"]),
    ),
)
def test_bad_arguments(run, more, words, capsys):
    assert generate.main(["--run", str(run), *more]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and all(word in captured.err for word in words), captured.err
    assert not captured.out


def test_the_last_run_is_the_default(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert generate.main([]) == 2
    assert "no run with a checkpoint" in (err := capsys.readouterr().err) and "make train" in err
    for name, age in (("text-nano", 100), ("text-tiny", 50), ("text-empty", None), ("images-nano", 0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if age is not None:
            shutil.copytree(run, tmp_path / "runs" / name, dirs_exist_ok=True)
            os.utime(tmp_path / "runs" / name / "checkpoints" / "20", (1e9 - age, 1e9 - age))
    assert str(parse([]).run) == "runs/text-tiny"


def test_runs_that_can_not_be_used(run, tmp_path, capsys):
    def said(change):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(run, folder)
        change(folder)
        assert generate.main(["--run", str(folder)]) == 2
        return capsys.readouterr().err

    def damage(folder):
        largest = max((folder / "checkpoints" / "20").rglob("*"), key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)

    record = json.loads((run / "run.json").read_text())
    assert all(x in said(damage) for x in ("step 20 is damaged", "differs from its checksum", "with --step (10)"))
    assert "can't read" in (err := said(lambda x: (x / "run.json").unlink())) and "name another run" in err
    images = json.dumps(record | {"task": "images"})
    assert "only text can be continued" in said(lambda folder: (folder / "run.json").write_text(images))
    for change, words in (
        ({"size": "huge"}, "'size' can't be 'huge': it must be one of nano, tiny"),
        ({"dtype": "float33"}, "'dtype' can't be 'float33': it must be 'float32' or 'bfloat16'"),
        ({"task": "images", "size": "small"}, "'size' can't be 'small'"),
        ({"context": 0}, "'context' can't be 0: it must be at least 2"),
        ({"sinks": "no"}, "'sinks' can't be 'no'"),
    ):
        broken = json.dumps(record | change)
        err = said(lambda x, broken=broken: (x / "run.json").write_text(broken))
        assert "--run can't read" in err and words in err and "name another run" in err
    for change in ({"sinks": False}, {"size": "tiny"}):
        other = json.dumps(record | change)
        assert "those of another model). It is intact" in said(
            lambda x, other=other: (x / "run.json").write_text(other)
        )


@pytest.mark.parametrize(
    ("error", "status", "message"),
    (
        (BrokenPipeError(), 141, ""),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 1, "fewer prompts at once, or a smaller --bytes"),
    ),
)
def test_ends(run, capsys, monkeypatch, error, status, message):
    def show(self, texts, complete=False):
        raise error

    monkeypatch.setattr(Screen, "show", show)
    assert generate.main(["--run", str(run), "--temperature", "0", "--bytes", str(COUNT)]) == status
    assert message in (err := capsys.readouterr().err) and (message or not err)


@pytest.mark.full
def test_interrupts_and_pipes_of_the_real_program(run):
    command = [sys.executable, "-m", "models.generate", "--run", str(run), "--bytes", str(10**6)]
    start = lambda: subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with start() as program:
        assert program.stdout.read(20).startswith(b"def ")
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (130, b"\nInterrupted.\n")
    with start() as program:
        program.stdout.read(20)
        program.stdout.close()
        assert (program.wait(timeout=60), program.stderr.read()) == (141, b"")


# ---- on the screen ----


def test_what_may_begin_the_stop_string_waits():
    text = Continuation(b"aab")
    shown = []
    for byte in b"xaaaby":
        text.add(byte)
        shown.append(bytes(text.data[: text.settled]))
    assert shown == [b"x", b"x", b"x", b"xa", b"xa", b"xa"]
    assert text.stopped


def test_texts_stream_in_their_order(capsys):
    prompts = ["\N{EURO SIGN} ".encode(), b"b: "]
    screen, texts = Screen(prompts), [Continuation(b"."), Continuation(b".")]

    def step(*letters, complete=False):
        for text, letter in zip(texts, letters, strict=True):
            text.add(letter)
        screen.show(texts, complete)
        return capsys.readouterr().out

    euro = "\N{EURO SIGN}".encode()
    assert step(euro[0], ord("u")) == "--- 1 of 2 ---\n\N{EURO SIGN} "  # not a part of a character
    assert step(euro[1], ord("v")) == ""
    assert step(euro[2], ord("w")) == "\N{EURO SIGN}"
    assert step(ord("."), ord("x")) == "\n--- 2 of 2 ---\nb: uvwx"
    assert step(ord("y"), euro[0]) == ""  # the first has stopped
    assert step(0, ord("."), complete=True) == "\N{REPLACEMENT CHARACTER}"


def test_control_characters_stay_out_of_a_terminal(capsys, monkeypatch):
    text = Continuation(data=bytearray(b"\x1b[2J\r\tx\n"))
    Screen([b">"]).show([text], complete=True)
    assert capsys.readouterr().out == ">\x1b[2J\r\tx\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Screen([b">"]).show([text], complete=True)
    assert capsys.readouterr().out == ">\\x1b[2J\\x0d\tx\n"


# ---- the benchmark ----


def test_a_row_for_each_attention_and_batch(tmp_path, monkeypatch, capsys):
    out = tmp_path / "generation.jsonl"
    options = ["--size", "nano", "--dtype", "float32", "--batches", "2", "--rounds", "1", "--tokens", "4"]
    names = ["pallas_fa:xla", "jax.nn:cudnn"]
    options += ["--implementations", *names, "--commit", "abc", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["generation", *options])
    generation.main()
    found = rows.read([out])
    assert [(row["batch"], row["implementation"]) for row in found] == [(2, name) for name in names]
    ours, peer = found
    assert "cuDNN" in peer["error"]  # there is none on a CPU
    assert ours["error"] is None and ours["tokens_per_s"] == pytest.approx(2 / ours["p50_ms"] * 1e3)
    parameters = 256 * 32 + 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 96)  # of the matrices
    assert ours["bytes"] == 4 * (parameters + 2 * 2 * 2 * 8 * 2 * 18.5)  # and of a layer's 2 key heads, twice
    page = report.page([out])
    assert "| 2 x (16 + 4) |" in page and "tokens a second" in page


def test_the_peer_of_the_benchmark_draws_the_same_tokens():
    config = dataclasses.replace(model_config("nano", "float32", None, 32), layers=1)
    params = nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(3))))
    ours, peer = (
        list(generation.make_decoder(config, params, parse_implementation(name)).tokens([[1, 2, 3], [4]], 20, 0))
        for name in ("pallas_fa:xla", "jax.nn:xla")
    )
    np.testing.assert_array_equal(ours, peer)
