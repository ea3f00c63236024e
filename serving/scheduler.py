"""The scheduler: decides which tokens the device computes next, for which requests, and in which pages.

The scheduler is a state machine without a clock, a thread or a device. `submit` and `cancel` may be called at any time.
`plan` returns what the device computes next. `done` takes the tokens that the device drew. The rules:

1. Requests have a fixed order: by arrival, except that a request of priority p counts as if it had arrived p times
   `patience` plans later. Preemption does not change the order.
2. Only the first waiting request may begin, so small requests cannot overtake a large one forever. It begins when a row
   is free, and when there are enough pages for its prompt and for one burst (the decoding steps of one plan). Pages
   that running requests hold, or that are reserved for them, do not count.
3. If the first waiting request comes before the last running one in the order and has a better priority, the last
   running request is preempted. A request never preempts one of the same priority.
4. A row that needs a page takes an available one. If there is none, the last running request is preempted, which may be
   this row itself. The first request is never preempted, and all pages together hold a context, so there is always
   progress.
5. A preempted request keeps only its tokens. Later they are computed again, the prompt by prefill and the answer by
   decoding, at their old positions. The request therefore continues as if nothing had happened.
6. A plan has at most one chunk, from the first prompt to prefill. It also has decoding steps for every request with a
   prefilled prompt: one step if there is a chunk, so that the next chunk comes soon, and otherwise a burst.
7. Decoding feeds the last token of a prompt. The prefix cache may therefore hold all other tokens of a prompt. Only a
   request for an embedding prefills its whole prompt: it has no decoding, and does not use the prefix cache.

**A bound on waiting.** Let C = ceil(context / chunk) + context, and take the first unfinished request. While it runs,
each plan prefills a chunk of its prompt or feeds one of its tokens, and it is never preempted, so it ends within C
plans. While it waits, no other request begins (rule 2). The first running request ends within C plans, then the next.
After at most `rows` C plans no request runs, all pages are available, and the waiting request begins: it ends within
(rows + 1) C plans. A request of priority p that arrives at plan n comes before all requests that arrive after plan n +
(p - q) patience, for the best priority q. At most waiting + rows requests are unfinished at once, so it ends within (p
- q) patience + (waiting + rows) (rows + 1) C plans.

A text that is being decoded gets a token in every plan until it ends or is preempted (rule 6). Between two tokens it
waits for one burst, or for one chunk and one step, no matter how many prompts arrive and how long they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llamaspec.serving.pages import NULL_PAGE, PagePool
from llamaspec.serving.request import FinishReason, PromptTooLong, QueueFull, Request


@dataclass(frozen=True)
class Limits:
    """Size limits of a scheduler. Raises ValueError for a size below 1, or for too few pages."""

    pages: int  # total, including NULL_PAGE
    page: int  # tokens per page
    rows: int  # requests that decode at once
    chunk: int  # largest number of prompt tokens per plan
    burst: int  # largest number of steps per row and plan
    context: int  # largest number of tokens per request
    patience: int = 64  # one step of priority counts as this many plans
    waiting: int = 256  # waiting requests; more are refused

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name) for name in ("page", "rows", "chunk", "burst", "context", "patience", "waiting")
        }
        if small := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"Limits.{small[0]}: expected 1 or more, got {sizes[small[0]]}")
        if (self.pages - 1) * self.page < self.context + self.burst:
            raise ValueError(
                f"Limits: {self.pages} pages of {self.page} tokens (one page is always empty) hold fewer tokens than "
                f"context {self.context} + burst {self.burst}"
            )

    @property
    def blocks(self) -> int:
        """The largest number of pages that a request may hold."""
        return -(-self.context // self.page)


@dataclass
class Job:
    """An unfinished request, and its progress."""

    number: int
    request: Request
    rank: tuple[int, int]  # position in the order of rule 1
    expires: float | None  # on the clock of `plan`
    drawn: list[int] = field(default_factory=list)  # tokens drawn and delivered
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # number of tokens whose keys and values are in `pages`
    row: int | None = None  # None while the request waits
    cached: int | None = None  # prompt tokens found in the prefix cache when the request first began

    @property
    def known(self) -> int:
        """The number of known tokens, of the prompt and of the answer."""
        return len(self.request.prompt) + len(self.drawn)

    @property
    def to_read(self) -> int:
        """The number of prompt tokens that are still to prefill.

        Decoding feeds the last token of a prompt, except for an embedding, which has no decoding.
        """
        fed_by_decoding = 0 if self.request.embeds else 1
        return max(0, len(self.request.prompt) - fed_by_decoding - self.computed)

    @property
    def shares(self) -> bool:
        """True if the request uses the prefix cache."""
        # Log-probabilities and embeddings need every prompt token to be computed.
        return self.request.prompt_logprobs is None and not self.request.embeds

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the known tokens of prompt and answer from position `start` up to `stop`."""
        prompt = self.request.prompt
        return (*prompt[start:stop], *self.drawn[max(0, start - len(prompt)) : max(0, stop - len(prompt))])


class Chunk(NamedTuple):
    """Prompt tokens to prefill, from position `start` on."""

    number: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]


class RowPlan(NamedTuple):
    """Decoding steps of one row.

    Feeds the tokens `fed` from position `start` on, and then each token that was just drawn.
    """

    number: int
    row: int
    start: int
    fed: tuple[int, ...]
    steps: int
    pages: tuple[int, ...]
    after: int | None = None  # the token after the last step, if it is known; None: the last step draws it


class Plan(NamedTuple):
    """Work for the device, and the requests that have ended since the last plan. The chunk runs before the rows."""

    chunk: Chunk | None
    rows: tuple[RowPlan, ...]
    ended: tuple["RequestEnd", ...]


class RequestEnd(NamedTuple):
    """A request that has ended, and why."""

    number: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Draws(NamedTuple):
    """Tokens that a row drew, one per step, and why its text ended. The reason is None if the text continues."""

    tokens: Sequence[int]
    reason: FinishReason | None


class News(NamedTuple):
    """New tokens of a request, and its end if it has ended.

    After a preemption, a plan computes known tokens again. The first `skipped` tokens of its row are such tokens, and
    `tokens` does not contain them.
    """

    number: int
    tokens: tuple[int, ...]
    skipped: int
    ended: RequestEnd | None


class Scheduler:
    """A scheduler that follows the rules at the top of this module."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pool = PagePool(limits.pages, limits.page)
        self.waiting: dict[int, Job] = {}
        self.running: dict[int, Job] = {}
        self.plans = self.preemptions = 0
        self.prompt_tokens = self.cached_tokens = 0  # counters over all requests that began
        self._arrivals = 0
        self._ended: list[RequestEnd] = []
        self._planned: Plan | None = None

    @property
    def idle(self) -> bool:
        """True if no request is open, and the end of every request has been reported."""
        return not (self.waiting or self.running or self._ended)

    def submit(self, number: int, request: Request, now: float) -> None:
        """Queue a request. Raises QueueFull, or PromptTooLong for a prompt that is longer than the context."""
        if len(request.prompt) > self.limits.context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt)} tokens, but the context has {self.limits.context}"
            )
        if len(self.waiting) >= self.limits.waiting:
            raise QueueFull(f"{self.limits.waiting} requests are already waiting")
        self._arrivals += 1
        rank = (self.plans + request.priority * self.limits.patience, self._arrivals)
        self.waiting[number] = Job(number, request, rank, request.deadline and now + request.deadline)

    def cancel(self, number: int, reason: FinishReason = "cancelled") -> None:
        """End a request, at any time.

        If the request is part of the current plan, `done` ignores the tokens that the plan draws for it.
        """
        job = self.waiting.pop(number, None)
        if job is None and (job := self.running.pop(number, None)):
            self.pool.release(job.pages)
        if job is not None:
            self._ended.append(_end(job, reason))

    def ended(self) -> tuple[RequestEnd, ...]:
        """Return the requests that have ended, and that neither a plan nor this method has reported yet."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def plan(self, now: float, *, burst: int | None = None) -> Plan:
        """Plan what to compute next, with at most `burst` steps per row. Call `done` before the next plan."""
        assert self._planned is None, "the previous plan is not done"
        self.plans += 1
        for job in [*self.waiting.values(), *self.running.values()]:
            if job.expires is not None and job.expires <= now:
                self.cancel(job.number, "expired")
        self._admit()
        reading = self._first_to_read()
        self._end_what_draws_nothing()
        decoding = [job for job in self._ranked() if not job.to_read]
        most = min(burst or self.limits.burst, self.limits.burst)
        if reading or any(job.request.allowed for job in decoding):
            most = 1  # a grammar needs each token before it can restrict the next one
        steps = {job.number: self._steps(job, most) for job in decoding}
        for job in self._ranked():
            if job.number not in self.running:
                continue  # an earlier job of this loop has preempted this job
            if job.number in steps:
                self._grow(job, job.computed + steps[job.number])
            elif job is reading:
                self._grow(job, job.computed + min(self.limits.chunk, job.to_read))
        chunk = None
        if reading and reading.number in self.running:
            stop = reading.computed + min(self.limits.chunk, reading.to_read)
            tokens = reading.tokens(reading.computed, stop)
            chunk = Chunk(reading.number, reading.computed, tokens, tuple(reading.pages))
        rows = tuple(self._row(job, steps[job.number]) for job in decoding if job.number in self.running)
        self._planned = Plan(chunk, rows, self.ended())
        return self._planned

    def done(self, draws: Mapping[int, Draws]) -> list[News]:
        """Process the tokens that the requests of the current plan drew. Returns new tokens, and requests' ends."""
        plan, self._planned = self._planned, None
        assert plan is not None, "nothing was planned"
        if plan.chunk and (job := self.running.get(plan.chunk.number)):
            job.computed += len(plan.chunk.tokens)
            self._publish(job)
        news = []
        for row in plan.rows:
            job = self.running.get(row.number)
            if job is None:
                continue  # the request was cancelled after `plan`
            tokens, reason = draws[row.number]
            skipped = job.known - row.start - 1
            new = tuple(tokens[skipped:])
            job.computed += len(tokens)
            job.drawn += new
            if reason is None and len(job.drawn) == job.request.max_tokens:
                reason = "length"
            if reason is None and job.known > self.limits.context:
                reason = "context"
            news.append(News(job.number, new, skipped, _end(job, reason) if reason else None))
            if reason:
                del self.running[job.number]
                self.pool.release(job.pages)
        return news

    def _ranked(self) -> list[Job]:
        return sorted(self.running.values(), key=lambda job: job.rank)

    def _admit(self) -> None:
        while self.waiting:
            first = min(self.waiting.values(), key=lambda job: job.rank)
            rows = set(range(self.limits.rows)) - {job.row for job in self.running.values()}
            prefix = self._match(first)
            idle = sum(page in self.pool.idle for page in prefix)  # pages that are available until the request begins
            promised = sum(max(0, self._need(job) - len(job.pages)) for job in self.running.values())
            if rows and self._need(first) - len(prefix) + idle + promised <= self.pool.available:
                del self.waiting[first.number]
                self._begin(first, min(rows), prefix)
                continue
            last = max(self.running.values(), key=lambda job: job.rank, default=None)
            if last is None or last.rank < first.rank or last.request.priority <= first.request.priority:
                return
            self._preempt(last)

    def _begin(self, job: Job, row: int, prefix: Sequence[int]) -> None:
        self.pool.hold(prefix)
        job.pages, job.computed, job.row = [*prefix], len(prefix) * self.limits.page, row
        if job.cached is None:
            job.cached = job.computed
            self.prompt_tokens += len(job.request.prompt)
            self.cached_tokens += job.cached
        self.running[job.number] = job

    def _match(self, job: Job) -> list[int]:
        return self.pool.match(job.request.prompt[:-1], job.request.cache_owner) if job.shares else []

    def _need(self, job: Job) -> int:
        """Count the pages that a job needs for its known tokens and one burst."""
        return -(-min(job.known + self.limits.burst, self.limits.context) // self.limits.page)

    def _preempt(self, job: Job) -> None:
        del self.running[job.number]
        self.pool.release(job.pages)
        job.pages, job.computed, job.row = [], 0, None
        self.waiting[job.number] = job
        self.preemptions += 1

    def _grow(self, job: Job, tokens: int) -> None:
        """Take pages until `job` has room for `tokens`.

        If needed, preempts the last running requests, perhaps `job` itself.
        """
        while len(job.pages) * self.limits.page < tokens:
            if self.pool.available:
                job.pages.append(self.pool.take())
                continue
            last = max(self.running.values(), key=lambda job: job.rank)
            self._preempt(last)
            if last is job:
                return

    def _first_to_read(self) -> Job | None:
        for job in self._ranked():
            if job.to_read:
                self._adopt(job)  # afterwards, nothing may be left to prefill
            if job.to_read:
                return job
        return None

    def _adopt(self, job: Job) -> None:
        """Replace the job's pages by pages of the prefix cache, if these cover more of its prompt.

        Other requests with the same prefix may have published such pages after this request began.
        """
        prefix = self._match(job)
        if len(prefix) * self.limits.page > job.computed:
            self.pool.hold(prefix)
            self.pool.release(job.pages)
            job.pages, job.computed = prefix, len(prefix) * self.limits.page

    def _publish(self, job: Job) -> None:
        """Put the full pages of the prefilled part of a prompt into the prefix cache."""
        size, before = self.limits.page, NULL_PAGE
        if job.shares:
            for i in range(job.computed // size):
                tokens = job.request.prompt[i * size : (i + 1) * size]
                self.pool.publish(job.pages[i], before=before, tokens=tokens, owner=job.request.cache_owner)
                before = job.pages[i]

    def _end_what_draws_nothing(self) -> None:
        for job in [job for job in self.running.values() if not job.to_read and job.request.max_tokens == 0]:
            self.cancel(job.number, "length")

    def _steps(self, job: Job, burst: int) -> int:
        """Return how many of `burst` decoding steps the job can use: up to its `max_tokens` and the context's end."""
        remaining = job.request.max_tokens - len(job.drawn)
        again = job.known - 1 - job.computed  # known tokens to feed before the newest one
        return min(burst, again + remaining, self.limits.context - job.computed)

    def _row(self, job: Job, steps: int) -> RowPlan:
        assert job.row is not None
        fed = job.tokens(job.computed, job.computed + steps)
        after = job.tokens(job.computed + steps, job.computed + steps + 1)
        return RowPlan(job.number, job.row, job.computed, fed, steps, tuple(job.pages), *after)


def _end(job: Job, reason: FinishReason) -> RequestEnd:
    return RequestEnd(job.number, reason, len(job.request.prompt), len(job.drawn), job.cached or 0)
