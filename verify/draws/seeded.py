"""Hypothesis without what it takes from outside a seed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

PROVIDERS = "hypothesis.internal.conjecture.providers"


@contextmanager
def by_the_seed_alone() -> Iterator[None]:
    """Let a seed and the version of Hypothesis decide alone what is drawn.

    From 6.131 on, a few draws in a hundred are of numbers that stand in the source of modules that are imported and
    are not installed. The same seed then draws otherwise in a test than on the command line, after another import, or
    once a number of a candidate was changed; and a number that is found moves all draws after it. No setting turns
    that off, so the list of them is empty meanwhile, and what is remembered of it set aside. Not for several threads.
    """
    try:
        providers: Any = import_module(PROVIDERS)
    except ImportError:  # an older version, which has no such module
        providers = None
    if not hasattr(providers, "_get_local_constants"):  # without such draws
        yield
        return
    none = import_module("hypothesis.internal.constants_ast").Constants()
    remembered = type(providers.CONSTANTS_CACHE)(1024)  # of that length, as Hypothesis has it
    with mock.patch.multiple(providers, _get_local_constants=lambda: none, CONSTANTS_CACHE=remembered):
        yield
