"""Make Hypothesis depend on the seed only."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

PROVIDERS = "hypothesis.internal.conjecture.providers"


@contextmanager
def by_the_seed_alone() -> Iterator[None]:
    """Make draws depend only on the seed and the version of Hypothesis.

    Since version 6.131, a few percent of the values that Hypothesis draws are constants from the source of the
    program's own modules. So the same seed draws different values in a test and on the command line, or after one more
    import, or after a constant in a candidate changes. After the first different value, all later draws differ, too. No
    setting turns this off, so we replace Hypothesis's list of constants by an empty list, and its cache by a new one.
    Not thread-safe.
    """
    try:
        providers: Any = import_module(PROVIDERS)
    except ImportError:  # an older version, which has no such module
        providers = None
    if not hasattr(providers, "_get_local_constants"):  # without such draws
        yield
        return
    none = import_module("hypothesis.internal.constants_ast").Constants()
    remembered = type(providers.CONSTANTS_CACHE)(1024)  # the length that Hypothesis uses
    with mock.patch.multiple(providers, _get_local_constants=lambda: none, CONSTANTS_CACHE=remembered):
        yield
