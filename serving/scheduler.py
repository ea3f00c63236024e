"""The scheduler: which tokens the device computes next, for whom, and in which pages.

A state machine without a clock, a thread or a device. `submit` and `cancel` may come at any moment. `plan` says what
the device computes next, and `done` takes what it drew. The rules:

1. Requests stand in one order, which is fixed when they come: that of arrival, except that a priority of p counts as if
   the request had come p times `patience` plans later. Giving way does not change the order.
2. Only the first that waits may begin, so small requests never overtake a large one for ever. It begins when a row is
   free, and the pages for its prompt and a burst are neither held by a running request nor promised to one.
3. If the first that waits stands before the last that runs and has a better priority, the last gives way. A request
   never gives way to one of its own priority.
4. A row that needs a page takes an available one. If there is none, the last that runs gives way, which may be the
   same row. The first never gives way, and all pages together hold a context, so something always moves.
5. A request that gives way keeps nothing but its tokens. They are fed again, its prompt by prefill and the rest by
   decoding, at the positions where they were drawn. What comes after is then what would have come.
6. A plan has at most one chunk, of the first prompt to read, and steps for every request whose prompt is read: one
   beside a chunk, since others wait for the next, else a burst.
7. Decoding feeds the last token of a prompt. The rest of a prompt may therefore be found in the prefix cache whole.

**A bound on waiting.** Let C = ceil(context / chunk) + context, and take the first unfinished request. While it runs,
each plan reads a chunk of its prompt or feeds one of its tokens, and it never gives way, so it ends within C plans.
While it waits, nobody else begins (rule 2), and the first of those that run ends within C plans, then the next. After
`rows` C plans at most nobody runs, all pages are available, and it begins: it ends within (rows + 1) C plans. A request
of priority p that came at plan n has none put before it after plan n + (p - q) patience, q being the best priority. At
most waiting + rows are unfinished at once, so it ends within (p - q) patience + (waiting + rows) (rows + 1) C plans.

Until a text ends or gives way it has a token in every plan (rule 6). Between two it waits for a burst, or for a chunk
and a step, however many prompts come and however long they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llamaspec.serving.pages import NOBODY, PagePool
from llamaspec.serving.request import FinishReason, PromptTooLong, QueueFull, Request


@dataclass(frozen=True)
class Limits:
    """Sizes that a scheduler plans within. Raises ValueError for too few pages."""

    pages: int  # in all, of which NOBODY is one
    page: int  # tokens
    rows: int  # requests that decode at once
    chunk: int  # tokens of a prompt in a plan, at most
    burst: int  # steps of a row in a plan, at most
    context: int  # tokens of a request in the cache, at most
    patience: int = 64  # plans by which a step of priority is worse than another
    waiting: int = 256  # requests; more are refused

    def __post_init__(self) -> None:
        if min(self.page, self.rows, self.chunk, self.burst, self.context, self.patience, self.waiting) < 1:
            raise ValueError("sizes of an engine must be 1 or more")
        if (self.pages - 1) * self.page < self.context + self.burst:
            raise ValueError(f"{self.pages} pages of {self.page} tokens cannot hold a context and a burst")

    @property
    def blocks(self) -> int:
        """The pages that a request holds at most."""
        return -(-self.context // self.page)


@dataclass
class Job:
    """A request that is not finished, and what has been computed for it."""

    number: int
    request: Request
    rank: tuple[int, int]  # its place in the order
    expires: float | None  # on the clock of `plan`
    drawn: list[int] = field(default_factory=list)  # and delivered
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in `pages`
    row: int | None = None  # None while it waits
    cached: int | None = None  # tokens of the prompt that were found when it first began

    @property
    def known(self) -> int:
        """Count the tokens of the text so far."""
        return len(self.request.prompt) + len(self.drawn)

    @property
    def to_read(self) -> int:
        """Count the tokens of the prompt that prefill has still to read."""
        return max(0, len(self.request.prompt) - 1 - self.computed)

    @property
    def shares(self) -> bool:
        """Whether its prompt is looked up in the prefix cache, and put there."""
        return self.request.prompt_logprobs is None  # those need every token of the prompt to be computed

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens of the text from `start` to `stop`, as far as they are known."""
        prompt = self.request.prompt
        return (*prompt[start:stop], *self.drawn[max(0, start - len(prompt)) : max(0, stop - len(prompt))])


class Chunk(NamedTuple):
    """Tokens of a prompt to read, from position `start` on."""

    number: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]


class Row(NamedTuple):
    """Steps of decoding: `fed` from position `start` on, then each token that the step before drew."""

    number: int
    row: int
    start: int
    fed: tuple[int, ...]
    steps: int
    pages: tuple[int, ...]
    after: int | None = None  # the token that is known to come after the last step; None: it is drawn


class Plan(NamedTuple):
    """Work for the device, the chunk first, and the requests that have ended meanwhile."""

    chunk: Chunk | None
    rows: tuple[Row, ...]
    ended: tuple["Ended", ...]


class Ended(NamedTuple):
    """The end of a request."""

    number: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Draws(NamedTuple):
    """Tokens that a row drew, one a step, and why nothing follows them; None for a text that goes on."""

    tokens: Sequence[int]
    reason: FinishReason | None


class News(NamedTuple):
    """New tokens of a request, and its end, if it has ended. The first `skipped` tokens that its row drew are known."""

    number: int
    tokens: tuple[int, ...]
    skipped: int
    ended: Ended | None


class Scheduler:
    """See the rules above."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pool = PagePool(limits.pages, limits.page)
        self.waiting: dict[int, Job] = {}
        self.running: dict[int, Job] = {}
        self.plans = self.preemptions = 0
        self.prompt_tokens = self.cached_tokens = 0  # of requests that began: all, and those that the cache had
        self._arrivals = 0
        self._ended: list[Ended] = []
        self._planned: Plan | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is left to plan or to tell."""
        return not (self.waiting or self.running or self._ended)

    def submit(self, number: int, request: Request, now: float) -> None:
        """Let a request wait. Raises QueueFull where too many wait, PromptTooLong for a prompt beyond the context."""
        if len(request.prompt) > self.limits.context:
            raise PromptTooLong(f"the prompt is {len(request.prompt)} tokens, the context {self.limits.context}")
        if len(self.waiting) >= self.limits.waiting:
            raise QueueFull(f"{self.limits.waiting} requests wait already")
        self._arrivals += 1
        rank = (self.plans + request.priority * self.limits.patience, self._arrivals)
        self.waiting[number] = Job(number, request, rank, request.deadline and now + request.deadline)

    def cancel(self, number: int, reason: FinishReason = "cancelled") -> None:
        """End a request, at any moment. What a plan under way computes for it is dropped. Others are not touched."""
        job = self.waiting.pop(number, None)
        if job is None and (job := self.running.pop(number, None)):
            self.pool.release(job.pages)
        if job is not None:
            self._ended.append(_end(job, reason))

    def ended(self) -> tuple[Ended, ...]:
        """Take the ends that no plan has told."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def plan(self, now: float, *, burst: int | None = None) -> Plan:
        """Say what to compute next, with at most `burst` steps a row. `done` must follow before the next plan."""
        assert self._planned is None, "the plan before is not done"
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
            most = 1  # for a rule, the host must see a token before it can say which may follow
        steps = {job.number: self._steps(job, most) for job in decoding}
        for job in self._ranked():
            if job.number not in self.running:
                continue  # it has given way to one before it
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
        """Take what the plan drew, by request, and return what is new."""
        plan, self._planned = self._planned, None
        assert plan is not None, "nothing was planned"
        if plan.chunk and (job := self.running.get(plan.chunk.number)):
            job.computed += len(plan.chunk.tokens)
            self._publish(job)
        news = []
        for row in plan.rows:
            job = self.running.get(row.number)
            if job is None:
                continue  # it was cancelled meanwhile
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
            found = self._match(first)
            idle = sum(page in self.pool.idle for page in found)  # available now, and held once it begins
            promised = sum(max(0, self._need(job) - len(job.pages)) for job in self.running.values())
            if rows and self._need(first) - len(found) + idle + promised <= self.pool.available:
                del self.waiting[first.number]
                self._begin(first, min(rows), found)
                continue
            last = max(self.running.values(), key=lambda job: job.rank, default=None)
            if last is None or last.rank < first.rank or last.request.priority <= first.request.priority:
                return
            self._give_way(last)

    def _begin(self, job: Job, row: int, found: Sequence[int]) -> None:
        self.pool.hold(found)
        job.pages, job.computed, job.row = [*found], len(found) * self.limits.page, row
        if job.cached is None:
            job.cached = job.computed
            self.prompt_tokens += len(job.request.prompt)
            self.cached_tokens += job.cached
        self.running[job.number] = job

    def _match(self, job: Job) -> list[int]:
        return self.pool.match(job.request.prompt[:-1], job.request.tenant) if job.shares else []

    def _need(self, job: Job) -> int:
        """Count the pages for its tokens so far and a burst."""
        return -(-min(job.known + self.limits.burst, self.limits.context) // self.limits.page)

    def _give_way(self, job: Job) -> None:
        del self.running[job.number]
        self.pool.release(job.pages)
        job.pages, job.computed, job.row = [], 0, None
        self.waiting[job.number] = job
        self.preemptions += 1

    def _grow(self, job: Job, tokens: int) -> None:
        """Take pages for so many tokens. The requests that run last give way for them, at worst `job` itself."""
        while len(job.pages) * self.limits.page < tokens:
            if self.pool.available:
                job.pages.append(self.pool.take())
                continue
            last = max(self.running.values(), key=lambda job: job.rank)
            self._give_way(last)
            if last is job:
                return

    def _first_to_read(self) -> Job | None:
        for job in self._ranked():
            if job.to_read:
                self._adopt(job)  # which may leave nothing to read
            if job.to_read:
                return job
        return None

    def _adopt(self, job: Job) -> None:
        """Go on with the pages that others have published since it began, if they reach further."""
        found = self._match(job)
        if len(found) * self.limits.page > job.computed:
            self.pool.hold(found)
            self.pool.release(job.pages)
            job.pages, job.computed = found, len(found) * self.limits.page

    def _publish(self, job: Job) -> None:
        """Put the full pages of a prompt that prefill has read into the prefix cache."""
        size, before = self.limits.page, NOBODY
        if job.shares:
            for i in range(job.computed // size):
                tokens = job.request.prompt[i * size : (i + 1) * size]
                self.pool.publish(job.pages[i], before=before, tokens=tokens, tenant=job.request.tenant)
                before = job.pages[i]

    def _end_what_draws_nothing(self) -> None:
        for job in [job for job in self.running.values() if not job.to_read and job.request.max_tokens == 0]:
            self.cancel(job.number, "length")

    def _steps(self, job: Job, burst: int) -> int:
        """Count the steps of a burst that feed a known token or give a new one."""
        left = job.request.max_tokens - len(job.drawn)
        again = job.known - 1 - job.computed  # tokens to feed before the newest
        return min(burst, again + left, self.limits.context - job.computed)

    def _row(self, job: Job, steps: int) -> Row:
        assert job.row is not None
        fed = job.tokens(job.computed, job.computed + steps)
        after = job.tokens(job.computed + steps, job.computed + steps + 1)
        return Row(job.number, job.row, job.computed, fed, steps, tuple(job.pages), *after)


def _end(job: Job, reason: FinishReason) -> Ended:
    return Ended(job.number, reason, len(job.request.prompt), len(job.drawn), job.cached or 0)
