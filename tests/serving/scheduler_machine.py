"""The scheduler's laws as a state machine that Hypothesis drives.

The machine's executor knows the content of every place in every page: the whole text up to there, and which program
computed it. Before each read it checks that all earlier places hold the reader's own text. So a page that is shared too
early, evicted too early or given to two requests is noticed at once.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamaspec.serving.pages import NULL_PAGE, PagePool
from llamaspec.serving.request import FinishReason, PromptTooLong, QueueFull, Request
from llamaspec.serving.scheduler import Draws, Limits, Plan, RequestEnd, Scheduler

EOS = 3
BEST = -1  # priority
PREFILL, DECODE = "prefill", "decode"


def next_token(text: Sequence[int], seed: int) -> int:
    """Return the next token, which depends only on the text and the seed; this function stands in for a model."""
    return hash((tuple(text), seed)) % 9


def single_answer(request: Request, context: int) -> tuple[list[int], FinishReason]:
    """Compute the answer that a request gets without other requests, and the reason why it ends."""
    text: list[int] = []
    while True:
        if len(text) == request.max_tokens:
            return text, "length"
        if len(request.prompt) + len(text) > context:
            return text, "context"
        text.append(next_token((*request.prompt, *text), request.seed))
        if text[-1] == EOS:
            return text, "stop"


class Watched:
    """An executor that carries out plans, and checks that each plan is allowed."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.limits = scheduler, scheduler.limits
        self.memory: dict[tuple[int, int], tuple[Any, ...]] = {}  # by place: owner, then (token, program) so far
        self.requests: dict[int, Request] = {}
        self.texts: dict[int, list[int]] = {}
        self.came: dict[int, int] = {}  # plan
        self.read: dict[int, set[int]] = {}  # positions that prefill chunks computed
        self.began: dict[int, int] = {}  # plan
        self.cancelled: set[int] = set()
        self.ended: dict[int, RequestEnd] = {}
        self.under_way: Plan | None = None
        self.fed = 0  # tokens
        self.gave_way = 0  # requests preempted in the latest plan
        give_way: Any = scheduler._preempt

        def counted(job: Any) -> None:
            self.gave_way += 1
            assert self.gave_way <= 100, "requests give way to each other for ever"
            give_way(job)

        scheduler._preempt = counted

    def submit(self, request: Request) -> None:
        number, full = len(self.requests), len(self.scheduler.waiting) >= self.limits.waiting
        try:
            self.scheduler.submit(number, request, now=float(self.scheduler.plans))
        except PromptTooLong:
            assert len(request.prompt) > self.limits.context
        except QueueFull:
            assert full
        else:
            assert not full and len(request.prompt) <= self.limits.context
            self.requests[number], self.texts[number], self.came[number] = request, [], self.scheduler.plans
            self.read[number] = set()

    def cancel(self, number: int) -> None:
        self.scheduler.cancel(number)
        self.cancelled.add(number)
        assert number not in self.scheduler.waiting and number not in self.scheduler.running

    def plan(self, burst: int | None = None) -> None:
        before = {*self.scheduler.running}
        everybody = [*self.scheduler.running.values(), *self.scheduler.waiting.values()]
        first = min(everybody, key=lambda job: job.rank, default=None)
        now, self.gave_way = float(self.scheduler.plans), 0
        plan = self.under_way = self.scheduler.plan(now, burst=burst)
        for end in plan.ended:
            self._note(end)
        jobs, waiting = self.scheduler.running, self.scheduler.waiting
        assert all(job.expires is None or job.expires > now for job in [*jobs.values(), *waiting.values()])
        for job in jobs.values():
            assert job.number in before or all(job.rank < waiting_job.rank for waiting_job in waiting.values()), (
                "overtaken"
            )
            self.began.setdefault(job.number, self.scheduler.plans)
        assert plan.chunk or plan.rows or plan.ended or not (jobs or self.scheduler.waiting), "nothing moves"
        assert not first or first.number not in before or first.number in {*jobs, *self.ended}, "the first gave way"
        numbers = [row.row for row in plan.rows]
        assert len({*numbers}) == len(numbers) and {*numbers} <= {*range(self.limits.rows)}
        assert len(jobs) <= self.limits.rows and len({job.row for job in jobs.values()}) == len(jobs)
        assert {row.number for row in plan.rows} == {number for number, job in jobs.items() if not job.to_read}
        most = min(burst or self.limits.burst, self.limits.burst)
        masked = any(self.requests[row.number].allowed for row in plan.rows)
        for row in plan.rows:
            request, drawn = self.requests[row.number], len(self.texts[row.number])
            remaining = (
                len(request.prompt) + request.max_tokens - 1 - row.start
            )  # tokens to feed until the answer is full
            steps = min(1 if masked or plan.chunk else most, remaining, self.limits.context - row.start)
            # If a request with a mask or a prompt to read is preempted in this plan, the others may have only one step.
            assert row.steps == steps or (self.gave_way and row.steps == 1), "too many steps or too few"
            assert len(row.fed) == min(len(request.prompt) + drawn - row.start, row.steps)
            at = row.start + row.steps - len(request.prompt)  # index in the answer of the token after the last step
            assert row.after == (self.texts[row.number][at] if at < drawn else None), "not the token that is known"
            assert row.steps <= len(row.pages) * self.limits.page - row.start, "a step without a page"
            assert len(row.pages) <= self.limits.blocks
        if plan.chunk:
            assert 1 <= len(plan.chunk.tokens) <= self.limits.chunk, "more than the budget"
            self._carry_out(plan.chunk.number, plan.chunk.start, plan.chunk.tokens, plan.chunk.pages, PREFILL)

    def done(self) -> None:
        plan, self.under_way, draws = self.under_way, None, {}
        assert plan is not None
        for row in plan.rows:
            request, text = self.requests[row.number], [*self.requests[row.number].prompt, *self.texts[row.number]]
            if request.prompt_logprobs is not None:
                assert self.read[row.number] == {*range(len(request.prompt) - 1)}, "a token of the prompt not read"
            gone = row.number not in self.scheduler.running
            tokens: list[int] = []
            reason: FinishReason | None = None
            for step in range(row.steps):
                at = row.start + step
                fed = row.fed[step] if step < len(row.fed) else tokens[-1]
                if at < len(text):
                    assert fed == text[at], "another token is fed than the text's"
                else:
                    text.append(fed)
                self._carry_out(row.number, at, [fed], row.pages, DECODE, text=text, gone=gone)
                token = next_token(text[: at + 1], request.seed)
                tokens.append(token)
                if at + 1 >= len(request.prompt) + len(self.texts[row.number]) and token == EOS:
                    reason = "stop"
                    break
            draws[row.number] = Draws(tokens, reason)
        for news in self.scheduler.done(draws):
            assert news.number not in self.ended, "news of one that has ended"
            assert draws[news.number].tokens[news.skipped :] == [*news.tokens]
            self.texts[news.number] += news.tokens
            if news.ended:
                self._note(news.ended)

    def _carry_out(
        self,
        number: int,
        start: int,
        tokens: Sequence[int],
        pages: Sequence[int],
        program: str,
        *,
        text: Sequence[int] | None = None,
        gone: bool = False,
    ) -> None:
        """Write the page entries that a program would write, and check all entries that it would read."""
        request, size = self.requests[number], self.limits.page
        text = [*request.prompt, *self.texts[number]] if text is None else text
        unread = len(request.prompt) - (not request.embeds)  # the first position that decoding feeds
        for at, token in enumerate(tokens, start):
            assert (at < unread) == (program == PREFILL), "the wrong program feeds a token"
            assert token == text[at], "another token is fed than the text's"
            self.fed += 1
            if gone:
                continue  # the request was cancelled meanwhile, so what it wrote is never read
            page = pages[at // size]
            assert page != NULL_PAGE and self.scheduler.pool.holders[page] == 1, "a page is written that others hold"
            assert page not in self.scheduler.pool.nodes, "a page is written that can be found"
            if program == PREFILL:
                self.read[number].add(at)
            history = (request.cache_owner, *((text[i], PREFILL if i < unread else DECODE) for i in range(at + 1)))
            self.memory[page, at % size] = history
            for before in range(at + 1):
                place = pages[before // size], before % size
                assert self.memory.get(place) == history[: before + 2], "another's keys"

    def _note(self, end: RequestEnd) -> None:
        assert end.number not in self.ended, "an end is told twice"
        self.ended[end.number] = end
        request, text = self.requests[end.number], self.texts[end.number]
        assert (end.prompt_tokens, end.completion_tokens) == (len(request.prompt), len(text)), "wrong usage"
        assert end.cached_tokens % self.limits.page == 0 and end.cached_tokens < len(request.prompt)
        assert end.reason != "cancelled" or end.number in self.cancelled
        assert end.reason != "expired" or request.deadline is not None
        if request.embeds and end.reason == "length":
            assert self.read[end.number] == {*range(len(request.prompt))}, "a token of the prompt not read"
            assert end.cached_tokens == 0
        if end.reason in ("stop", "length", "context"):
            assert (text, end.reason) == single_answer(request, self.limits.context), "another text than alone"
        assert self.scheduler.plans - self.came[end.number] <= bound(self.limits, request.priority)

    def check_pages(self) -> None:
        """Check that every page is in exactly one state: free, cached, or held by requests."""
        pool = self.scheduler.pool
        holders: dict[int, int] = {}
        for job in self.scheduler.running.values():
            assert len({*job.pages}) == len(job.pages), "a page twice in a request"
            for page in job.pages:
                holders[page] = holders.get(page, 0) + 1
        assert holders == pool.holders, "holders are counted wrong"
        assert sorted([*pool.free, *pool.idle, *holders]) == [*range(1, pool.count)], "a page is lost, or there twice"
        assert {page: node for node, page in pool.tree.items()} == pool.nodes
        assert {*pool.idle} <= {*pool.nodes}
        assert all(node[0] == NULL_PAGE or node[0] in pool.nodes for node in pool.tree), "a page without the one before"
        assert not any(job.pages for job in self.scheduler.waiting.values())

    def finish(self) -> None:
        """Carry out plans until all requests have ended; fail if this takes more plans than the scheduler's bound."""
        plans = (len(self.requests) + 2) * (self.limits.rows + 1) * plans_of_one(self.limits)
        while plans and not self.scheduler.idle:
            if self.under_way is None:
                self.plan()
                plans -= 1
            self.done()
        assert plans, "somebody waits for ever"
        assert {*self.ended} == {*self.requests}, "an end is not told"
        assert self.scheduler.pool.available == self.limits.pages - 1, "a page is lost"


def plans_of_one(limits: Limits) -> int:
    """Return the number of plans for one request, which the scheduler's bound calls C."""
    return -(-limits.context // limits.chunk) + limits.context


def bound(limits: Limits, priority: int) -> int:
    """Return how many plans a request needs at most: see `serving.scheduler`."""
    unfinished = limits.waiting + limits.rows
    return (priority - BEST) * limits.patience + unfinished * (limits.rows + 1) * plans_of_one(limits)


class SchedulerMachine(RuleBasedStateMachine):
    """A Hypothesis state machine: random requests arrive, are cancelled and expire, and there are few pages."""

    scheduler: ClassVar[type[Scheduler]] = Scheduler
    pool: ClassVar[type[PagePool]] = PagePool

    @initialize(
        page=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 4),
        chunk=st.integers(1, 7),
        burst=st.integers(1, 4),
        context=st.integers(4, 16),
        spare=st.integers(0, 4),
        patience=st.integers(1, 8),
    )
    def begin(self, page: int, rows: int, chunk: int, burst: int, context: int, spare: int, patience: int):
        pages = -(-(context + burst) // page) + 1 + spare
        self.watched = watched(
            Limits(pages, page, rows, chunk, burst, context, patience, waiting=6), self.scheduler, self.pool
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=18),
        max_tokens=st.integers(0, 12),
        priority=st.integers(BEST, 1),
        tenant=st.sampled_from(["", "b"]),
        adapter=st.sampled_from(["", "b"]),
        seed=st.integers(0, 1),
        deadline=st.none() | st.sampled_from([1.0, 5.0, 30.0]),
        masked=st.sampled_from([False, False, True]),
        reads_all=st.sampled_from([False, False, True]),
        embeds=st.sampled_from([False, False, False, True]),
    )
    def submit(self, prompt, max_tokens, priority, tenant, adapter, seed, deadline, masked, reads_all, embeds):
        self.watched.submit(
            Request(
                tuple(prompt),
                0 if embeds else max_tokens,
                seed=seed,
                priority=priority,
                tenant=tenant,
                adapter=adapter,
                deadline=deadline,
                allowed=(lambda drawn: np.ones(9, bool)) if masked else None,
                prompt_logprobs=0 if reads_all and not embeds else None,
                embeds=embeds,
            )
        )

    @rule(data=st.data())
    def cancel(self, data: st.DataObject):
        if requests := sorted(self.watched.requests):
            self.watched.cancel(data.draw(st.sampled_from(requests)))

    @precondition(lambda self: self.watched.under_way is None)
    @rule(burst=st.none() | st.integers(1, 5))
    def plan(self, burst: int | None):
        self.watched.plan(burst)

    @precondition(lambda self: self.watched.under_way is not None)
    @rule()
    def done(self):
        self.watched.done()

    @invariant()
    def pages_add_up(self):
        if hasattr(self, "watched"):
            self.watched.check_pages()

    def teardown(self):
        if hasattr(self, "watched"):
            self.watched.finish()


def watched(limits: Limits, scheduler: type[Scheduler] = Scheduler, pool: type[PagePool] = PagePool) -> Watched:
    inner = scheduler(limits)
    inner.pool = pool(limits.pages, limits.page)
    return Watched(inner)
