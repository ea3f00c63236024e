"""Rewards: the model writes several answers to a question, and the better ones become likelier (GRPO).

`reference.losses.group_relative` defines the loss. It needs no value model. Each answer is used for only one update, so
the probability ratio of PPO is 1. The reward is 1 for exactly the known answer, and 0 for any other.

Two programs compute the log probability of a token. `forward.decode` draws it: one token after the other, with a KV
cache, as serving does. The loss computes all tokens of an answer at once. Both use the same weights, ops and dtype, so
each is within the error bound of its roundings, and they differ by the sum of two bounds at most. The loss reports the
difference as "drift": the mean over answers of sum_t |log p_t as drawn - log p_t as learned|.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.cache import empty_cache
from llamaspec.model.forward import DecodeState, decode, prefill
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import SamplingOptions
from llamaspec.model.sampling import as_arrays
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.tokenizers.tokenizer import decode as text_of
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.training.conversations import Question
from llamaspec.training.data import Example, padded_rows
from llamaspec.training.loop import Work
from llamaspec.training.objectives.objective import HeldOut
from llamaspec.training.objectives.preference import token_log_probabilities
from llamaspec.training.steps import Sums, Tensors, reproducible
from llamaspec.training.trainable import Trainable


class Answer(NamedTuple):
    """A sampled answer and its reward. In `example`, only the ids of the answer count in the loss."""

    example: Example
    reward: float
    scores: list[float]  # log probability of each id of the answer, as computed when it was drawn


class Sampler:
    """Draws answers from the model that is being trained, as `generate` does with plain JAX ops."""

    def __init__(
        self,
        trainable: Trainable,
        tokenizer: Tokenizer,
        *,
        config: Config,
        dtype: np.dtype,
        rows: int,
        length: int,
        stops: frozenset[int],
        temperature: float,
        platform: str,
    ):
        """Prepare to draw `rows` answers at once. A prompt and its answer have `length` tokens at most."""
        self._frozen, self._tokenizer, self._stops = trainable.frozen, tokenizer, stops
        self._rows, self._length = rows, length
        sampling = as_arrays(SamplingOptions(temperature=temperature, top_p=1.0))

        def draw(tensors, frozen, tokens, lengths, last, keys, ends, steps, *, greedy: bool):
            params = trainable.params(tensors, frozen)
            cache = empty_cache(config, batch=rows, capacity=2 * length, dtype=dtype)
            cache = prefill(params, tokens, cache, lengths - 1, config=config, ops=XLA)
            seen, done, scores = jnp.zeros((rows, config.vocab), bool), jnp.zeros(rows, bool), jnp.zeros((length, rows))
            how = {"greedy": greedy, "burst": length, "config": config, "ops": XLA}
            state = DecodeState(last, seen, done, scores)
            drawn, _, state, _ = decode(params, state, cache, keys, sampling, ends, steps, **how)
            return drawn, state.scores

        self._draw = reproducible(draw, platform, static_argnames="greedy")

    def answers(
        self, tensors: Tensors, questions: Sequence[Question], seeds: Sequence[tuple[int, int]], *, greedy: bool = False
    ) -> list[Answer]:
        """Draw one answer per question. The answer depends only on the weights, the question and its seed."""
        drawn: list[Answer] = []
        for start in range(0, len(questions), self._rows):
            members = questions[start : start + self._rows]
            tokens = np.zeros((self._rows, self._length), np.int32)
            lengths, last = np.ones(self._rows, np.int32), np.zeros(self._rows, np.int32)
            keys = np.zeros((self._rows, 2), np.uint32)
            for row, (question, seed) in enumerate(zip(members, seeds[start : start + self._rows], strict=True)):
                tokens[row, : len(question.ids)], lengths[row] = question.ids, len(question.ids)
                last[row], keys[row] = question.ids[-1], seed
            steps = np.int32(self._length - int(lengths[: len(members)].min()))
            ends = np.array(sorted(self._stops), np.int32)
            sampled = self._draw(tensors, self._frozen, tokens, lengths, last, keys, ends, steps, greedy=greedy)
            columns, scores = (np.asarray(array).T.tolist() for array in sampled)
            drawn += [self._answer(q, columns[row], scores[row], int(steps)) for row, q in enumerate(members)]
        return drawn

    def _answer(self, question: Question, ids: list[int], scores: list[float], steps: int) -> Answer:
        """Cut the drawn ids after the first id that ends an answer, or where the row is full. Then set the reward.

        The reward is 1 if the answer has ended and its text equals the question's known answer, otherwise 0.
        """
        room = min(steps, self._length - len(question.ids))
        end = next((i + 1 for i, id in enumerate(ids[:room]) if id in self._stops), room)
        own = ids[:end]
        complete = bool(own) and own[-1] in self._stops
        text = text_of(self._tokenizer, own[:-1] if complete else own, start=False)
        example = Example([*question.ids, *own], [0.0] * len(question.ids) + [1.0] * len(own))
        return Answer(example, float(complete and text.strip() == question.answer), scores[: len(own)])


def rewarded(
    params: Callable[[Tensors, Any], Params], *, config: Config, ops: Ops, dtype: np.dtype, temperature: float = 1.0
) -> Callable[..., tuple[Array, Sums]]:
    """Make the loss of answers that were drawn at `temperature`, which also reports reward and drift.

    A row of a batch is an answer. Its log probability is at the same temperature, as GRPO defines it for the policy
    that drew the answer.
    """

    def loss(
        tensors: Tensors,
        frozen: Any,
        ids: Int[Array, "batch seq"],
        counted: Float[Array, "batch seq"],
        drawn: Float[Array, "batch seq"],
        advantages: Float[Array, " batch"],
        rewards: Float[Array, " batch"],
    ) -> tuple[Array, Sums]:
        static = {"config": config, "ops": ops, "dtype": dtype, "temperature": temperature}
        scores = token_log_probabilities(params(tensors, frozen), ids, **static)
        counts = counted[:, 1:]
        total = -jnp.sum(advantages * jnp.sum(scores * counts, axis=1))
        drift = jnp.sum(jnp.abs(scores - drawn[:, 1:]) * counts)
        return total, {"loss": total, "reward": jnp.sum(rewards), "drift": drift}

    return loss


def group_work(answers: Sequence[Answer], *, group: int, rows: int, length: int) -> Work:
    """Make batches of answers. Each `group` consecutive answers are a group: they answer the same question.

    The advantage of an answer is its reward minus the mean reward of its group.
    """
    rewards = np.array([answer.reward for answer in answers], np.float64).reshape(-1, group)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
    batches = []
    for start in range(0, len(answers), rows):
        members = answers[start : start + rows]
        ids, counted = padded_rows([answer.example for answer in members], rows=rows, length=length)
        own, drawn = np.zeros((2, rows), np.float32), np.zeros((rows, length), np.float32)
        own[:, : len(members)] = advantages[start : start + rows], [answer.reward for answer in members]
        for row, answer in zip(drawn, members, strict=False):
            end = len(answer.example.ids)
            row[end - len(answer.scores) : end] = answer.scores
        batches.append((ids, counted, drawn, own[0], own[1]))
    return Work(batches, len(answers), sum(len(answer.example.ids) for answer in answers))


def drawn_work(
    sampler: Sampler, *, group: int, rows: int, length: int, seed: int
) -> Callable[[int, Sequence[Question], Tensors], Work]:
    """Make a function that draws `group` answers to each question of a step, and makes their batches."""

    def work(step: int, questions: Sequence[Question], tensors: Tensors) -> Work:
        repeated = [question for question in questions for _ in range(group)]
        rng = np.random.default_rng([seed, step])
        seeds = [(int(a), int(b)) for a, b in rng.integers(0, 2**32, (len(repeated), 2))]
        return group_work(sampler.answers(tensors, repeated, seeds), group=group, rows=rows, length=length)

    return work


def exact_share(sampler: Sampler, questions: Sequence[Question]) -> Callable[[Tensors], HeldOut]:
    """Make a function that answers held-out questions greedily and returns the share of exact answers."""

    def evaluate(tensors: Tensors) -> HeldOut:
        answers = sampler.answers(tensors, questions, [(0, 0)] * len(questions), greedy=True)
        share = float(np.mean([answer.reward for answer in answers]))
        return HeldOut(1 - share, {"exact": share})

    return evaluate
