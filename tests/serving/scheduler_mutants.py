"""Mutants of the scheduler and its pages: each has one bug that another engine had, or that ours once had.

A mutant's name ends with the thread that reports the bug: an issue (#) or a pull request (PR) of vLLM, SGLang,
mini-sglang, nano-vllm, LMCache, ROCm/ATOM, Atlas (Avarok-Cybersecurity) or M* (mstar-project). `verify.mutant` explains
the form of a mutant.
"""

from llamaspec.serving.pages import PagePool
from llamaspec.serving.scheduler import Scheduler
from llamaspec.verify.mutant import implementation

PAGES = implementation(
    PagePool,
    """
another tenant's pages are found (vLLM PR 17045)
    - self.tree.get((before, owner, tuple(
    + self.tree.get((before, ("", owner[1]), tuple(
another tenant's pages are published as one's own (vLLM #44701)
    - node = (before, owner, tuple(tokens))
    + node = (before, ("", owner[1]), tuple(tokens))
another adapter's pages are found (vLLM #44250)
    - self.tree.get((before, owner, tuple(
    + self.tree.get((before, (owner[0], ""), tuple(
another adapter's pages are published as one's own (vLLM #42125)
    - node = (before, owner, tuple(tokens))
    + node = (before, (owner[0], ""), tuple(tokens))
found by its own tokens, whatever is before it (nano-vllm, GHSA-rm76-4mrf-v9r8)
    -             before = page
    +             before = NULL_PAGE
a page in the middle goes before those after it (M* #210)
    - for page in reversed(pages):
    + for page in pages:
the page used last goes first (xinfer PR 334)
    - oldest = next(iter(self.idle))
    + oldest = next(reversed(self.idle))
a page that is held is evicted (mini-sglang PR 52)
    -             self.idle.pop(page, None)
    +             pass
a page that is found is shared without being held (vLLM #37076)
    - self.holders[page] = self.holders.get(page, 0) + 1
    + self.holders.setdefault(page, 1)
a page is free although another request holds it (Atlas PR 373)
    -             if self.holders[page]:
    -                 continue
    -             del self.holders[page]
    +             self.holders.pop(page)
a page is free although it can be found (SGLang #28702)
    -                 self.idle[page] = None
    -             else:
    -                 self.free.append(page)
    +                 self.idle[page] = None
    +             self.free.append(page)
a page that was published is never free again (Atlas PR 373)
    -                 self.idle[page] = None
    +                 pass
an evicted page can still be found (vLLM #37076)
    - del self.idle[oldest], self.tree[self.nodes.pop(oldest)]
    + del self.idle[oldest], self.nodes[oldest]
an evicted page's name stays (M* #210)
    - del self.idle[oldest], self.tree[self.nodes.pop(oldest)]
    + del self.idle[oldest], self.tree[self.nodes[oldest]]
a later page is found although the first is gone (llm-d-inference-sim #705)
    -                 break
    +                 continue
an entry moves to the newer page (Atlas PR 373)
    - if len(tokens) != self.size or self.tree.setdefault(node, page) != page:
    + self.tree[node] = page
    +         if len(tokens) != self.size:
a page too many is given out (vLLM PR 33499)
    - list(range(count - 1, NULL_PAGE, -1))
    + list(range(count - 1, NULL_PAGE - 1, -1))
a page too few is given out
    - list(range(count - 1, NULL_PAGE, -1))
    + list(range(count - 2, NULL_PAGE, -1))
held pages count as available (LMCache #2327)
    - return len(self.free) + len(self.idle)
    + return len(self.free) + len(self.nodes)
pages of the cache are not available (vLLM PR 33499)
    - return len(self.free) + len(self.idle)
    + return len(self.free)
the first page of a request is not released (vLLM PR 92 of neuralmagic)
    - for page in reversed(pages):
    + for page in reversed(pages[1:]):
""",
)

SCHEDULER = implementation(
    Scheduler,
    """
ageing begins anew for a request that gave way (ours)
    -         self.waiting[job.number] = job
    -         self.preemptions += 1
    +         self.waiting[job.number] = job
    +         self._arrivals += 1
    +         job.rank = (self.plans + job.request.priority * self.limits.patience, self._arrivals)
    +         self.preemptions += 1
a better priority always stands before (vLLM PR 19057)
    - rank = (self.plans + request.priority * self.limits.patience, self._arrivals)
    + rank = (request.priority, self._arrivals)
priorities are turned round (vLLM PR 19057)
    - self.plans + request.priority * self.limits.patience
    + self.plans - request.priority * self.limits.patience
the newest stands before (vLLM #41951)
    - request.priority * self.limits.patience, self._arrivals)
    + request.priority * self.limits.patience, -self._arrivals)
the shortest begins first (vLLM #16969)
    - first = min(self.waiting.values(), key=lambda job: job.rank)
    + first = min(self.waiting.values(), key=lambda job: (len(job.request.prompt), job.rank))
one that does not fit is passed over (vLLM #31731)
    - if last is None or last.rank < first.rank or last.request.priority <= first.request.priority:
    -                 return
    + if last is None or last.rank < first.rank or last.request.priority <= first.request.priority:
    +                 for job in sorted(self.waiting.values(), key=lambda job: job.rank):
    +                     if rows and self._need(job) <= self.pool.available - promised and not self._match(job):
    +                         del self.waiting[job.number]
    +                         self._begin(job, min(rows), [])
    +                         return
    +                 return
a full house keeps a better priority waiting (vLLM #40004)
    - if last is None or last.rank < first.rank or last.request.priority <= first.request.priority:
    + if last is not None or first is not None:
an equal gives way, and they take turns for ever (vLLM PR 54530)
    - last.rank < first.rank or last.request.priority <= first.request.priority:
    + last.request.priority < first.request.priority:
the first gives way (vLLM fork #733)
    -             last = max(self.running.values(), key=lambda job: job.rank)
    +             last = min(self.running.values(), key=lambda job: job.rank)
only the row that lacks a page gives way (vLLM #546)
    -             last = max(self.running.values(), key=lambda job: job.rank)
    +             last = job
a row goes on without a page (LMCache #2327)
    -         while len(job.pages) * self.limits.page < tokens:
    +         while len(job.pages) * self.limits.page < tokens - 1:
pages are promised twice (vLLM #54644)
    -             promised = sum(max(0, self._need(job) - len(job.pages)) for job in self.running.values())
    +             promised = 0
found pages are counted as new and as available (vLLM PR 33499)
    - self._need(first) - len(prefix) + idle + promised <=
    + self._need(first) - len(prefix) + promised <=
one found page more is counted than there is (nano-vllm #207)
    - job.pages, job.computed, job.row = [*prefix], len(prefix) * self.limits.page, row
    + job.pages, job.computed, job.row = [*prefix], (len(prefix) + bool(prefix)) * self.limits.page, row
what gave way keeps its pages (vLLM PR 92 of neuralmagic)
    - job.pages, job.computed, job.row = [], 0, None
    + job.computed, job.row = 0, None
pages of what gave way are not released (vLLM #16315 of vllm-ascend)
    -         del self.running[job.number]
    -         self.pool.release(job.pages)
    -         job.pages, job
    +         del self.running[job.number]
    +         job.pages, job
a found page is used without being held (vLLM #37076)
    -     def _begin(self, job: Job, row: int, prefix: Sequence[int]) -> None:
    -         self.pool.hold(prefix)
    +     def _begin(self, job: Job, row: int, prefix: Sequence[int]) -> None:
    +         self.pool.idle = {page: None for page in self.pool.idle if page not in prefix}
a row that is taken is given out (nano-vllm #211)
    - self._begin(first, min(rows), prefix)
    + self._begin(first, len(self.running), prefix)
the last token of a prompt is found too (vLLM #53706)
    - self.pool.match(job.request.prompt[:-1], job.request.cache_owner)
    + self.pool.match(job.request.prompt, job.request.cache_owner)
log-probabilities of found tokens are not computed (vLLM #3251)
    - return self.pool.match(job.request.prompt[:-1], job.request.cache_owner) if job.shares else []
    + return self.pool.match(job.request.prompt[:-1], job.request.cache_owner)
drawn tokens are published (SGLang #34683)
    - for i in range(job.computed // size):
    + for i in range(min(len(job.pages), -(-job.known // size))):
a page is published before it is full (vLLM #37076)
    - for i in range(job.computed // size):
    + for i in range(-(-job.computed // size)):
a page is published under the first page's parent (nano-vllm)
    -                 before = job.pages[i]
    +                 before = NULL_PAGE
only one that begins looks for pages (SGLang PR 10721)
    -                 self._adopt(job)
    +                 pass
who finds the rest of a prompt lets another read unseen (ours)
    -             if job.to_read:
    -                 return job
    +             if job.to_read:
    +                 return job
    +             return next((job for job in self._ranked() if job.to_read), None)
a found beginning replaces a longer one of one's own (vLLM #1969 of LMCache)
    - if len(prefix) * self.limits.page > job.computed:
    + if prefix:
adopted pages are held twice (Atlas PR 373)
    -             self.pool.release(job.pages)
    -             job.pages, job.computed = prefix
    +             job.pages, job.computed = prefix
results of a cancelled request are delivered (SGLang #34112)
    -             if job is None:
    -                 continue  # the request was cancelled after `plan`
    +             job = job or Job(row.number, Request((0,), 9), (0, 0), None)
a chunk of a cancelled request is committed (SGLang #34149)
    - if plan.chunk and (job := self.running.get(plan.chunk.number)):
    + if plan.chunk and (job := self.running.get(plan.chunk.number) or next(iter(self.running.values()), None)):
a cancelled request keeps its pages (ROCm/ATOM #1562, SGLang PR 36926)
    -             self.pool.release(job.pages)
    -         if job is not None:
    +             pass
    +         if job is not None:
cancelling twice releases twice (SGLang #36552, #28702)
    -         if job is None and (job := self.running.pop(number, None)):
    +         if job is None and (job := self.running.get(number)):
a request that waits cannot be cancelled (ROCm/ATOM #1589)
    -         job = self.waiting.pop(number, None)
    -         if job is None and
    +         job = None
    +         if number not in self.waiting and
an end is not told (mini-sglang)
    -             self._ended.append(_end(job, reason))
    +             pass
an end is told again and again
    - ended, self._ended = tuple(self._ended), []
    + ended = tuple(self._ended)
only what runs expires (vLLM PR 36666)
    - for job in [*self.waiting.values(), *self.running.values()]:
    + for job in [*self.running.values()]:
a finished request keeps its pages (ROCm/ATOM #1589)
    -                 del self.running[job.number]
    -                 self.pool.release(job.pages)
    +                 del self.running[job.number]
a text that is as long as asked for goes on (mini-sglang)
    - if reason is None and len(job.drawn) == job.request.max_tokens:
    + if reason is None and len(job.drawn) > job.request.max_tokens:
a text beyond the context goes on (vLLM #5334)
    - if reason is None and job.known > self.limits.context:
    + if reason is None and job.known > self.limits.context + 1:
a full context ends a text a token early
    - if reason is None and job.known > self.limits.context:
    + if reason is None and job.known >= self.limits.context:
a prompt beyond the context is accepted (mini-sglang)
    - if len(request.prompt) > self.limits.context:
    + if len(request.prompt) > self.limits.context + 1:
the queue has no end
    - if len(self.waiting) >= self.limits.waiting:
    + if len(self.waiting) > self.limits.waiting:
tokens that are fed again are delivered again (ours, nano-vllm #217)
    - new = tuple(tokens[skipped:])
    + new = tuple(tokens[min(skipped, 1) :])
tokens that are fed again count as new (nano-vllm #233)
    - again = job.known - 1 - job.computed
    + again = 0
a step too many
    - return min(burst, again + remaining, self.limits.context - job.computed)
    + return min(burst, again + remaining + 1, self.limits.context - job.computed)
more steps than the burst (vLLM #39146)
    - return min(burst, again + remaining, self.limits.context - job.computed)
    + return min(self.limits.burst, again + remaining, self.limits.context - job.computed)
a text with a mask runs ahead of it
    - if reading or any(job.request.allowed for job in decoding):
    + if reading or all(job.request.allowed for job in decoding):
prompts wait while others draw a whole burst (ours)
    - if reading or any(job.request.allowed for job in decoding):
    + if any(job.request.allowed for job in decoding):
prefill comes first, and texts stand still (nano-vllm, mini-sglang)
    - rows = tuple(self._row(job, steps[job.number]) for job in decoding if job.number in self.running)
    + rows = tuple(self._row(job, steps[job.number]) for job in decoding if job.number in self.running and not chunk)
a chunk is as long as the prompt
    - stop = reading.computed + min(self.limits.chunk, reading.to_read)
    + stop = reading.computed + reading.to_read
one that has given way is read all the same
    - if reading and reading.number in self.running:
    + if reading:
only the newest token is fed again (nano-vllm #211)
    - fed = job.tokens(job.computed, job.computed + steps)
    + fed = job.tokens(job.known - 1, job.known)
what follows tokens that are fed again is drawn again, under a rule's latest answer (ours)
    - tuple(job.pages), *after)
    + tuple(job.pages))
the number of preemptions is not kept
    -         self.preemptions += 1
    +         pass
found tokens are counted each time that a request begins
    -         if job.cached is None:
    +         if True:
""",
)
