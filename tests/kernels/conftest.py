"""Set-up for the tests of kernels. KERNEL_CARD names the card for which kernels are built, by default an H200."""

import os
from collections.abc import Iterator

import pytest

from llamaspec.pallas_kernels.parts.card import CARDS
from llamaspec.pallas_kernels.parts.compat import Target, use_target


@pytest.fixture(scope="module", autouse=True)
def card() -> Iterator[None]:
    with use_target(Target(card=CARDS[os.environ.get("KERNEL_CARD", "h200")])):
        yield
