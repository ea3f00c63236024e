"""Training: the loss falls, a killed run goes on as if nothing had been, and what cannot be is said in one line."""

import hashlib
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import model
from model import train_loop
from model.cache import LayerCache, empty_cache
from model.checkpoints.checkpoint import CheckpointError, tensor_shapes
from model.checkpoints.open import open_checkpoint
from model.forward import forward
from model.ops import XLA, Positions
from model.params import params_of, rope_table
from model.stories.vocabulary import EOS
from model.train_loop import Progress, Recipe, Stories, Text, questions, train
from model.training import WHOLE, Example, attend_whole, batches, initial_tensors, optimiser, remat, summed_loss
from reference.config import Config
from tests.processes import REPOSITORY, Done, run_llamaspec

TINY = Config(
    dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=1024, context=256, eps=1e-5, theta=1e4, tied=True
)
RECIPE = Recipe(config=TINY, steps=30, batch=4, lr=0.01, warm_up=5)
SIZES = ("--dim=16", "--layers=1", "--heads=2", "--kv-heads=1", "--head-dim=8", "--ffn=24", "--batch=2")


@pytest.fixture(scope="module")
def stories() -> Stories:
    return Stories()


@pytest.fixture(scope="module")
def finished(stories, tmp_path_factory) -> tuple[Path, list[Progress]]:
    """A whole training, and what it reported."""
    out, told = tmp_path_factory.mktemp("finished"), []
    train(RECIPE, stories, out, eval_every=15, save_every=25, report=told.append)
    return out, told


class Killed(BaseException):
    """Nobody catches it."""


def kill_at(step: int):
    def report(progress: Progress):
        if progress.step == step:
            raise Killed

    return report


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_the_loss_falls(finished):
    _, told = finished
    losses = [progress.loss for progress in told]
    assert abs(losses[0] - np.log(TINY.vocab)) < 0.2  # at first, every id is as likely as another
    assert np.mean(losses[-5:]) < losses[0] - 1.5
    evaluations = [progress.evaluation for progress in told if progress.evaluation]
    assert [progress.step for progress in told if progress.evaluation] == [15, 30]
    assert evaluations[1].loss < evaluations[0].loss
    assert evaluations[1].questions == 200


@pytest.mark.parametrize("step", [25, 28])
def test_a_killed_run_goes_on_to_the_same_weights(finished, stories, tmp_path, step):
    with pytest.raises(Killed):
        train(RECIPE, stories, tmp_path, save_every=8, report=kill_at(step))
    assert [path.name for path in train_loop.checkpoints(tmp_path)] == [
        "step-00000016.safetensors",
        "step-00000024.safetensors",
    ]
    told: list[Progress] = []
    train(RECIPE, stories, tmp_path, save_every=8, resume=True, report=told.append)
    assert told[0].step == 25
    assert digest(tmp_path) == digest(finished[0])


def test_a_run_killed_by_the_system_goes_on_to_the_same_weights(tmp_path):
    """SIGKILL at whatever step it is at."""
    command = ["train", "--steps=40", "--save-every=5", "--eval-every=1000", *SIZES]
    whole = run_llamaspec(*command, f"--out={tmp_path / 'whole'}")
    assert (whole.code, whole.out) == (0, ""), whole.err
    killed = tmp_path / "killed"
    script = "import sys, cli; sys.path.insert(0, '.'); cli.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command, f"--out={killed}"], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not train_loop.checkpoints(killed):
        signal.sigtimedwait([], 0.02)
    process.kill()
    process.wait()
    resumed = run_llamaspec(*command, f"--out={killed}", "--resume")
    assert (resumed.code, resumed.out) == (0, ""), resumed.err
    assert digest(killed) == digest(tmp_path / "whole")


def test_the_written_model_is_the_one_that_was_trained(finished):
    out, _ = finished
    llama = model.load(out / "model", context=64)
    assert llama.config == TINY
    assert llama.stops == {EOS}
    ids = llama.encode("Once upon a time, there was a fox.")
    checkpoint = open_checkpoint(out / "model")
    tensors = {name: jnp.asarray(t.read(), jnp.float32) for name, t in checkpoint.tensors.items()}
    params = params_of(TINY, tensors, rope_table(TINY, len(ids)))
    cache = empty_cache(TINY, batch=1, capacity=len(ids), dtype=np.dtype(np.float32))
    expected = forward(params, jnp.asarray([ids]), cache, config=TINY, ops=WHOLE)[0][0]
    np.testing.assert_allclose(llama.logits(ids), expected, rtol=0, atol=2e-5 * float(jnp.max(jnp.abs(expected))))
    files = sorted(path.name for path in (out / "model").iterdir())
    assert files == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.model",
    ]  # fmt: skip


def test_the_written_weights_are_the_trained_ones_rounded_once(finished, stories):
    out, _ = finished
    tensors = initial_tensors(TINY, seed=0)
    state = optimiser(lr=RECIPE.lr, steps=RECIPE.steps, warm_up=RECIPE.warm_up, decay=RECIPE.decay).init(tensors)
    trained, _, step, _ = train_loop.load_state(train_loop.checkpoints(out)[-1], RECIPE, tensors, state)
    assert step == RECIPE.steps
    for name, tensor in open_checkpoint(out / "model").tensors.items():
        assert np.array_equal(tensor.read(), np.asarray(trained[name].astype(jnp.bfloat16))), name


def test_evaluate_prints_loss_floor_and_questions(finished):
    done = run_llamaspec("train", "--evaluate", str(finished[0] / "model"))
    assert done.code == 0, done.err
    last = [p.evaluation for p in finished[1] if p.evaluation][-1]
    said = done.out.split()
    assert said[:2] == ["held-out", "loss"]
    assert abs(float(said[2]) - last.loss) < 0.01  # weights are bfloat16 by now
    assert f"floor {last.floor:.4f}" in done.out
    assert done.out.endswith(" of 200 questions\n")


@given(seq=st.integers(1, 9), shared=st.integers(1, 3), window=st.sampled_from([None, 1, 3]), seed=st.integers(0, 99))
def test_attention_over_whole_sequences_is_attention(seq, shared, window, seed):
    config = replace(TINY, heads=2 * shared, head_dim=4)
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(2, seq, 2 * shared, 4)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, seq, 4)), jnp.float32) for _ in "kv")
    at = jnp.broadcast_to(jnp.arange(seq), (2, seq))
    positions = Positions(at, jnp.zeros((2, seq, 2)), jnp.zeros((2, seq, 2)))
    ours = attend_whole(q, LayerCache(k, v), positions, window=window, config=config)
    theirs = XLA.attend(q, LayerCache(k, v), positions, window=window, config=config)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_learns_and_remat_changes_no_gradient(tied):
    config = replace(TINY, tied=tied, vocab=40)
    tensors = initial_tensors(config, seed=1)
    assert {name: a.shape for name, a in tensors.items()} == tensor_shapes(config)
    ids = jnp.asarray(np.random.default_rng(2).integers(0, 40, (2, 7)))

    def slopes(ops):
        def loss(tensors):
            return summed_loss(tensors, ids, jnp.ones(ids.shape), config=config, ops=ops, dtype=np.dtype(np.float32))[0]

        return jax.grad(loss)(tensors)

    plain, again, cached = slopes(WHOLE), slopes(remat(WHOLE)), slopes(XLA)
    for name, slope in plain.items():
        size = float(jnp.max(jnp.abs(slope)))
        assert size > 0, name
        np.testing.assert_allclose(again[name], slope, rtol=0, atol=1e-5 * size, err_msg=name)
        np.testing.assert_allclose(cached[name], slope, rtol=0, atol=1e-5 * size, err_msg=name)


def test_only_what_has_an_importance_counts_and_padding_does_not():
    tensors = initial_tensors(TINY, seed=3)

    def nats(importance: list[float], length: int) -> tuple[float, float]:
        ids = np.zeros((1, length), np.int32)
        ids[0, :4] = [1, 50, 60, 70]
        weights = np.zeros((1, length), np.float32)
        weights[0, :4] = importance
        weighed, (plain, _) = summed_loss(
            tensors, jnp.asarray(ids), jnp.asarray(weights), config=TINY, ops=WHOLE, dtype=np.dtype(np.float32)
        )
        return float(weighed), float(plain)

    first, second = nats([0, 1, 0, 0], 4), nats([0, 0, 1, 0], 4)
    assert nats([9, 1, 1, 0], 4) == pytest.approx(np.add(first, second), rel=1e-5)  # nothing predicts the first id
    assert nats([0, 3, 0, 0], 4) == pytest.approx((3 * first[0], first[1]), rel=1e-5)
    assert nats([0, 1, 1, 0], 32) == pytest.approx(nats([0, 1, 1, 0], 4), rel=1e-5)


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9), rows=st.integers(1, 4))
def test_batches_hold_every_example_once(lengths, rows):
    examples = [Example([i + 1] * length, [1.0] * length) for i, length in enumerate(lengths)]
    found = {}
    for batch in batches(examples, rows=rows, context=64):
        assert batch.ids.shape[0] == rows
        for ids, weights in zip(batch.ids, batch.weights, strict=True):
            if ids[0]:
                assert np.array_equal(ids > 0, weights > 0)
                found[int(ids[0])] = int(np.sum(ids > 0))
    assert found == {i + 1: min(length, 64) for i, length in enumerate(lengths)}


def test_only_matrices_decay():
    tensors = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    transform = optimiser(lr=0.1, steps=10, warm_up=0, decay=0.5)
    changes, _ = transform.update(jax.tree.map(jnp.zeros_like, tensors), transform.init(tensors), tensors)
    after: Any = optax.apply_updates(tensors, changes)
    np.testing.assert_allclose(after["matrix"], 0.95)
    np.testing.assert_array_equal(after["norm"], 1.0)


def test_documents_follow_from_seed_and_step_and_none_comes_twice(stories):
    one = [tuple(example.ids) for step in range(5) for example in stories.training(step, RECIPE)]
    anew = Stories()
    again = [tuple(example.ids) for step in range(5) for example in anew.training(step, RECIPE)]
    other = [tuple(example.ids) for example in stories.training(0, replace(RECIPE, seed=1))]
    assert one == again
    assert len(set(one)) == len(one)
    assert not set(other) & set(one)


def test_answers_are_more_important_where_asked(stories):
    plain = stories.training(1, replace(RECIPE, batch=40))
    heavy = stories.training(1, replace(RECIPE, batch=40, answers=7.0))
    answers = []
    for before, after in zip(plain, heavy, strict=True):
        assert before.ids == after.ids
        assert {b * 7 == a or b == a for b, a in zip(before.weights, after.weights, strict=True)} == {True}
        answers += [
            id for id, b, a in zip(before.ids, before.weights, after.weights, strict=True) if a != b and id != EOS
        ]
    assert answers
    texts = "".join(stories.tokenizer.bytes_of(id).decode() for id in answers)
    assert "Once" not in texts and texts.count(".") > 10
    assert max(len(text) for text in texts.split(".")) < 60  # answers, not stories


def test_a_question_counts_its_answer_alone(stories):
    for example in questions(stories.tokenizer, 20):
        start = example.weights.index(1.0)
        assert example.weights == [0.0] * start + [1.0] * (len(example.ids) - start)
        assert example.ids[start - 1] == stories.tokenizer.special["<|assistant|>"]
        assert example.ids[-1] == EOS and EOS not in example.ids[start:-1]


def test_any_text_will_do(stories, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i}, of which there are some.\n" for i in range(25)) + "\n\n\n")
    text = Text(file, stories.tokenizer, stories.files, context=64)
    assert len(text.held_out()) == 2
    once = [tuple(e.ids) for step in range(6) for e in text.training(step, replace(RECIPE, batch=4))][:23]
    assert len(set(once)) == 23  # every paragraph in the first round
    told: list[Progress] = []
    train(replace(RECIPE, steps=3), text, tmp_path / "out", report=told.append)
    assert told[-1].evaluation and told[-1].evaluation.floor is None
    assert model.load(tmp_path / "out" / "model", context=16).config == TINY


def test_a_long_paragraph_is_several_documents(stories, tmp_path):
    (tmp_path / "text").write_text("a fox and a kite " * 100)
    text = Text(tmp_path / "text", stories.tokenizer, stories.files, context=32)
    parts = [*text.held_out(), *text.training(0, replace(RECIPE, batch=1))]
    assert all(example.ids[0] == 1 and len(example.ids) <= 32 for example in parts)


def said(done: Done) -> str:
    """The one line of an error."""
    assert done.out == "" and done.code, done
    line = done.err.strip()
    assert line.startswith("error: ") and "\n" not in line and "fault of llamaspec" not in line, line
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out=OUT", "--text=NONE"], "No such file"),
        (["--out=OUT", "--text=EMPTY"], "less than two paragraphs"),
        (["--out=OUT", "--text=BINARY"], "not text in UTF-8"),
        (["--out=OUT", "--heads=3", "--kv-heads=2"], "3 heads do not share 2 kv heads"),
        (["--out=OUT", "--head-dim=15"], "RoPE turns pairs"),
        (["--out=OUT", "--dim=0"], "dim is 0"),
        (["--out=OUT", "--context=0"], "context is 0"),
        (["--out=OUT", "--steps=0"], "steps must be at least 1"),
        (["--out=OUT", "--save-every=0"], "save_every must be at least 1"),
        (["--out=OUT", "--batch=0"], "batch must be at least 1"),
        (["--out=OUT", "--lr=nan"], "lr must be positive"),
        (["--out=OUT", "--seed=-1"], "seed must not be negative"),
        (["--out=OUT", "--answers=-1"], "answers must be positive"),
        (["--out=OUT", "--resume"], "holds no checkpoint"),
        (["--out=EMPTY"], "Not a directory"),
        (["--out=OUT", "--tokenizer=NONE"], "--tokenizer goes with --text"),
        (["--evaluate=NONE"], "No such file"),
        ([], "give either"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, arguments, words):
    (tmp_path / "EMPTY").write_text("\n \n\n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    places = ("OUT", "NONE", "EMPTY", "BINARY")
    for place in places:
        arguments = [argument.replace(f"={place}", f"={tmp_path / place}") for argument in arguments]
    assert words in said(run_llamaspec("train", *arguments))
    assert not (tmp_path / "OUT").exists()


def test_a_started_training_is_not_overwritten(finished, stories, tmp_path):
    with pytest.raises(CheckpointError, match="--resume goes on with it"):
        train(RECIPE, stories, finished[0])
    with pytest.raises(CheckpointError, match="this training is done"):
        train(RECIPE, stories, finished[0], resume=True)
    with pytest.raises(Killed):
        train(RECIPE, stories, tmp_path, save_every=2, report=kill_at(3))
    with pytest.raises(CheckpointError, match="was made with another lr, seed"):
        train(replace(RECIPE, lr=0.5, seed=2), stories, tmp_path, resume=True)
    assert len(train_loop.checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("damage", [b"", b"rubbish" * 9, None])
def test_an_unreadable_checkpoint_is_named_and_nothing_is_lost(stories, tmp_path, damage):
    with pytest.raises(Killed):
        train(RECIPE, stories, tmp_path, save_every=2, report=kill_at(5))
    earlier, last = train_loop.checkpoints(tmp_path)
    last.write_bytes(last.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(CheckpointError, match=f"{last.name}: is no checkpoint of a training, or a damaged one") as told:
        train(RECIPE, stories, tmp_path, resume=True)
    assert "\n" not in str(told.value)
    assert train_loop.checkpoints(tmp_path) == [earlier, last]
    last.unlink()
    progress: list[Progress] = []
    with pytest.raises(Killed):
        train(RECIPE, stories, tmp_path, resume=True, report=lambda told: (progress.append(told), kill_at(3)(told)))
    assert progress[0].step == 3


def test_a_full_disk_leaves_the_earlier_checkpoint(stories, tmp_path):
    """Simulated by a limit on the size of a file, lowered after the first checkpoint."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def report(progress: Progress):
        if progress.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

    try:
        with pytest.raises(CheckpointError, match=r"(?i)too large|no space|I/O error") as told:
            train(RECIPE, stories, tmp_path, save_every=2, report=report)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "\n" not in str(told.value)
    assert [path.name for path in tmp_path.iterdir() if "step" in path.name] == ["step-00000002.safetensors"]
    with pytest.raises(Killed):
        train(RECIPE, stories, tmp_path, resume=True, report=kill_at(3))


def test_a_loss_that_is_no_number_ends_the_run(stories, tmp_path):
    with pytest.raises(FloatingPointError, match="try a smaller --lr"):
        train(replace(RECIPE, lr=1e30, warm_up=0), stories, tmp_path, save_every=100)


def test_bfloat16_learns_too(stories, tmp_path):
    told: list[Progress] = []
    recipe = replace(RECIPE, steps=12, dtype="bfloat16", remat=True)
    train(recipe, stories, tmp_path, report=told.append)
    assert told[-1].loss < told[0].loss - 0.2
