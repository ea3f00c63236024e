"""Rewards: the gradient is GRPO's, answers are drawn from the model, and exact answers become likelier."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from llamaspec.model.checkpoints.adapter import WEIGHTS
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.llama import load
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tensors import HEAD
from llamaspec.model.tokenizers.of_model import tokenizer_of
from llamaspec.reference.losses import group_relative, log_softmax
from llamaspec.training.conversations import Question
from llamaspec.training.data import Example
from llamaspec.training.objectives.preference import token_log_probabilities
from llamaspec.training.objectives.reward import Answer, Sampler, group_work, rewarded
from llamaspec.training.ops import PACKED
from llamaspec.training.steps import compile_step
from llamaspec.training.trainable import all_weights
from llamaspec.verify.bounds.running_error import gamma
from tests.model.test_model_against_reference import composed_bound
from tests.support.random_models import random_checkpoint
from tests.support.strategies import assert_within
from tests.training.test_training import llamaspec, refusal
from tests.training.test_tune import (  # noqa: F401
    FLOAT32,
    ROUNDINGS,
    TINY,
    assert_same_slopes,
    base,
    exact,
    model,
)


def test_the_definition_is_the_gradient_of_the_papers_surrogate():
    """The slopes of `group_relative` equal the gradient of GRPO's clipped surrogate at the old policy.

    Central differences approximate the gradient, to within 1e-6.
    """
    rng = np.random.default_rng(0)
    for _ in range(20):
        old, rewards = rng.uniform(-9, -1, 5), rng.choice([0.0, 1.0, 0.5], 5)
        loss, slopes = group_relative(old, rewards)
        advantages = rewards - rewards.mean()

        def surrogate(new: np.ndarray, old=old, advantages=advantages) -> float:
            ratio = np.exp(new - old)
            return -float(np.sum(np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)))

        for i, step in enumerate(np.eye(5) * 1e-4):
            difference = (surrogate(old + step) - surrogate(old - step)) / 2e-4
            assert abs(slopes[i] - difference) <= 1e-6
        assert loss == pytest.approx(-np.sum(advantages * old))


def test_the_gradient_of_sampled_answers_is_the_definitions(base):  # noqa: F811
    """The gradient for two groups of two answers equals the reference's.

    `group_relative` gives the slope of the loss with respect to each answer's log p. The test multiplies the slope by
    the gradient of log p, which the reference's backward pass computes.
    """
    rng = np.random.default_rng(1)
    rewards = [1.0, 0.0, 0.0, 0.5]
    answers = [
        Answer(
            Example(rng.integers(0, TINY.vocab, 6 + i).tolist(), [0.0] * 3 + [1.0] * (3 + i)), reward, [0.0] * (3 + i)
        )
        for i, reward in enumerate(rewards)
    ]
    trainable = all_weights(base, context=16, dtype=FLOAT32)
    loss = rewarded(trainable.params, config=TINY, ops=PACKED, dtype=FLOAT32)
    step = compile_step(loss, optax.sgd(1.0), platform="cpu")
    totals: Any = (
        jax.tree.map(jnp.zeros_like, trainable.tensors), {name: jnp.zeros(()) for name in ("loss", "reward", "drift")}
    )  # fmt: skip
    work = group_work(answers, group=2, rows=2, length=16)
    for batch in work.batches:
        totals = step.add_gradient(*totals, trainable.tensors, None, *batch)
    assert (work.divisor, float(totals[1]["reward"])) == (4, 1.5)

    slopes, total, size = {}, 0.0, 0.0
    scores = np.array([-exact(base, [answer.example])[0] for answer in answers])
    for first in (0, 2):
        value, ds = group_relative(scores[first : first + 2], np.array(rewards[first : first + 2]))
        total, size = total + value, size + np.sum(np.abs(scores[first : first + 2]))
        for answer, slope in zip(answers[first : first + 2], ds, strict=True):
            weights = [-slope * weight for weight in answer.example.weights]
            _, part = exact(base, [answer.example._replace(weights=weights)])
            slopes = {name: a + slopes.get(name, 0) for name, a in part.items()}
    assert abs(float(totals[1]["loss"]) - total) <= ROUNDINGS * size
    assert float(totals[1]["drift"]) == pytest.approx(-scores.sum(), rel=ROUNDINGS)  # "drawn" with log p = 0
    assert_same_slopes({name: np.asarray(slope) for name, slope in totals[0].items()}, slopes)


def test_answers_are_the_models_own(model):  # noqa: F811
    """A greedy answer equals `generate`'s. A drawn answer depends on its seed, but not on other questions."""
    checkpoint = open_checkpoint(model)
    tokenizer = tokenizer_of(checkpoint, None)
    llama = load(model, context=64)
    trainable = all_weights(checkpoint, context=48, dtype=FLOAT32)
    sampler = Sampler(
        trainable,
        tokenizer,
        config=checkpoint.config,
        dtype=FLOAT32,
        rows=2,
        length=24,
        stops=checkpoint.stops,
        temperature=1.0,
        platform="cpu",
    )
    prompts = [llama.encode(text) for text in ("one", "twenty", "three")]
    greedy = [Question(ids, "") for ids in prompts]
    for question, answer in zip(
        greedy, sampler.answers(trainable.tensors, greedy, [(0, 0)] * 3, greedy=True), strict=True
    ):
        ids, weights = answer.example
        tokens = np.argmax(llama.logits(ids[:-1])[len(question.ids) - 1 :], axis=-1)
        assert ids[: len(question.ids)] == question.ids and ids[len(question.ids) :] == tokens.tolist()
        assert weights == [0.0] * len(question.ids) + [1.0] * len(tokens)
        assert len(ids) == 24 or ids[-1] in checkpoint.stops
    seeds = [(1, 2), (3, 4), (1, 2)]
    drawn = sampler.answers(trainable.tensors, [greedy[0], greedy[1], greedy[0]], seeds)
    assert drawn[0] == drawn[2] and drawn[0] == sampler.answers(trainable.tensors, greedy[:1], seeds[:1])[0]
    assert drawn[0] != sampler.answers(trainable.tensors, greedy[:1], [(5, 6)])[0]


def test_drawing_and_learning_differ_by_rounding(base, model):  # noqa: F811
    """Both programs compute each log p within its proven bound, and "drift" is at most the sum of two such bounds."""
    temperature, length = 2.0, 12
    trainable = all_weights(base, context=2 * length, dtype=FLOAT32)
    static: dict[str, Any] = {"config": TINY, "dtype": FLOAT32}
    sampler = Sampler(
        trainable,
        tokenizer_of(open_checkpoint(model), None),
        rows=2,
        length=length,
        stops=frozenset(),
        temperature=temperature,
        platform="cpu",
        **static,
    )
    prompts = [Question([3, 1, 4], ""), Question([1], "")]
    answers = sampler.answers(trainable.tensors, prompts, [(1, 2), (3, 4)])
    learn = jax.jit(partial(token_log_probabilities, ops=PACKED, temperature=temperature, **static))
    rows = jnp.array([answer.example.ids + [0] * (length - len(answer.example.ids)) for answer in answers])
    learned = learn(trainable.params(trainable.tensors, None), rows)
    weights = load_reference_params(base)
    total_error = 0.0
    for answer, row in zip(answers, np.asarray(learned), strict=True):
        ids, count = np.array(answer.example.ids), len(answer.scores)
        logits = composed_bound(weights, ids[:-1], TINY)
        at = slice(len(ids) - 1 - count, None)
        exact_scores = np.take_along_axis(log_softmax(logits.value / temperature), ids[1:, None], axis=1)[at, 0]
        # log softmax moves by at most twice the largest change of a logit; the sum of exp and the log round, too.
        errors = 2 * logits.error.max(axis=1) / temperature + gamma(TINY.vocab + 8) * (1 + np.abs(logits.value).max())
        for scores in (np.array(answer.scores), row[: len(ids) - 1][at]):
            assert_within(scores, exact_scores, errors[at])
        total_error += np.sum(errors[at])
    loss = rewarded(trainable.params, ops=PACKED, temperature=temperature, **static)
    work = group_work(answers, group=2, rows=2, length=length)
    sums = jax.jit(loss)(trainable.tensors, None, *work.batches[0])[1]
    assert 0 < float(sums["drift"]) <= 2 * total_error
    assert min(len(answer.scores) for answer in answers) >= 9


def test_answers_are_learned_at_the_temperature_at_which_they_were_drawn():
    """At temperature 2, loss and gradient are those of a model with half the logits."""
    untied = random_checkpoint(replace(TINY, tied=False), seed=1, few=3)
    halved = {name: tensor.read() / (2 if name == HEAD else 1) for name, tensor in untied.tensors.items()}
    answers = [Answer(Example([3, 1, 4, 1, i], [0.0, 0.0, 1.0, 1.0, 1.0]), float(i), [0.0] * 3) for i in range(2)]
    [batch] = group_work(answers, group=2, rows=2, length=8).batches
    results = []
    for checkpoint, temperature in ((untied, 2.0), (with_arrays(untied, halved), 1.0)):
        trainable = all_weights(checkpoint, context=8, dtype=FLOAT32)
        loss = rewarded(trainable.params, config=checkpoint.config, ops=PACKED, dtype=FLOAT32, temperature=temperature)
        results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable.tensors, None, *batch))
    ((value, _), slopes), ((expected, _), exact_slopes) = results
    assert float(value) == pytest.approx(float(expected), rel=ROUNDINGS)
    halves = {name: np.asarray(slope) / (2 if name == HEAD else 1) for name, slope in exact_slopes.items()}
    assert_same_slopes({name: np.asarray(slope) for name, slope in slopes.items()}, halves)


def with_arrays(checkpoint: Checkpoint, arrays: dict[str, np.ndarray]) -> Checkpoint:
    return replace(checkpoint, tensors={name: Tensor(a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()})


def questions(folder: Path) -> Path:
    """Write forty questions. Their answer is always the letter a, which the random model sometimes draws."""
    path = folder / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}", "answer": "a"}) for i in range(40)))
    return path


def test_exact_answers_become_likelier(model, tmp_path):  # noqa: F811
    """Training with rewards makes the right answer certain.

    The test first tunes the model to answer with one of two letters.
    """
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"prompt": f"{i}", "completion": c}) for i in range(20) for c in "ab"))
    code, _, log = llamaspec(
        "tune", str(model), "--data", str(texts), "--steps=30", "--lr=0.02", "--out", f"{tmp_path}/a"
    )
    assert code == 0, log
    command = (
        "tune",
        f"{tmp_path}/a/model",
        "--data",
        str(questions(tmp_path)),
        "--method=reward",
        "--lora=2",
        "--json",
    )
    options = ("--steps=6", "--batch=2", "--group=4", "--answer-tokens=4", "--lr=0.05", "--save-every=2")
    code, printed, log = llamaspec(*command, *options, "--out", f"{tmp_path}/b")
    assert code == 0, log
    steps = [json.loads(line) for line in printed.splitlines()]
    drifts = [step["drift"] for step in steps]
    assert all(0 <= drift < 1e-3 for drift in drifts) and max(drifts) > 0  # 0: both programs give the same bits
    assert "between drawing and learning, the log probabilities" in log
    assert 0 < steps[0]["reward"] < 1 and steps[-1]["held_out"]["measures"]["exact"] == 1
    for path in sorted((tmp_path / "b").glob("step-0000000[6]*")):  # as if killed before its last step
        path.unlink()
    trained = (tmp_path / "b" / WEIGHTS).read_bytes()
    for name in ("adapter_config.json", WEIGHTS):
        (tmp_path / "b" / name).unlink()
    code, _, log = llamaspec(*command, *options, "--resume", "--out", f"{tmp_path}/b")
    assert code == 0 and (tmp_path / "b" / WEIGHTS).read_bytes() == trained, log


def test_a_bad_request_for_rewards_is_one_line(model, tmp_path):  # noqa: F811
    command = ("tune", str(model), "--method=reward", "--out", str(tmp_path / "out"))
    (tmp_path / "lines").write_text('{"prompt": "a", "completion": "b"}')
    assert "line 1: expected prompt and answer; got prompt, completion" in refusal(
        *command, "--data", f"{tmp_path}/lines"
    )
    data = ("--data", str(questions(tmp_path)))
    assert "the model's context is 64" in refusal(*command, *data, "--answer-tokens=80")
    assert "--group needs --method reward" in refusal("tune", str(model), *data, "--group=2", "--out=x")
