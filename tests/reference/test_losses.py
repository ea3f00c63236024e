"""`reference.losses` agrees with JAX's automatic differentiation and with values by hand, and obeys its laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.losses import (
    answer_log_probability,
    cross_entropy,
    cross_entropy_backward,
    distillation,
    distillation_backward,
    dpo,
    group_relative,
    log_softmax,
    reverse_kl,
    reverse_kl_backward,
)
from tests.support.goldens import read_golden
from tests.support.strategies import seeds

CLOSE = 1e-12  # relative to the largest entry: a few hundred roundings of float64


def drawn(seed: int, rows: int, vocab: int, scale: float = 3.0):
    rng = np.random.default_rng(seed)
    logits, teacher = scale * rng.normal(size=(rows, vocab)), scale * rng.normal(size=(rows, vocab))
    return logits, teacher, rng.integers(0, vocab, rows), rng.uniform(0, 2, rows)


def assert_value_and_gradient(function, logits, value, slope):
    with jax.enable_x64(True):
        expected, exact = jax.value_and_grad(function)(jnp.asarray(logits))
    assert abs(value - float(expected)) <= CLOSE * max(1, abs(float(expected)))
    assert slope.dtype == np.float64
    assert np.abs(slope - np.asarray(exact)).max() <= CLOSE * max(1, np.abs(slope).max())


shapes = {"rows": st.sampled_from([1, 3]), "vocab": st.sampled_from([1, 2, 7])}


@given(seed=seeds, **shapes)
def test_cross_entropy(seed, rows, vocab):
    logits, _, targets, weights = drawn(seed, rows, vocab)

    def nats(logits):
        return -jnp.sum(weights * jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0])

    value, slope = (f(logits, targets, weights) for f in (cross_entropy, cross_entropy_backward))
    assert_value_and_gradient(nats, logits, value, slope)


@given(seed=seeds, temperature=st.sampled_from([0.5, 1.0, 4.0]), **shapes)
def test_distillation(seed, temperature, rows, vocab):
    logits, teacher, _, weights = drawn(seed, rows, vocab)

    def divergence(logits):
        t, s = jax.nn.log_softmax(teacher / temperature), jax.nn.log_softmax(logits / temperature)
        return temperature**2 * jnp.sum(weights * jnp.sum(jnp.exp(t) * (t - s), axis=-1))

    value, slope = (f(logits, teacher, weights, temperature=temperature) for f in (distillation, distillation_backward))
    assert_value_and_gradient(divergence, logits, value, slope)
    assert value >= -CLOSE  # Gibbs' inequality


@given(seed=seeds, **shapes)
def test_reverse_kl(seed, rows, vocab):
    logits, teacher, _, weights = drawn(seed, rows, vocab)

    def divergence(logits):
        p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
        return jnp.sum(weights * jnp.sum(jnp.exp(p) * (p - q), axis=-1))

    value, slope = (f(logits, teacher, weights) for f in (reverse_kl, reverse_kl_backward))
    assert_value_and_gradient(divergence, logits, value, slope)
    assert value >= -CLOSE


def test_two_divergences_differ():
    student, teacher, weights = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]]), np.ones(1)
    forward = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    backward = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert abs(distillation(student, teacher, weights, temperature=1.0) - forward) <= CLOSE
    assert abs(reverse_kl(student, teacher, weights) - backward) <= CLOSE


@given(seed=seeds, beta=st.sampled_from([0.01, 0.1, 1.0]), scale=st.sampled_from([1.0, 100.0, 1e4]))
def test_dpo(seed, beta, scale):
    answers = (-scale * np.random.default_rng(seed).uniform(0, 1, 4)).tolist()

    def loss(chosen_and_rejected):
        return jax.nn.softplus(-beta * ((chosen_and_rejected[0] - answers[2]) - (chosen_and_rejected[1] - answers[3])))

    (value,), *slopes = dpo(*np.array(answers)[:, None], beta=beta)
    assert_value_and_gradient(loss, np.array(answers[:2]), value, np.concatenate(slopes))


TRL = read_golden("trl")


@pytest.mark.parametrize("batch", TRL["dpo"])
def test_dpo_is_the_loss_of_trl(batch):
    """Loss, gradient, margin and accuracy equal TRL's (goldens/make_trl.py).

    The margin is beta times the chosen answer's log-probability ratio minus the rejected answer's ratio.
    """
    counted, beta = np.array(batch["counted"]), batch["beta"]
    chosen, rejected = np.split((np.array(batch["logps"]) * counted).sum(axis=1), 2)
    frozen_chosen, frozen_rejected = np.array(batch["frozen"])
    losses, *slopes = dpo(chosen, rejected, frozen_chosen, frozen_rejected, beta=beta)
    margins = beta * ((chosen - frozen_chosen) - (rejected - frozen_rejected))
    assert np.mean(losses) == pytest.approx(batch["loss"], rel=1e-6)
    slope_of_answer = np.concatenate(slopes) / len(chosen)
    np.testing.assert_allclose(slope_of_answer[:, None] * counted, batch["slopes"], rtol=1e-6, atol=2e-9)
    assert np.mean(margins) == pytest.approx(batch["margins"], rel=1e-6)
    assert np.mean(margins > 0) == pytest.approx(batch["accuracies"])


@pytest.mark.parametrize("batch", TRL["grpo"])
def test_group_relative_has_the_gradient_of_trl(batch):
    """The gradient for each token equals that of TRL's loss dr_grpo without a KL term (goldens/make_trl.py)."""
    counted, rewards = np.array(batch["counted"]), np.array(batch["rewards"])
    scores = (np.array(batch["logps"]) * counted).sum(axis=1)
    groups = [slice(start, start + batch["group"]) for start in range(0, len(rewards), batch["group"])]
    slopes = np.concatenate([group_relative(scores[group], rewards[group])[1] for group in groups])
    np.testing.assert_allclose(slopes[:, None] * counted, batch["slopes"], rtol=1e-6, atol=2e-9)


def test_dpo_falls_as_the_preferred_answer_gains():
    losses = dpo(np.array([-6.0, -4.0, -2.0]), *np.full((3, 3), [[-5.0], [-4.0], [-5.0]]), beta=0.5)[0].tolist()
    assert losses[0] > losses[1] > losses[2]
    assert abs(losses[1] - np.log(2)) <= CLOSE


@given(seed=seeds, padding=st.integers(0, 5))
def test_padding_does_not_change_an_answer(seed, padding):
    logits, _, targets, _ = drawn(seed, 3, 5)
    expected = sum(log_softmax(row)[id] for row, id in zip(logits, targets, strict=True))
    longer = np.concatenate([logits, np.full((padding, 5), 7.0)])
    ids, counted = np.append(targets, np.zeros(padding, np.int64)), np.append(np.ones(3), np.zeros(padding))
    assert abs(answer_log_probability(longer, ids, counted) - expected) <= CLOSE * abs(expected)


@given(seed=seeds, rows=st.integers(2, 5), cut=st.integers(1, 4))
def test_a_batch_is_the_sum_of_its_parts(seed, rows, cut):
    logits, _, targets, weights = drawn(seed, rows, 6)
    full = cross_entropy(logits, targets, weights)
    parts = sum(cross_entropy(logits[s], targets[s], weights[s]) for s in (slice(cut), slice(cut, None)))
    assert abs(full - parts) <= CLOSE * max(1, full)


def test_large_logits_neither_overflow_nor_lose_what_they_say():
    logits, targets = np.array([[0.0, 1e4]]), np.array([0])
    assert cross_entropy(logits, targets, np.ones(1)) == 1e4
    np.testing.assert_array_equal(cross_entropy_backward(logits, targets, np.ones(1)), [[-1.0, 1.0]])
