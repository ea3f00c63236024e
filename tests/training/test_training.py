"""Training: the loss falls, a killed run resumes exactly, and impossible requests are refused in one line."""

import io
import re
import resource
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from llamaspec import cli
from llamaspec.model.cache import LayerCache
from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tensors import tensor_shapes
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.reference import llama as reference
from llamaspec.reference.attention import causal_mask
from llamaspec.reference.config import Config
from llamaspec.training import data, loop, saving, scratch
from llamaspec.training.data import Example, Text, batches, files_beside
from llamaspec.training.evaluation import evaluate
from llamaspec.training.loop import StepReport
from llamaspec.training.objectives.supervised import of_documents, summed_loss
from llamaspec.training.ops import WHOLE_ATTENTION, attend_whole, remat
from llamaspec.training.optimizers import optimizer
from llamaspec.training.recipe import Recipe
from llamaspec.training.scratch import identity, initial_tensors, train
from llamaspec.training.steps import TrainingFunctions, compile_step
from llamaspec.training.stories import source, vocabulary
from llamaspec.training.stories.source import Stories, questions
from llamaspec.training.stories.vocabulary import EOS
from llamaspec.verify.bounds import running_error as bound
from llamaspec.verify.bounds.running_error import exactly, gamma
from tests.model.test_model_against_reference import composed_bound
from tests.support import tiny_tokenizers
from tests.support.processes import REPOSITORY
from tests.support.random_models import random_checkpoint
from tests.support.refusals import mentions
from tests.support.strategies import assert_within, seeds

TINY = Config(
    dim=16, layers=1, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=448, context=32, eps=1e-5, theta=1e4, tied=True
)
SHAPE = ("--dim=16", "--layers=1", "--heads=4", "--kv-heads=2", "--head-dim=4", "--ffn=24")
RECIPE = Recipe(TINY, steps=50, batch=4, lr=0.1)
OPTIONS = (*SHAPE, "--context=32", "--steps=50", "--batch=4", "--lr=0.1", "--answers=1")  # the options of RECIPE
FLOAT32 = np.dtype(np.float32)
EVALUATED = re.compile(r"step (\d+) loss ([\d.]+) \S+ tokens/s \d+ s held-out loss ([\d.]+)")


def llamaspec(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, stdout and stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["llamaspec", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0), out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


def evaluations(log: str) -> list[tuple[str, str, str]]:
    """List step, loss and held-out loss of each evaluation in a log, even if the log's lines are wrapped."""
    return EVALUATED.findall(" ".join(log.split()))


def refusal(*arguments: str) -> str:
    """Run a command that must fail; return its one-line error message."""
    code, out, err = llamaspec(*arguments)
    assert (code > 0, out) == (True, ""), err
    assert err.startswith("error: ") and err.count("\n") == 1 and "bug of llamaspec" not in err, err
    return err


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


class Killed(BaseException):
    """An exception that no handler catches; it stands in for killing the process."""


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory) -> tuple[Path, Path]:
    """Write a text of letters in alphabetical order, and its tokenizer.

    All documents are padded to the same length, so one compiled program is enough.
    """
    folder = tmp_path_factory.mktemp("alphabet")
    letters = string.ascii_lowercase * 2
    (folder / "text").write_text("\n\n".join(letters[i : i + n] for n in (18, 19, 20) for i in range(26)))
    (folder / "tokenizer.bin").write_bytes(tiny_tokenizers.llama2c())
    return folder / "text", folder / "tokenizer.bin"


@pytest.fixture(scope="module")
def command(alphabet) -> tuple[str, ...]:
    """Return the command line that trains RECIPE on the alphabet."""
    text, tokenizer = map(str, alphabet)
    return ("train", "--text", text, "--tokenizer", tokenizer, *OPTIONS)


@pytest.fixture(scope="module")
def full_run(command, tmp_path_factory) -> tuple[Path, str]:
    """Train without interruption; return the folder and the log."""
    out = tmp_path_factory.mktemp("whole") / "out"
    code, printed, log = llamaspec(*command, "--eval-every=10", "--save-every=20", "--out", str(out))
    assert (code, printed) == (0, ""), log
    return out, log


KILLED_AS_IT_WRITES_STEP_30 = """
import os, signal
from llamaspec.training import saving

def save_file(arrays, path, metadata, write=saving.save_file):
    if metadata["step"] == "30":
        path.write_bytes(b"half a checkpoint")
        os.kill(os.getpid(), signal.SIGKILL)
    write(arrays, path, metadata)

saving.save_file = save_file
from llamaspec import cli
cli.main()
"""


@pytest.fixture(scope="module")
def killed(command, full_run, tmp_path_factory) -> Path:
    """Start the same training, and kill it between steps 25 and 30; return its folder."""
    out = tmp_path_factory.mktemp("killed") / "out"
    arguments = [*command, "--save-every=5", "--out", str(out)]
    process = subprocess.run(
        [sys.executable, "-c", KILLED_AS_IT_WRITES_STEP_30, *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    return out


@pytest.fixture
def stopped(killed, tmp_path) -> Path:
    """Copy the folder that the killed training left, and return the copy."""
    return Path(shutil.copytree(killed, tmp_path / "out"))


@pytest.fixture(scope="module")
def stories() -> Iterator[Stories]:
    """Create the source of stories, but with a tokenizer trained on fewer stories, and with fewer held-out stories."""
    with pytest.MonkeyPatch.context() as patch:
        train_tokenizer = vocabulary.train_tokenizer
        patch.setattr(vocabulary, "train_tokenizer", lambda: train_tokenizer(range(0, 600, 2)))
        patch.setattr(source, "HELD_OUT", 12)
        stories = Stories()
        patch.setattr(source, "Stories", lambda: stories)
        yield stories


def test_the_loss_falls(full_run):
    """The final loss is at most half the loss of a uniform guess."""
    steps, losses, held_out = zip(*evaluations(full_run[1]), strict=True)
    assert steps == ("10", "20", "30", "40", "50")
    for falling in (losses, held_out):
        falling = [float(loss) for loss in falling]
        assert falling == sorted(falling, reverse=True)
        assert falling[-1] < np.log(TINY.vocab) / 2


def test_a_killed_run_goes_on_to_the_same_weights(full_run, stopped, command):
    assert [path.name for path in saving.checkpoints(stopped)] == [
        "step-00000020.safetensors",
        "step-00000025.safetensors",
    ]
    assert len(list(stopped.glob(".step-00000030.safetensors.*.partial"))) == 1
    code, _, log = llamaspec(*command, "--eval-every=10", "--resume", "--out", str(stopped))
    assert code == 0, log
    assert evaluations(log) == evaluations(full_run[1])[2:]  # steps 30, 40, 50
    assert weights(stopped) == weights(full_run[0])


def test_training_with_a_host_ahead_of_its_device_gives_the_same_weights(full_run, command, monkeypatch, tmp_path):
    """Training gives the same weights if the host queues a step ahead of the device, as it does with a GPU."""
    monkeypatch.setattr(loop, "steps_ahead", lambda platform: 1)
    code, _, log = llamaspec(*command, "--eval-every=10", "--save-every=20", "--out", str(tmp_path / "out"))
    assert code == 0, log
    assert evaluations(log) == evaluations(full_run[1])
    assert weights(tmp_path / "out") == weights(full_run[0])


@pytest.mark.parametrize(("platform", "ahead"), [("cpu", 0), ("gpu", 1)])
def test_the_host_is_ahead_of_a_gpu_by_a_step_and_reports_each_in_its_turn(
    alphabet, monkeypatch, tmp_path, platform, ahead
):
    seen: list[tuple[str, int]] = []

    def counted(loss: Any, transform: optax.GradientTransformation, **where: Any) -> TrainingFunctions:
        step = compile_step(loss, transform, **where)

        def update(*arrays: Any) -> Any:
            seen.append(("begun", sum(word == "begun" for word, _ in seen) + 1))
            return step.update(*arrays)

        return step._replace(update=update)

    monkeypatch.setattr(scratch, "compile_step", counted)
    monkeypatch.setattr(loop, "steps_ahead", lambda _, real=loop.steps_ahead: real(platform))
    source = Text(alphabet[0], load_tokenizer(alphabet[1]), {}, context=32)

    def report(progress: StepReport):
        seen.append(("done", progress.step))

    train(replace(RECIPE, steps=5), source, tmp_path / "out", eval_every=3, save_every=5, report=report)
    begun, done = ([number for word, number in seen if word == which] for which in ("begun", "done"))
    assert (begun, done) == ([1, 2, 3, 4, 5], [1, 2, 3, 3, 4, 5, 5])  # evaluated steps are reported twice
    order = {(word, number): place for place, (word, number) in reversed([*enumerate(seen)])}
    for number in (1, 2, 4):  # steps without an evaluation or a checkpoint
        assert (order["begun", number + 1] < order["done", number]) == bool(ahead)
    assert order["done", 3] < order["begun", 4]  # losses are checked before an evaluation or a checkpoint


def test_processes_that_would_go_on_from_other_steps_are_refused(stopped, alphabet, monkeypatch):
    """Processes refuse to resume together if their saved checkpoints are at different steps."""
    source = Text(alphabet[0], load_tokenizer(alphabet[1]), files_beside(alphabet[1]), context=32)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(loop, "agreed", lambda step: step - 5)
    with pytest.raises(CheckpointError, match=r"step 25.*process 0.*step 20"):
        train(RECIPE, source, stopped, eval_every=10, save_every=5, resume=True)


def test_a_run_killed_behind_its_last_step_writes_the_model(full_run, command, tmp_path):
    out = Path(shutil.copytree(full_run[0], tmp_path / "out"))
    shutil.rmtree(out / "model")
    code, _, log = llamaspec(*command, "--resume", "--out", str(out))
    assert (code, files(out)) == (0, files(full_run[0])), log


def test_the_written_weights_are_the_trained_ones_rounded_once(full_run, alphabet):
    tensors = initial_tensors(TINY, seed=0)
    state = optimizer(lr=RECIPE.lr, steps=RECIPE.steps, warm_up=RECIPE.warm_up, decay=RECIPE.decay).init(tensors)
    text = Text(alphabet[0], load_tokenizer(alphabet[1]), files_beside(alphabet[1]), context=32)
    last = saving.checkpoints(full_run[0])[-1]
    trained, _, step, _ = saving.load_state(last, identity(RECIPE, text), tensors, state)
    assert step == RECIPE.steps
    written = open_checkpoint(full_run[0] / "model")
    assert (written.config, written.stops) == (TINY, {EOS})
    for name, tensor in written.tensors.items():
        assert np.array_equal(tensor.read(), np.asarray(trained[name]).astype(ml_dtypes.bfloat16)), name


def test_the_written_model_continues_the_alphabet(full_run):
    options = ("--temperature=0", "--max-new-tokens=8", "--backend=reference")
    code, out, log = llamaspec("generate", "fghij", "--model", str(full_run[0] / "model"), *options)
    assert (code, out) == (0, "fghijklmnopqr\n"), log


@pytest.mark.parametrize("damage", [b"", b"rubbish" * 9, None])
def test_an_unreadable_checkpoint_is_named_and_nothing_is_lost(full_run, stopped, command, damage):
    _, last = saving.checkpoints(stopped)
    last.write_bytes(last.read_bytes()[:-100] if damage is None else damage)
    before = files(stopped)
    message = refusal(*command, "--resume", "--out", str(stopped))
    assert f"{last.name}: " in message and "damaged" in message
    assert files(stopped) == before


def test_the_checkpoint_before_an_unreadable_one_serves(full_run, stopped, command):
    saving.checkpoints(stopped)[-1].unlink()
    code, _, log = llamaspec(*command, "--resume", "--out", str(stopped))
    assert (code, weights(stopped)) == (0, weights(full_run[0])), log


def test_a_full_disk_loses_no_checkpoint(full_run, stopped, command):
    """A full disk loses no checkpoint that was saved before.

    A file size limit below a checkpoint's size simulates the full disk.
    """
    # The next write removes files that a killed process left half-written.
    before = {name: data for name, data in files(stopped).items() if not name.endswith(".partial")}
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        message = refusal(*command, "--resume", "--save-every=10", "--out", str(stopped))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert re.search("(?i)too large|no space|I/O error", message)
    assert files(stopped) == before


def test_a_started_training_is_not_overwritten(full_run, stopped, command):
    for out, arguments, words in (
        (stopped, (), "already contains a training run: continue it with --resume"),
        (stopped, ("--resume", "--lr=0.5", "--seed=2"), "was made with a different lr, seed"),
        (full_run[0], ("--resume",), "model: already exists: this training run is complete"),
    ):
        before = files(out)
        assert words in refusal(*command, *arguments, "--out", str(out))
        assert files(out) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out=OUT", "--text=NONE"], "No such file"),
        (["--out=OUT", "--text=EMPTY"], "contains no text"),
        (["--out=OUT", "--text=BINARY"], "is not UTF-8: its byte"),
        (["--out=OUT", "--text=EMPTY", "--context=1"], "'--context' 1 not in range"),
        (["--out=OUT", "--heads=3", "--kv-heads=2"], "number of heads 3 multiple 2 kv heads"),
        (["--out=OUT", "--head-dim=15"], "head_dim 15 even"),
        (["--out=OUT", "--dim=0"], "'--dim' 0 not in range"),
        (["--out=OUT", "--context=1"], "'--context' 1 not in range"),
        (["--out=OUT", "--steps=0"], "'--steps' 0 not in range"),
        (["--out=OUT", "--save-every=0"], "'--save-every' 0 not in range"),
        (["--out=OUT", "--batch=0"], "'--batch' 0 not in range"),
        (["--out=OUT", "--lr=nan"], "lr positive"),
        (["--out=OUT", "--seed=-1"], "'--seed' -1 not in range"),
        (["--out=OUT", "--answers=-1"], "'--answers' -1.0 not in range"),
        (["--out=OUT", "--resume"], "contains no checkpoint"),
        (["--out=EMPTY"], "Not a directory"),
        (["--out=OUT", "--tokenizer=NONE"], "--tokenizer needs --text"),
        (["--evaluate=NONE"], "No such file"),
        ([], "give either"),
    ],
)
def test_impossible_trainings_are_refused_in_one_line(stories, tmp_path, arguments, words):
    (tmp_path / "EMPTY").write_text("\n \n\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    places = [re.sub("=(OUT|NONE|EMPTY|BINARY)$", rf"={tmp_path}/\1", argument) for argument in arguments]
    assert mentions(refusal("train", *places), words)
    assert not (tmp_path / "OUT").exists()


def test_documents_cut_before_anything_to_learn_are_one_line(stories, monkeypatch, tmp_path):
    monkeypatch.setattr(stories, "training", lambda step, recipe: [Example([1] * 40, [0.0] * 32 + [1.0] * 8)])
    arguments = (*SHAPE, "--context=32", "--out", str(tmp_path / "out"))
    assert re.search("step 1 .*32 tokens.*context", refusal("train", *arguments))


@pytest.mark.parametrize("ahead", [0, 1])
def test_gradients_that_are_not_finite_end_the_run_and_no_checkpoint_is_broken(
    full_run, command, monkeypatch, tmp_path, ahead
):
    """A run ends after three skipped steps in a row, and all checkpoints that it saved are finite.

    A new run that follows the advice of the error message succeeds.
    """
    monkeypatch.setattr(loop, "steps_ahead", lambda platform: ahead)
    out = tmp_path / "out"
    code, printed, log = llamaspec(*command, "--lr=1e30", "--save-every=1", "--out", str(out))
    assert (code, printed) == (1, "")
    *skipped, message = log.splitlines()
    first, last = re.findall(r"the gradients of steps (\d+) to (\d+) are not finite: start again with", message)[0]
    assert int(last) - int(first) == loop.MOST_SKIPPED - 1
    assert all("skipped: its gradient is not finite" in line for line in skipped) and len(skipped) == 3
    assert "a different --out" in message and "a smaller --lr" in message
    assert len(saving.checkpoints(out)) == 2  # of the steps before
    for path in saving.checkpoints(out):
        assert int(path.stem[-8:]) < int(first)
        assert all(np.isfinite(array).all() for array in load_file(path).values())
    code, _, log = llamaspec(*command, "--lr=1e-3", "--steps=2", "--out", str(tmp_path / "again"))
    assert code == 0, log


def test_a_step_whose_gradient_is_not_finite_is_skipped():
    """A NaN in one number of the gradient leaves all weights and the optimizer's state as they were, bit for bit."""
    tensors = random_tensors(TINY, seed=0)
    transform = optimizer(lr=0.1, steps=10, warm_up=0, decay=0.5)
    step = compile_step(lambda *_: None, transform, platform="cpu")
    gradient = {name: np.ones_like(a) for name, a in tensors.items()}
    start = jax.tree.map(np.asarray, transform.init(tensors))
    for broken in (False, True):
        gradient["model.norm.weight"][3] = np.inf if broken else 1.0
        trained, state, finite = step.update(*jax.tree.map(jnp.asarray, (tensors, start, gradient)), jnp.float32(2))
        same = [np.array_equal(*both) for both in zip(
            jax.tree.leaves((trained, state)), jax.tree.leaves((tensors, start)), strict=True
        )]  # fmt: skip
        assert (bool(finite), all(same)) == (not broken, broken)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    tensors = {"w": jnp.ones(2)}
    saving.save_state(tmp_path, 1, 0.0, {}, tensors, ())
    before = files(tmp_path)
    with pytest.raises(FloatingPointError, match=r"is not finite after step 2: start again with a different --out and"):
        saving.save_state(tmp_path, 2, 0.0, {}, {"w": jnp.array([1, jnp.nan])}, ())
    assert files(tmp_path) == before


def test_a_run_goes_on_only_with_its_own_documents(stories, stopped, command, alphabet, tmp_path):
    """Resuming with other documents is refused, and the error names the difference.

    The other documents come from a different text, a different tokenizer of the same size, or the built-in model's
    stories.
    """
    other_text, other_tokenizer = tmp_path / "text", tmp_path / "tokenizer.bin"
    other_text.write_text(alphabet[0].read_text().upper())
    a, b = (b"\1\0\0\0" + letter for letter in (b"a", b"b"))  # pieces, each after its length
    other_tokenizer.write_bytes(alphabet[1].read_bytes().replace(a, b"A?").replace(b, a).replace(b"A?", b))
    resume = (*command, "--resume", "--out", str(stopped))
    before = files(stopped)
    assert "was made with a different text" in refusal(*resume, "--text", str(other_text))
    assert "was made with a different tokenizer" in refusal(*resume, "--tokenizer", str(other_tokenizer))
    assert "stories" in refusal("train", *OPTIONS, "--resume", "--out", str(stopped))
    assert files(stopped) == before


def test_the_digest_of_the_stories_depends_on_stories_and_tokenizer(stories, monkeypatch):
    digests = stories.digests
    assert digests.keys() == {"stories", "tokenizer"} and stories.digests == digests
    real = source.messages
    monkeypatch.setattr(source, "messages", lambda seed: real(seed + 1))
    assert stories.digests["stories"] != digests["stories"]
    assert stories.digests["tokenizer"] == digests["tokenizer"]


@pytest.mark.parametrize("name", ["<|endoftext|>", "<eos>", "<|im_end|>", "<|end_of_text|>", "<stated>"])
def test_a_document_ends_with_the_tokenizers_end_token(tmp_path, name):
    """A document ends with a token that has a known name, or that tokenizer_config.json names."""
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml((name, "<|im_start|>")))
    (tmp_path / "text").write_text("one\n\ntwo")
    stated = {"tokenizer_config.json": b'{"eos_token": {"content": "<stated>"}}'}
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    text = Text(tmp_path / "text", tokenizer, stated, context=32)
    end = tokenizer.special[name]
    assert text.eos == end and data.stops(text) == {end}
    for example in (*text.held_out(), *text.training(0, replace(RECIPE, batch=1))):
        assert example.ids[-1] == end and example.weights[-1] == 1.0 and end not in example.ids[:-1]


def test_a_tokenizer_without_an_end_token_is_reported(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(("<|im_start|>",)))
    (tmp_path / "text").write_text("one\n\ntwo")
    arguments = ("--text", str(tmp_path / "text"), "--tokenizer", str(tmp_path / "tokenizer.json"))
    code, _, log = llamaspec("train", *arguments, *SHAPE, "--context=32", "--steps=1", "--out", str(tmp_path / "out"))
    assert code == 0 and "no token that ends a text" in log, log


@pytest.mark.slow  # 4 s
def test_bfloat16_learns_too(alphabet, monkeypatch, tmp_path):
    losses: list[float] = []
    compiled: list[tuple[Ops, np.dtype]] = []

    def report(progress: StepReport):
        losses.append(progress.loss)
        if progress.step == 40:
            raise Killed

    def seen(*arrays: Any, ops: Ops, dtype: np.dtype, **static: Any) -> Any:
        compiled.append((ops, dtype))
        return summed_loss(*arrays, ops=ops, dtype=dtype, **static)

    monkeypatch.setattr(scratch, "summed_loss", seen)
    source = Text(alphabet[0], load_tokenizer(alphabet[1]), {}, context=32)
    with pytest.raises(Killed):
        train(replace(RECIPE, dtype="bfloat16", remat=True), source, tmp_path, save_every=100, report=report)
    assert losses[-1] < losses[0] / 2
    assert {(ops == WHOLE_ATTENTION, dtype) for ops, dtype in compiled} == {(False, np.dtype(ml_dtypes.bfloat16))}


def test_a_written_model_is_evaluated_on_stories(stories, monkeypatch, tmp_path):
    """Evaluation gives the same results before and after writing a model with weights that fit bfloat16 exactly."""
    monkeypatch.setattr(source, "QUESTIONS", 6)
    monkeypatch.setattr(data, "LENGTHS", (128,))  # one program
    config = replace(TINY, vocab=1024, context=128)
    named = random_checkpoint(config, seed=0, dtype=ml_dtypes.bfloat16).tensors
    tensors = {name: jnp.asarray(tensor.read(), FLOAT32) for name, tensor in named.items()}
    score = jax.jit(partial(summed_loss, config=config, ops=WHOLE_ATTENTION, dtype=FLOAT32))
    for name, content in stories.files.items():
        (tmp_path / name).write_bytes(content)
    saving.write_model(tmp_path, replace(RECIPE, config=config), stories, tensors)

    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", *stories.files
    }  # fmt: skip
    evaluated = llamaspec("train", "--evaluate", str(tmp_path / "model"))
    assert evaluated == (0, f"{evaluate(tensors, config, stories, score=score, rows=1)}\n", "")
    assert f"(floor {stories.floor:.4f}" in evaluated[1] and evaluated[1].endswith(", 0 of 6 questions\n")


def test_evaluation_counts_whole_answers(stories, monkeypatch):
    """Evaluation counts an answer only if all of its tokens are predicted.

    The simulated predictions are wrong for three tokens, two of them in answers.
    """
    monkeypatch.setattr(source, "QUESTIONS", 6)
    prompts = [tuple(example.ids) for example in questions(stories.tokenizer, 6)]
    starts = [example.weights.index(1.0) for example in questions(stories.tokenizer, 6)]
    slips = {prompts[0]: starts[0], prompts[1]: len(prompts[1]) - 1, prompts[2]: starts[2] - 1}

    def score(tensors, ids, importance):
        likeliest = ids[:, 1:].copy()
        for row, sequence in enumerate(ids):
            if at := slips.get(tuple(np.trim_zeros(sequence, "b"))):
                likeliest[row, at - 1] += 1  # position at - 1 predicts position at
        return 0.0, (3 * np.sum(importance[:, 1:]), likeliest)

    shares: list[float] = []
    how = {"score": score, "rows": 1, "progress": lambda _, share: shares.append(share)}
    result = evaluate({}, replace(TINY, context=1024), stories, **how)
    assert shares == [done / len(shares) for done in range(len(shares))] and len(shares) > len(prompts)
    assert result == (3.0, stories.floor, 4, 6)
    assert evaluate({}, replace(TINY, context=64), stories, score=score, rows=1)[2:] == (0, 6)  # no answer fits


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_attention_over_whole_sequences_is_within_the_bound_of_attention(shared, window):
    config = replace(TINY, heads=2 * shared)
    op = jax.jit(partial(attend_whole, window=window, config=config))
    unused = Positions(jnp.zeros((2, 5), jnp.int32), *jnp.zeros((2, 2, 5, 2)))

    @given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 10.0]))
    def check(seed, scale):
        rng = np.random.default_rng(seed)
        q = (scale * rng.normal(size=(2, 5, 2 * shared, 4))).astype(FLOAT32)
        k, v = rng.normal(size=(2, 2, 2, 5, 4)).astype(FLOAT32)  # [kv, batch, kv_heads, seq, head_dim]
        h = op(q, LayerCache(k, v), unused)
        for row in range(2):
            keys, values = (exactly(a[row].swapaxes(0, 1)) for a in (k, v))
            expected = bound.attend(exactly(q[row]), keys, values, causal_mask(5, 5, window=window), unit=0.0)
            assert_within(h[row], expected.value, expected.error)

    check()


def random_tensors(config: Config, *, seed: int) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in random_checkpoint(config, seed=seed).tensors.items()}


def exactly_those(config: Config, tensors: Mapping[str, np.ndarray]) -> reference.Params:
    named = {name: Tensor(a.shape, a.dtype, lambda a=a: a) for name, a in tensors.items()}
    return load_reference_params(Checkpoint("random", "memory", config, named, bos=None, stops=frozenset()))


def reference_nats(config: Config, tensors: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Compute the reference's -log p of every token id of a sequence, except for the first id."""
    params = exactly_those(config, tensors)
    logits, _ = reference.forward(params, ids[:-1], reference.empty_cache(config), config=config)
    return np.log(np.sum(np.exp(logits), axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def loss():
    """Compile `summed_loss` of TINY in float32."""
    return jax.jit(partial(summed_loss, config=TINY, ops=WHOLE_ATTENTION, dtype=FLOAT32))


def test_the_loss_is_within_the_bound_of_the_references(loss):
    tensors = random_tensors(TINY, seed=0)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, TINY.vocab, (2, 8)).astype(np.int32)
    importance = rng.choice([0.0, 1.0, 6.0], (2, 8)).astype(FLOAT32)
    weighed, (plain, likeliest) = loss(tensors, ids, importance)

    nats, off = np.empty((2, 2, 7))
    for row in range(2):
        logits = composed_bound(exactly_those(TINY, tensors), ids[row, :-1], TINY)
        worst, largest = logits.error.max(axis=1), logits.size.max(axis=1)
        nats[row] = reference_nats(TINY, tensors, ids[row])
        # log sum exp changes by at most the largest change of a logit. It rounds distances from the largest logit, exp
        # (4 times), the sum over the vocabulary, log (4), and the final sum.
        off[row] = 2 * worst + gamma(TINY.vocab + 12) * (1 + 2 * largest + np.log(TINY.vocab))
        second, first = np.sort(logits.value, axis=1)[:, -2:].T
        certain = first - second > 2 * worst
        assert np.sum(certain) > 3
        assert np.array_equal(np.asarray(likeliest)[row, certain], np.argmax(logits.value, axis=1)[certain])
    for actual, w in ((weighed, importance[:, 1:]), (plain, importance[:, 1:] > 0)):
        assert_within(actual, np.sum(w * nats), np.sum(w * off) + gamma(15) * np.sum(w * (nats + off)))


def test_padding_and_what_predicts_nothing_do_not_count(loss):
    """Padding, and ids with importance 0, do not change a bit of the loss."""
    tensors = random_tensors(TINY, seed=0)
    ids = np.random.default_rng(1).integers(0, TINY.vocab, (2, 8)).astype(np.int32)
    importance = np.zeros((2, 8), FLOAT32)
    importance[0, 1:5] = 1
    padded, first = ids.copy(), importance.copy()
    padded[0, 5:], padded[1] = 0, 0
    first[0, 0] = 9  # no position predicts the first id
    expected = loss(tensors, ids, importance)
    for actual in (loss(tensors, padded, importance), loss(tensors, ids, first)):
        assert (actual[0], actual[1][0]) == (expected[0], expected[1][0])


@pytest.mark.parametrize(
    ("tied", "ops"), [(True, WHOLE_ATTENTION), (False, remat(WHOLE_ATTENTION))], ids=["tied", "untied, remat"]
)
def test_a_step_goes_down_the_references_gradient(tied, ops):
    """The gradient, summed over batches, agrees with the reference's central differences along random directions."""
    config = replace(TINY, tied=tied, vocab=40)
    tensors = random_tensors(config, seed=2)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 40, (2, 7)).astype(np.int32)
    importance = rng.choice([0.0, 1.0, 6.0], (2, 7)).astype(FLOAT32)

    loss = of_documents(partial(summed_loss, config=config, ops=ops, dtype=FLOAT32))
    step = compile_step(loss, optax.sgd(1.0), platform="cpu")
    gradient, sums = {name: jnp.zeros(a.shape) for name, a in tensors.items()}, {"loss": jnp.zeros(())}
    for row in (slice(0, 1), slice(1, 2)):
        gradient, sums = step.add_gradient(gradient, sums, tensors, None, ids[row], importance[row])
    assert {name: a.shape for name, a in gradient.items()} == tensor_shapes(config)

    # Forward and backward, a number goes through every matrix once, in a sum over its rows or columns.
    roundings = gamma(2 * sum(sum(shape) for shape in tensor_shapes(config).values()))
    size = 2.0**-16  # step: its square, and float64's roundings over the step, are far below float32's roundings
    for name, slope in gradient.items():
        direction = rng.normal(size=slope.shape) * np.sqrt(np.mean(tensors[name] ** 2))
        further, back = (
            sum(np.sum(importance[row, 1:] * reference_nats(config, moved, ids[row])) for row in range(2))
            for moved in (tensors | {name: tensors[name] + side * size * direction} for side in (1, -1))
        )
        along = np.asarray(slope, np.float64) * direction
        assert_within(np.sum(along), (further - back) / (2 * size), roundings * np.sum(np.abs(along)))

    state = optax.sgd(1.0).init(tensors)
    changed, _, finite = step.update(jax.tree.map(jnp.asarray, tensors), state, gradient, jnp.float32(5))
    assert finite
    for name, slope in gradient.items():
        change = np.asarray(slope, np.float64) / 5
        assert_within(changed[name], tensors[name] - change, gamma(3) * (np.abs(tensors[name]) + np.abs(change)))


def test_remat_keeps_less_for_the_gradient():
    tensors = random_tensors(TINY, seed=0)
    ids, importance = jnp.ones((4, 32), jnp.int32), jnp.ones((4, 32))

    def kept(ops: Ops) -> int:
        """Count the bytes that the forward pass keeps for the gradient."""
        loss = partial(summed_loss, ids=ids, importance=importance, config=TINY, ops=ops, dtype=FLOAT32)
        pull_back = jax.eval_shape(lambda tensors: jax.vjp(lambda t: loss(t)[0], tensors)[1], tensors)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pull_back))

    assert kept(remat(WHOLE_ATTENTION)) < kept(WHOLE_ATTENTION) / 2


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9), rows=st.integers(1, 4))
def test_batches_hold_every_example_once(lengths, rows):
    examples = [Example([i + 1] * length, [1.0] * length) for i, length in enumerate(lengths)]
    lengths_by_id = {}
    for batch in batches(examples, rows=rows, context=64):
        assert batch.ids.shape[0] == rows
        for ids, importance in zip(batch.ids, batch.weights, strict=True):
            if ids[0]:
                assert np.array_equal(ids > 0, importance > 0)
                lengths_by_id[int(ids[0])] = int(np.sum(ids > 0))
    assert lengths_by_id == {i + 1: min(length, 64) for i, length in enumerate(lengths)}


def test_only_matrices_decay():
    tensors = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    transform = optimizer(lr=0.1, steps=10, warm_up=0, decay=0.5)
    nothing = jax.tree.map(jnp.zeros_like, tensors)
    changes, _ = jax.jit(lambda: transform.update(nothing, transform.init(tensors), tensors))()
    assert_within(
        changes["matrix"], np.full((2, 2), -0.1 * 0.5), 0.05 * gamma(6)
    )  # the products with two factors, and the schedule
    np.testing.assert_array_equal(changes["norm"], 0.0)


def test_documents_follow_from_seed_and_step_and_no_story_comes_twice(stories):
    def drawn(steps, recipe: Recipe = RECIPE) -> list[tuple[int, ...]]:
        """List the documents of the given steps that are long enough to be a story."""
        documents = [tuple(example.ids) for step in steps for example in stories.training(step, recipe)]
        return [document for document in documents if len(document) > 100]

    once = drawn(range(5))
    assert once == drawn(range(5)) and set(once) == set(drawn(reversed(range(5))))
    assert len(set(once)) == len(once) > 10
    assert not set(drawn(range(5), replace(RECIPE, seed=1))) & set(once)


def test_answers_are_more_important_where_asked(stories):
    plain = stories.training(1, replace(RECIPE, batch=40))
    heavy = stories.training(1, replace(RECIPE, batch=40, answers=7.0))
    answers = [[]]
    for before, after in zip(plain, heavy, strict=True):
        assert before.ids == after.ids
        weights = list(zip(before.ids, before.weights, after.weights, strict=True))
        assert all(a in (b, 7 * b) for _, b, a in weights)
        for id in (id for id, b, a in weights if a != b):
            answers.append([]) if id == EOS else answers[-1].append(id)
    texts = [decode(stories.tokenizer, answer) for answer in answers if answer]
    assert len(texts) > 10 and all("." in text and "Once" not in text for text in texts)
    assert max(map(len, texts)) < 200  # answers; a story has 400 characters at least


def test_a_question_counts_its_answer_alone(stories):
    for example in questions(stories.tokenizer, 10):
        start = example.weights.index(1.0)
        assert example.weights == [0.0] * start + [1.0] * (len(example.ids) - start)
        assert example.ids[start - 1] == stories.tokenizer.special["<|assistant|>"]
        assert example.ids[-1] == EOS and EOS not in example.ids[start:-1]


def test_each_epoch_has_the_whole_text_in_another_order(alphabet, tmp_path):
    (tmp_path / "text").write_text("\n\n".join(f"Number {i}.\n" for i in range(25)) + "\n\n\n")
    tokenizer = load_tokenizer(alphabet[1])
    text = Text(tmp_path / "text", tokenizer, {}, context=32)
    assert [decode(tokenizer, example.ids[1:-1]) for example in text.held_out()] == ["Number 0.", "Number 20."]
    assert text.floor is None

    rounds = [text.training(step, replace(RECIPE, batch=23)) for step in (0, 1)] + [
        text.training(0, replace(RECIPE, batch=23, seed=1))
    ]
    ids = [[tuple(example.ids) for example in ids_of_round] for ids_of_round in rounds]
    assert all(set(ids_of_round) == set(ids[0]) and len(set(ids_of_round)) == 23 for ids_of_round in ids)
    assert ids[0] != ids[1] and ids[0] != ids[2]


@pytest.mark.parametrize(("bos", "lengths"), [(1, [32, 32, 32, 32, 6]), (None, [32, 32, 32, 32])])
def test_a_long_paragraph_is_several_documents(alphabet, tmp_path, bos, lengths):
    """A long paragraph is split into several documents.

    If the tokenizer has no <s>, the last document still contains more than </s>.
    """
    (tmp_path / "text").write_text("story" * 25 + "end")
    tokenizer: Any = load_tokenizer(alphabet[1])
    text = Text(tmp_path / "text", replace(tokenizer, bos=bos), {}, context=32)
    parts = {tuple(e.ids): e.weights for e in [*text.held_out(), *text.training(0, replace(RECIPE, batch=8))]}
    assert sorted(map(len, parts), reverse=True) == lengths
    assert all(sum(weights) == len(ids) - (bos is not None) for ids, weights in parts.items())


@pytest.mark.parametrize("changes", [{"attention_scale": 0.3}, {"attention_cap": 2.0}])
def test_attention_over_whole_sequences_knows_the_scale_and_the_cap(changes):
    config = Config(8, 1, 4, 2, 4, 8, vocab=5, context=8, eps=1e-5, theta=1e4, **changes)
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 5, 4, 4)), jnp.float32)
    cache = LayerCache(*(jnp.asarray(rng.normal(size=(2, 2, 5, 4)), jnp.float32) for _ in range(2)))
    at = jnp.broadcast_to(jnp.arange(5), (2, 5))
    positions = Positions(at, jnp.zeros((2, 5, 2)), jnp.zeros((2, 5, 2)))
    expected = XLA.attend(q, cache, positions, window=3, config=config)
    actual = attend_whole(q, cache, positions, window=3, config=config)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_model_gets_the_named_templates_beside_its_tokenizer(tmp_path):
    named = tmp_path / "additional_chat_templates"
    named.mkdir()
    for path, text in ((named / "tool_use.jinja", "{{ tools }}"), (tmp_path / "tokenizer.model.v3", "pieces")):
        path.write_text(text)
    assert files_beside(tmp_path) == {
        "tokenizer.model.v3": b"pieces",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    }
    assert files_beside(tmp_path / "tokenizer.model.v3") == {"tokenizer.model.v3": b"pieces"}
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"link.*secret"):
        files_beside(tmp_path / "folder")
