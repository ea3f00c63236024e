"""Small models behind a scheduler, without a thread, for tests of the engine's laws."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np

from llamaspec.model.checkpoints.adapter import Adapter, adapted, joined
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.weights.loading import abstract_params, load_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.serving.executor import JaxExecutor, Reports
from llamaspec.serving.programs import ProgramSizes, ServingPrograms, compile_serving
from llamaspec.serving.request import FinishReason, Request
from llamaspec.serving.scheduler import Limits, Scheduler
from tests.support.random_models import CONFIGS, random_adapter, random_checkpoint

FLOAT32 = np.dtype(np.float32)
EOS, POISON = 3, 4  # POISON is a token with NaN as its embedding
WIDTH, CHUNK, BURST, PAGE, CONTEXT = 4, 5, 3, 4, 24
LIMITS = Limits(pages=12, page=PAGE, rows=WIDTH, chunk=CHUNK, burst=BURST, context=CONTEXT, patience=4, waiting=8)
# On a CPU, attention takes another path if each head has its own keys than if heads share keys.
OWN_KEYS = "1 to 1, wide, window"
ADAPTERS = ("one", "two")  # the adapters of the model OWN_KEYS
MODELS = CONFIGS | {OWN_KEYS: replace(CONFIGS["2 to 1, wide, tied"], kv_heads=4, windows=(5, None))}


@dataclass(frozen=True)
class Served:
    """A small model and its compiled programs."""

    config: Config
    params: Params
    programs: ServingPrograms
    sizes: ProgramSizes
    adapters: Mapping[str, Adapter]

    def executor(self) -> JaxExecutor:
        """Create an executor with empty pages."""
        ranks = {name: adapter.rank for name, adapter in self.adapters.items()}
        return JaxExecutor(
            self.params, self.programs, self.config, sizes=self.sizes, eos=frozenset([EOS]), adapters=ranks
        )


@cache
def served(name: str, dtype: np.dtype = FLOAT32, width: int = WIDTH, cache: np.dtype | None = None) -> Served:
    """Load a model of `MODELS` and compile its programs; the token POISON has an embedding of NaN.

    The cache has the dtype `cache`, or the weights' dtype if `cache` is None.

    The model OWN_KEYS has two adapters, with different ranks and for different matrices.
    """
    config = replace(MODELS[name], tied=False)
    checkpoint = random_checkpoint(config, seed=0)
    adapters: dict[str, Adapter] = {}
    if name == OWN_KEYS:
        drawn = random_adapter(config, rank=2), random_adapter(config, seed=1, rank=3, parts=("k", "v", "gate", "o"))
        adapters |= zip(ADAPTERS, drawn, strict=True)
        checkpoint = adapted(checkpoint, joined(drawn), merges=False)
    params = load_params(checkpoint, dtype=dtype, positions=CONTEXT + CHUNK)
    params = params._replace(embedding=params.embedding.at[POISON].set(np.nan))  # type: ignore
    sizes = ProgramSizes(
        width,
        CHUNK,
        BURST,
        LIMITS.pages,
        PAGE,
        LIMITS.blocks,
        cache or dtype,
        sum(adapter.rank for adapter in adapters.values()),
    )
    shapes = abstract_params(config, dtype=dtype, positions=CONTEXT + CHUNK, tensors=checkpoint.tensors)
    programs = compile_serving(shapes, config, ops=CPU, sizes=sizes, platform="cpu")
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    return Served(config, params, programs, sizes, adapters)


@dataclass
class Answer:
    """All tokens and reports that a request received."""

    tokens: list[int]
    reports: list[tuple]  # a log-probability and the likeliest tokens, for each token
    prompt: dict[int, tuple]  # likewise for the prompt's tokens, by position
    pooled: dict[int, tuple]  # hidden states of the prompt's chunks, by the position where a chunk starts
    reason: FinishReason | None = None


class Server:
    """A scheduler with an executor that carries out its plans, one plan per `turn`."""

    def __init__(self, model: Served, limits: Limits = LIMITS):
        self.executor, self.scheduler, self.adapters = model.executor(), Scheduler(limits), (*model.adapters,)
        self.requests: dict[int, Request] = {}
        self.answers: dict[int, Answer] = {}

    def submit(self, request: Request) -> int:
        number = len(self.requests)
        self.scheduler.submit(number, request, now=0.0)
        self.requests[number], self.answers[number] = request, Answer([], [], {}, {})
        return number

    def turn(self, cancelled: int | None = None, burst: int | None = None) -> None:
        """Carry out one plan. If `cancelled` is given, cancel the request of that number while the plan runs."""
        plan = self.scheduler.plan(now=0.0, burst=burst)
        for end in plan.ended:
            self.answers[end.number].reason = end.reason
        masks = {}
        for row in plan.rows:
            if (allowed := self.requests[row.number].allowed) and row.after is None:
                masks[row.number] = np.asarray(allowed(self.answers[row.number].tokens))
        outcome = self.executor.run(plan, self.requests, masks)
        if cancelled is not None:
            self.scheduler.cancel(cancelled)
        if plan.chunk and outcome.prompt:
            reports = self.answers[plan.chunk.number].prompt
            for at, report in enumerate(_by_token(outcome.prompt), plan.chunk.start + 1):
                assert repr(reports.setdefault(at, report)) == repr(report)  # NaN is not equal to itself
        if plan.chunk and outcome.pooled:
            pooled = tuple(part.tolist() for part in outcome.pooled)
            known = self.answers[plan.chunk.number].pooled.setdefault(plan.chunk.start, pooled)
            assert repr(known) == repr(pooled)
        for number, tokens, skipped, ended in self.scheduler.done(outcome.draws):
            answer = self.answers[number]
            answer.tokens += tokens
            if number in outcome.reports:
                answer.reports += _by_token(outcome.reports[number])[skipped:]
            if ended:
                answer.reason = ended.reason

    def finish(self) -> Mapping[int, Answer]:
        """Carry out plans until every request has its answer."""
        while not self.scheduler.idle:
            self.turn()
        assert self.scheduler.pool.available == self.scheduler.limits.pages - 1
        return self.answers


def _by_token(reports: Reports) -> list[tuple]:
    return [*zip(reports.logprobs, reports.top, strict=True)]
