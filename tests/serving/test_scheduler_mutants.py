"""Every mutant of the scheduler breaks one of the scheduler's laws."""

import signal
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from llamaspec.serving.pages import PagePool
from llamaspec.serving.scheduler import Scheduler
from llamaspec.verify.mutant import Implementation, Mutant
from tests.serving.scheduler_laws import LAWS
from tests.serving.scheduler_machine import SchedulerMachine, watched
from tests.serving.scheduler_mutants import PAGES, SCHEDULER

MUTANTS = [(table, mutant) for table in (PAGES, SCHEDULER) for mutant in table.mutants]
QUICK = settings(
    max_examples=300, stateful_step_count=40, derandomize=True, deadline=None, database=None, phases=[Phase.generate]
)
SECONDS = 600  # a mutant that no law has found by then counts as one that waits forever


class TooLong(BaseException):
    """Raised if checking a mutant takes too long. The test then fails; a timeout does not count as detection."""


@contextmanager
def limit(seconds: int):
    def stop(*_):
        raise TooLong(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(scheduler: type[Scheduler], pool: type[PagePool]) -> None:
    """Check all laws on a scheduler. A mutant is detected if this raises any exception."""
    for law in LAWS:
        law(lambda limits: watched(limits, scheduler, pool))
    machine = type("MutantMachine", (SchedulerMachine,), {"scheduler": scheduler, "pool": pool})
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.sampled(8)  # 70 cases, 3 minutes
@pytest.mark.parametrize(("right", "mutant"), MUTANTS, ids=lambda value: getattr(value, "name", ""))
def test_every_mutant_is_found_out(right: Implementation, mutant: Mutant):
    wrong: Any = right.mutated(mutant)
    scheduler, pool = (wrong, PagePool) if right is SCHEDULER else (Scheduler, wrong)
    with pytest.raises(Exception), limit(SECONDS):  # noqa: B017
        check(scheduler, pool)


@pytest.mark.slow  # 10 s: 12,000 steps
def test_the_right_one_passes():
    with limit(SECONDS):
        check(Scheduler, PagePool)


def test_there_are_enough_mutants():
    assert len({mutant.name for _, mutant in MUTANTS}) == len(MUTANTS) >= 30
