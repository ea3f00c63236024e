"""The scheduler and its pages obey their laws; the test's executor knows what every page must hold."""

import pytest
from hypothesis import Phase, settings

from llamaspec.serving.request import Request
from llamaspec.serving.scheduler import Limits
from tests.serving.scheduler_laws import LAWS, memory_is_flat
from tests.serving.scheduler_machine import SchedulerMachine, watched
from tests.support.strategies import share_of

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=share_of(60, thorough=250), stateful_step_count=40, phases=[Phase.generate, Phase.shrink]
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law):
    law(watched)


@pytest.mark.slow  # 20 s
def test_memory_is_flat_after_10_000_requests():
    memory_is_flat(watched, requests=10_000)


def test_a_cache_that_cannot_hold_a_context_is_refused():
    with pytest.raises(ValueError, match=r"\b4 pages of 2 tokens"):
        Limits(pages=4, page=2, rows=1, chunk=1, burst=1, context=6)


def test_a_request_out_of_range_is_refused():
    for wrong in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"seed": -1},
        {"logprobs": 21},
        {"deadline": 0.0},
        {"prompt": ()},
    ):
        with pytest.raises(ValueError):
            Request(**{"prompt": (1,), "max_tokens": 1, **wrong})
