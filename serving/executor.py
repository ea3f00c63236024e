"""Runs plans on a device: turns a plan into arrays, runs two compiled programs, and reads the tokens that they drew."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float

from llamaspec.model.options import SamplingOptions
from llamaspec.model.sampling import Sampling, as_arrays, random_key
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.serving.programs import (
    DecodeArguments,
    Decoded,
    Logprobs,
    Pooled,
    ProgramSizes,
    ServingPrograms,
    State,
    empty_state,
)
from llamaspec.serving.request import MOST_LOGPROBS, MOST_STOPS, FinishReason, Request, TopLogprobs
from llamaspec.serving.scheduler import Chunk, Draws, Plan, RowPlan


class Reports(NamedTuple):
    """Log-probabilities of consecutive tokens, and of the likeliest tokens at the same positions."""

    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...]


class PlanResult(NamedTuple):
    """The results of a plan, by request number."""

    draws: dict[int, Draws]
    reports: dict[int, Reports]  # for the drawn tokens of requests that want log-probabilities
    prompt: Reports | None  # for the token after each token of the chunk
    pooled: Pooled | None = None  # hidden states of the chunk, if its request is for an embedding


@runtime_checkable
class Executor(Protocol):
    """A model on a device, with the interface that an engine needs."""

    def run(
        self, plan: Plan, requests: Mapping[int, Request], masks: Mapping[int, Bool[np.ndarray, " vocab"]]
    ) -> PlanResult:
        """Run a plan, and wait for its results.

        `masks` has an entry for each request that has a grammar and draws a token in this plan. It maps the request's
        number to the mask of tokens that the grammar allows next.
        """
        ...


class JaxExecutor:
    """An `Executor` that runs compiled JAX programs."""

    def __init__(
        self,
        params: Params,
        programs: ServingPrograms,
        config: Config,
        *,
        sizes: ProgramSizes,
        eos: frozenset[int],
        state: State | None = None,
        adapters: Mapping[str, int] = MappingProxyType({}),
    ):
        """Run `programs`, which were compiled for `sizes`, on the weights `params`.

        `eos` are the ids with which the model ends a text. `adapters` maps the name of each LoRA adapter to its rank,
        in the order in which the adapters are joined along the rank axis. `state` is an empty state that is already on
        several devices. None makes an empty state on the default device.
        """
        self._params, self._programs, self._config = params, programs, config
        self._sizes, self._eos = sizes, eos
        self._state = empty_state(config, sizes) if state is None else state
        self._adapters: dict[str, slice] = {}  # the ranks of each adapter
        end = 0
        for name, rank in adapters.items():
            self._adapters[name] = slice(end, end := end + rank)
        self._set: set[int] = set()  # rows with penalties or a mask set on the device

    def run(
        self, plan: Plan, requests: Mapping[int, Request], masks: Mapping[int, Bool[np.ndarray, " vocab"]]
    ) -> PlanResult:
        """Run a plan (see `Executor.run`).

        The prefill of the chunk runs first, because decoding rows of the same plan may read the keys and values that
        it writes.
        """
        prompt, pooled = self._read(plan.chunk, requests[plan.chunk.number]) if plan.chunk else (None, None)
        if not plan.rows:
            return PlanResult({}, {}, prompt, pooled)
        for row in plan.rows:
            self._prepare(row, requests[row.number], self._mask(row, requests[row.number], masks))
        self._state, drawn = self._programs.decode(self._params, self._state, self._rows(plan.rows, requests))
        drawn = jax.tree.map(np.asarray, drawn)
        draws = {row.number: self._draws(row, requests[row.number], drawn) for row in plan.rows}
        reports = {}
        for row in plan.rows:
            if (most := requests[row.number].logprobs) is not None:
                count = len(draws[row.number].tokens)
                reports[row.number] = _reports(
                    jax.tree.map(lambda a, n=count, r=row.row: a[:n, r], drawn.logprobs), most
                )
        return PlanResult(draws, reports, prompt, pooled)

    def _read(self, chunk: Chunk, request: Request) -> tuple[Reports | None, Pooled | None]:
        count = len(chunk.tokens)
        tokens, targets = (np.zeros(self._sizes.chunk, np.int32) for _ in range(2))
        tokens[:count] = chunk.tokens
        following = request.prompt[chunk.start + 1 : chunk.start + 1 + count]
        targets[: len(following)] = following
        table = np.zeros((1, self._sizes.blocks), np.int32)
        table[0, : len(chunk.pages)] = chunk.pages
        most = request.prompt_logprobs
        self._state, (logprobs, pooled) = self._programs.prefill(
            *(self._params, self._state, tokens[None], np.array([chunk.start], np.int32), np.array([count], np.int32)),
            *(table, targets, np.bool_(most is not None), np.bool_(request.embeds), self._ranks(request)[None]),
        )
        reports = None
        if most is not None:
            reports = _reports(jax.tree.map(lambda a: np.asarray(a)[:count], logprobs), most)
        return reports, jax.tree.map(np.asarray, pooled) if request.embeds else None

    def _ranks(self, request: Request) -> Bool[np.ndarray, " rank"]:
        """Return a mask over the ranks of all joined adapters, which is True for the ranks of the request's adapter."""
        ranks = np.zeros(self._sizes.rank, bool)
        if request.adapter:
            ranks[self._adapters[request.adapter]] = True
        return ranks

    def _mask(
        self, row: RowPlan, request: Request, masks: Mapping[int, Bool[np.ndarray, " vocab"]]
    ) -> Bool[np.ndarray, " vocab"] | None:
        """Return the mask of tokens that a row may draw in its last step, or None if it may draw any token.

        A row that is decoded again after a preemption may already know this token. Then the mask allows only this
        token.
        """
        if request.allowed is None or row.after is None:
            return masks.get(row.number)
        return np.arange(self._config.vocab) == row.after

    def _prepare(self, row: RowPlan, request: Request, mask: Bool[np.ndarray, " vocab"] | None) -> None:
        """Set penalties and mask of a row on the device, if this request or the row's previous request needs them."""
        begins = row.start == len(request.prompt) - 1
        penalized = request.repetition_penalty != 1 or request.presence_penalty or request.frequency_penalty
        special = bool(penalized or request.logit_bias or request.allowed)
        if not (begins and (special or row.row in self._set)) and mask is None:
            return
        vocab = self._config.vocab
        prompted, bias = np.zeros(vocab, bool), np.zeros(vocab, np.float32)
        if special:
            prompted[list(request.prompt)] = True
            for token, value in request.logit_bias.items():
                bias[token] = value
        if mask is not None:
            bias[~mask] = -np.inf
        self._state = self._programs.set_row(self._state, np.int32(row.row), prompted, bias, np.bool_(begins))
        (self._set.add if special else self._set.discard)(row.row)

    def _rows(self, rows: Sequence[RowPlan], requests: Mapping[int, Request]) -> DecodeArguments:
        width, burst = self._sizes.width, self._sizes.burst
        plain = as_arrays(SamplingOptions(temperature=0.0, top_p=1.0))
        options_by_row: Any = [np.full((width, 1), value) for value in plain]
        sampling: Any = Sampling(*options_by_row)
        table = np.zeros((width, self._sizes.blocks), np.int32)
        starts, steps, known = np.full(width, -1, np.int32), np.zeros(width, np.int32), np.zeros(width, np.int32)
        fed, keys = np.zeros((width, burst), np.int32), np.zeros((width, 2), np.uint32)
        presence, frequency = (np.zeros((width, 1), np.float32) for _ in range(2))
        stops = np.full((width, MOST_STOPS), -1, np.int32)
        adapters = np.zeros((width, self._sizes.rank), bool)
        for row in rows:
            request, at = requests[row.number], row.row
            table[at, : len(row.pages)] = row.pages
            starts[at], steps[at] = row.start, row.steps
            fed[at, : len(row.fed)], known[at] = row.fed, len(row.fed)
            keys[at] = random_key(request.seed)
            for array, value in zip(sampling, as_arrays(request), strict=True):
                array[at] = value
            if request.greedy:
                sampling.temperature[at] = 0
            presence[at], frequency[at] = request.presence_penalty, request.frequency_penalty
            ends = ending_ids(request, self._eos)
            stops[at, : len(ends)] = ends
            adapters[at] = self._ranks(request)
        reports = np.bool_(any(requests[row.number].logprobs is not None for row in rows))
        arrays: Any = (table, starts, steps, fed, known, keys, sampling, presence, frequency, stops, reports, adapters)
        return DecodeArguments(*arrays)

    def _draws(self, row: RowPlan, request: Request, drawn: Decoded) -> Draws:
        """Collect the tokens that a row drew, up to the first token that ends its text."""
        tokens = drawn.tokens[: row.steps, row.row].tolist()
        ends = ending_ids(request, self._eos)
        for step in range(len(row.fed) - 1, row.steps):  # earlier steps only repeat known tokens
            reason: FinishReason | None = "stop" if tokens[step] in ends else None
            if tokens[step] == self._config.vocab:
                return Draws(tokens[:step], "error")
            if reason:
                return Draws(tokens[: step + 1], reason)
        return Draws(tokens, None)


def ending_ids(request: Request, eos: frozenset[int]) -> list[int]:
    """Return the ids of tokens that end a request's text, sorted."""
    return sorted(request.stop_ids | (frozenset() if request.ignore_eos else eos))


def _reports(arrays: Logprobs, most: int) -> Reports:
    """Turn arrays into `Reports` with the `most` likeliest tokens per position."""
    assert most <= MOST_LOGPROBS
    top = [
        TopLogprobs(tuple(ids[:most].tolist()), tuple(values[:most].tolist()))
        for ids, values in zip(arrays.top_ids, arrays.top, strict=True)
    ]
    logprobs: Float[np.ndarray, " tokens"] = np.asarray(arrays.tokens)
    return Reports(tuple(logprobs.tolist()), tuple(top))
