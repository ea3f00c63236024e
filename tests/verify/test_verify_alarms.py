"""Right kernels are accepted: no warning of the judge itself, no false alarm, no verdict without a cause."""

import warnings
from collections.abc import Callable

import numpy as np

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.judging.runner import Report, verify


def judged(op: str, candidate: Callable, *, dtype: str = "float32", seed: int = 1, **options) -> Report:
    """Verify `candidate` with the number of examples of the command line."""
    direct = Direct(candidate)
    return verify(CONTRACTS[op], direct, precision=precision(dtype), examples=200, seed=seed, shrink=False, **options)


def test_the_judge_does_not_warn_in_float16():
    """Doubling a vector may overflow float16, which is a warning of NumPy and no fault of the candidate."""

    def product(x, weight):
        return (x.astype(np.float32) @ weight.astype(np.float32).T).astype(x.dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert judged("gemm", product, dtype="float16").outcome == "within bounds"


def test_sums_in_an_order_that_differs_each_time_keep_laws_of_equal_bits():
    """A kernel with atomics returns other bits in half of its calls; its results are within bounds."""
    random = np.random.default_rng(0)

    def atomic(q, k_pages, v_pages, table, lengths):
        o = IMPLEMENTATIONS["attention_paged"].function(q, k_pages, v_pages, table, lengths)
        return o * np.float32(1 + 2**-22) if random.random() < 1 / 2 else o

    only = {"lengths": [(9, 3), (5,)], "kv_heads": [1], "group": [1], "head_dim": [8]}
    report = judged("attention_paged", atomic, only=only)
    assert report.outcome == "within bounds"
    assert report.differs
