"""Fixtures of tests that compare our tokenizers with other libraries."""

from collections.abc import Iterator

import pytest

from tests.model.tokenizers.other_tokenizers import OtherTokenizers, other_tokenizers
from tests.verify.other_pythons import python_with


def libraries(*names: str) -> Iterator[OtherTokenizers]:
    """Run the tokenizers of libraries in a separate process; skip the test if no Python has all of them."""
    python = python_with(*names)
    if not python:
        pytest.skip(f"needs a Python with {' and '.join(names)}: set LLAMASPEC_OTHER_PYTHON")
    with other_tokenizers(python) as process:
        yield process


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[OtherTokenizers]:
    yield from libraries("llama_cpp")


@pytest.fixture(scope="module")
def transformers() -> Iterator[OtherTokenizers]:
    yield from libraries("transformers", "sentencepiece")
