"""Laws of the scheduler. Each law comes with requests for which a wrong scheduler would break it."""

from collections.abc import Callable
from typing import Any

from llamaspec.serving.pages import NULL_PAGE
from llamaspec.serving.request import Request
from llamaspec.serving.scheduler import Limits
from tests.serving.scheduler_machine import BEST, Watched, single_answer

SchedulerMaker = Callable[[Limits], Watched]


def serve(run: Watched, plans: int, arriving: Callable[[int], Request | None] = lambda plan: None) -> None:
    """Carry out `plans` plans. Before each plan, submit the request that `arriving` returns, if any."""
    for plan in range(plans):
        if request := arriving(plan):
            run.submit(request)
        run.plan()
        run.check_pages()
        run.done()


def long_answer(prompt: tuple[int, ...], tokens: int, context: int = 1000, **options: Any) -> Request:
    """Return a request for `tokens` tokens, with a seed for which no stop token ends the answer earlier."""
    requests = (Request(prompt, tokens, seed=seed, **options) for seed in range(10_000))
    return next(request for request in requests if len(single_answer(request, context)[0]) == tokens)


def nobody_waits_for_ever(make: SchedulerMaker) -> None:
    """A large request finishes although small requests with a better priority keep arriving."""
    for rows, every in ((2, 1), (1, 3)):
        run = make(Limits(pages=12, page=2, rows=rows, chunk=4, burst=2, context=16, patience=8, waiting=8))
        run.submit(long_answer((1,) * 12, 4, priority=1))
        small = (Request((0, plan % 2) * 2, 2, priority=0, seed=plan) for plan in range(100))
        serve(run, 100, lambda plan, every=every, small=small: None if plan % every else next(small))
        assert 0 in run.ended


def nobody_overtakes_an_equal(make: SchedulerMaker) -> None:
    """Among requests of equal priority, a large request starts before small requests that arrive later."""
    run = make(Limits(pages=10, page=2, rows=4, chunk=4, burst=2, context=16, waiting=8))
    run.submit(long_answer((1,) * 7, 8))
    run.submit(Request((0,) * 15, 1))
    serve(run, 40, lambda plan: Request((0, 1, 0), 3, seed=plan))
    assert [*run.began] == sorted(run.began) and len(run.began) > 5


def nothing_is_computed_twice(make: SchedulerMaker) -> None:
    """No token is computed twice: requests wait until enough pages are free for them, so none is preempted.

    A page counts as free for only one waiting request.
    """
    run = make(Limits(pages=21, page=1, rows=8, chunk=4, burst=1, context=16))
    for i in range(8):
        run.submit(long_answer((i,) * 12, 4))
    run.finish()
    assert run.fed == 8 * (11 + 4) and run.scheduler.preemptions == 0

    run = make(Limits(pages=8, page=4, rows=1, chunk=3, burst=1, context=16))
    run.submit(long_answer((1,) * 12, 2))
    run.finish()
    assert run.fed == 11 + 2

    # A request that reuses cached pages must not count them as free pages.
    run = make(Limits(pages=11, page=2, rows=2, chunk=8, burst=2, context=16))
    run.submit(long_answer((1,) * 9, 1))
    run.finish()
    run.submit(long_answer((0,) * 7, 3))
    run.submit(long_answer((*(1,) * 9, 0, 0), 1))
    run.finish()
    assert run.scheduler.preemptions == 0


def texts_survive_giving_way(make: SchedulerMaker) -> None:
    """A request that is preempted during its prompt or its answer still gets the same text as when it runs alone."""
    for page, chunk, burst in ((2, 4, 2), (1, 2, 3), (4, 3, 1)):
        run = make(Limits(pages=-(-19 // page) + 2, page=page, rows=3, chunk=chunk, burst=burst, context=16))
        lengths = (3, 2, 1, 3, 12, 2)
        for i, length in enumerate(lengths):
            run.submit(long_answer((i % 2,) * length, 14 - length, 16))
        run.finish()
        assert run.scheduler.preemptions >= 2 and run.scheduler.prompt_tokens == sum(lengths)

    # A decoding request takes the pages that the prefill of a long prompt still needs.
    for burst in (1, 2):
        run = make(Limits(pages=10, page=2, rows=2, chunk=1, burst=burst, context=16))
        run.submit(long_answer((1,), 15, 16))
        run.submit(long_answer((0,) * 12, 2, 16))
        run.finish()
        assert run.scheduler.preemptions >= 1


def a_pool_refuses_what_cannot_be(make: SchedulerMaker) -> None:
    """The pool refuses to publish a page twice, to publish an incomplete page, and to take more pages than it has."""
    pool = make(Limits(pages=4, page=2, rows=1, chunk=1, burst=1, context=4)).scheduler.pool
    pages = [pool.take() for _ in range(3)]
    pool.publish(pages[0], before=NULL_PAGE, tokens=(1, 1), owner=("", ""))
    for wrong in (
        lambda: pool.publish(pages[1], before=NULL_PAGE, tokens=(1, 1), owner=("", "")),
        lambda: pool.publish(pages[1], before=pages[0], tokens=(1,), owner=("", "")),
        pool.take,
    ):
        try:
            wrong()
        except (ValueError, IndexError):
            continue
        raise AssertionError("a pool did what cannot be")
    assert pool.match((1, 1, 1), ("", "")) == pages[:1]


def a_prompt_that_was_read_is_found(make: SchedulerMaker) -> None:
    """A prefilled prompt is found in the cache after its request has ended, even by two requests at the same time."""
    run = make(Limits(pages=24, page=2, rows=4, chunk=4, burst=2, context=16))
    prompt = (0, 1, 1, 0, 1, 0, 0, 1, 1)
    run.submit(Request(prompt, 1))
    run.finish()
    for seed in (1, 2):
        run.submit(Request((*prompt, 0, 0, 1), 1, seed=seed))
    run.finish()
    assert [run.ended[number].cached_tokens for number in (0, 1, 2)] == [0, 8, 8]
    assert run.fed <= (8 + 1) + (3 + 1) + (1 + 1 + 1)
    assert run.scheduler.cached_tokens == 16 and run.scheduler.prompt_tokens == 9 + 12 + 12


def the_page_used_longest_ago_goes_first(make: SchedulerMaker) -> None:
    """A prompt that is requested again and again stays in the cache, although other prompts fill the cache."""
    run = make(Limits(pages=15, page=2, rows=1, chunk=8, burst=2, context=12))
    often = (1, 1, 1, 1, 1)
    for seed in range(8):
        run.submit(Request(often, 1, seed=seed))
        run.submit(Request((0, *map(int, f"{seed:03b}"), 0, 1, 0), 1, seed=seed))
        run.finish()
    assert [run.ended[number].cached_tokens for number in range(0, 16, 2)] == [0] + [4] * 7


def a_reader_does_not_stop_texts(make: SchedulerMaker) -> None:
    """While a long prompt is prefilled, other requests decode one step per chunk, so that the next chunk comes soon."""
    run = make(Limits(pages=64, page=2, rows=2, chunk=2, burst=2, context=40))
    run.submit(long_answer((1,), 16))
    run.submit(Request((0,) * 38, 1))
    serve(run, 2)
    assert len(run.texts[0]) <= 2
    serve(run, 16)
    assert 0 in run.ended and 1 not in run.ended

    # Prompts keep coming, so there is always one to prefill; still, each plan has a token for both answers.
    run = make(Limits(pages=99, page=2, rows=4, chunk=2, burst=4, context=40, waiting=8))
    for beginning in (0, 1):
        run.submit(long_answer((beginning,), 30))
    for plan in range(30):
        run.submit(Request((*map(int, f"{plan:06b}"), *(1,) * 32), 1))
        run.plan()
        assert run.under_way and run.under_way.chunk
        run.done()
        assert [len(run.texts[text]) for text in (0, 1)] == [plan + 1] * 2
    assert {0, 1, 2} <= {*run.ended}


def a_worse_priority_gives_way(make: SchedulerMaker) -> None:
    """A new request immediately preempts one running request with a worse priority, and no other request."""
    run = make(Limits(pages=64, page=2, rows=2, chunk=8, burst=1, context=30))
    for priority in (0, 1):
        run.submit(long_answer((1,), 16, priority=priority))
    serve(run, 3)
    run.submit(Request((0, 0), 1, priority=BEST))
    serve(run, 2)
    assert [*run.ended] == [2] and run.scheduler.preemptions == 1 and 0 in run.scheduler.running
    run.submit(Request((0, 1), 1, priority=0))
    run.submit(Request((0, 1), 1, priority=1))
    run.finish()
    assert run.scheduler.preemptions <= 2

    # A preempted request feeds its tokens again in whole bursts, even if few tokens are left to draw.
    run = make(Limits(pages=64, page=2, rows=1, chunk=8, burst=4, context=30))
    run.submit(long_answer((1,), 8, priority=1))
    for _ in range(7):
        run.plan(burst=1)
        run.done()
    run.submit(Request((0,), 1, priority=BEST))
    run.plan()
    run.done()
    run.finish()
    assert run.scheduler.preemptions == 1 and run.scheduler.plans == 7 + 1 + 2


def memory_is_flat(make: SchedulerMaker, requests: int = 300) -> None:
    """A scheduler holds as much memory after many requests as after a few."""
    run = make(Limits(pages=16, page=2, rows=3, chunk=4, burst=2, context=16, waiting=4))
    for number in range(requests):
        run.submit(Request((number % 2, number % 3 % 2, number % 5 % 2, 1, number % 7 % 2), 3, seed=number))
        if number % 3 == 0:
            run.finish()
    run.finish()
    scheduler, pool = run.scheduler, run.scheduler.pool
    assert not (scheduler.waiting or scheduler.running or scheduler._ended or pool.holders)
    assert len(pool.nodes) == len(pool.tree) == len(pool.idle) <= 15 and pool.available == 15


LAWS: tuple[Callable[[SchedulerMaker], None], ...] = (
    nobody_waits_for_ever,
    nobody_overtakes_an_equal,
    nothing_is_computed_twice,
    texts_survive_giving_way,
    a_pool_refuses_what_cannot_be,
    a_prompt_that_was_read_is_found,
    the_page_used_longest_ago_goes_first,
    a_reader_does_not_stop_texts,
    a_worse_priority_gives_way,
    memory_is_flat,
)
