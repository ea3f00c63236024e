"""The judge accepts right kernels: no false alarm, no verdict without a reason, and no warning from the judge."""

import itertools
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct, NoVerdict
from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.draws.draw import Values
from llamaspec.verify.draws.drawing import uniform
from llamaspec.verify.judging.examination import takes
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.report import as_json, counterexample
from tests.verify.direct_calls import judged


def test_the_judge_does_not_warn_in_float16():
    """The judge prints no NumPy warning if it doubles a float16 vector and the result overflows."""

    def product(x, weight):
        return (x.astype(np.float32) @ weight.astype(np.float32).T).astype(x.dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert judged("gemm", product, dtype="float16").outcome == "within bounds"


def test_sums_in_an_order_that_differs_each_time_keep_laws_of_equal_bits():
    """A kernel with atomics, which returns different bits in about half of its calls, is within bounds."""
    random = np.random.default_rng(0)

    def atomic(q, k_pages, v_pages, table, lengths):
        o = IMPLEMENTATIONS["attention_paged"].function(q, k_pages, v_pages, table, lengths)
        return o * np.float32(1 + 2**-22) if random.random() < 1 / 2 else o

    only = {"lengths": [(9, 3), (5,)], "kv_heads": [1], "group": [1], "head_dim": [8]}
    report = judged("attention_paged", atomic, only=only)
    assert report.outcome == "within bounds"
    assert report.differs


def running_sum(terms, axis) -> Any:
    return np.cumsum(terms, axis, dtype=np.float32).take(-1, axis)


def softmax(x):
    scores = x.astype(np.float32)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), np.float32(0), top))
    total = running_sum(weights, -1)[..., None]
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0).astype(x.dtype)


def logsumexp(x):
    scores = x.astype(np.float32)
    top = scores.max(-1, keepdims=True)
    shift = np.where(np.isinf(top), np.float32(0), top)
    return shift[..., 0] + np.log(running_sum(np.exp(scores - shift), -1))


def attention_paged(q, k_pages, v_pages, table, lengths):
    k, v = (pages[table].reshape(len(table), -1, *pages.shape[2:]) for pages in (k_pages, v_pages))
    out, group = np.zeros(q.shape, np.float32), q.shape[1] // k.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if length:
            keys, values = (np.repeat(cache[row, :length].astype(np.float32), group, 1) for cache in (k, v))
            scores = np.einsum("hd,jhd->jh", q[row].astype(np.float32), keys) / np.float32(np.sqrt(q.shape[-1]))
            weights = np.exp(scores - scores.max(0))
            out[row] = running_sum(weights[..., None] * values, 0) / running_sum(weights, 0)[:, None]
    return out.astype(q.dtype)


FAR = {
    "softmax": {},
    "logsumexp": {},
    "attention_paged": {
        "lengths": [(30_000,)], "v": [Values("equal", 82, 5)], "k": [Values("zeros", 1)],
        "kv_heads": [1], "group": [1], "head_dim": [8],
    },
}  # fmt: skip


@pytest.mark.parametrize("candidate", [softmax, logsumexp, attention_paged])
def test_a_running_sum_is_explained_and_not_suspicious(candidate: Callable):
    op = candidate.__name__
    report = judged(op, candidate, examples=20 if FAR[op] else 200, only=FAR[op])
    assert report.outcome == "within bounds"
    lines = counterexample(report, CONTRACTS[op])
    assert any(re.search(r"the alarm, which a running sum of [\d,]+ terms explains", line) for line in lines)


def test_json_has_no_infinity():
    report = judged("softmax", lambda x: np.full_like(x, np.nan), examples=3)
    json.dumps(as_json([report]), allow_nan=False)


def test_out_of_memory_is_not_judged():
    def greedy(x):
        if x.shape[1] > 1000:
            raise MemoryError("too large")
        return IMPLEMENTATIONS["softmax"].function(x)

    report = judged("softmax", greedy)
    assert report.outcome == "within bounds"
    (line,) = [line for line in counterexample(report, CONTRACTS["softmax"]) if "not judged" in line]
    assert re.search(r"\d+ draws, because the candidate ran out of memory", line)
    with pytest.raises(NoVerdict, match="ran out of memory"):
        judged("softmax", greedy, examples=3, only={"n": [1025], "rows": [1]})


def test_a_machine_with_too_little_memory_for_an_exact_result():
    """A draw is not judged if its exact result needs too much memory; the other draws still give a verdict."""
    contract = CONTRACTS["softmax"]

    def expect(x: np.ndarray) -> Any:
        if x.size > 100_000:
            raise MemoryError("too large")
        return contract.expect(x)

    candidate = Direct(IMPLEMENTATIONS["softmax"].function)
    few = {"examples": 20, "seed": 1, "only": {"rows": [1, 2], "n": [17, 66_561]}}
    report = verify(replace(contract, expect=expect), candidate, precision=precision("float32"), **few)
    assert report.outcome == "within bounds" and report.examples < 20
    assert list(report.not_judged) == ["this machine has too little memory for the exact result"]


def test_an_empty_draw_that_is_not_judged_keeps_the_verdict():
    """If the last draw, which has no rows, cannot be judged, the other draws still give a verdict."""

    def greedy(x):
        if not x.size:
            raise MemoryError("too small")
        return IMPLEMENTATIONS["softmax"].function(x)

    report = judged("softmax", greedy, examples=20)
    assert report.outcome == "within bounds"
    assert report.not_judged == {"the candidate ran out of memory": 1}


def test_a_keyword_that_an_older_candidate_does_not_take_leaves_draws_out():
    def without_window(q, k, v, lengths):
        return IMPLEMENTATIONS["attention_decode"].function(q, k, v, lengths, window=None)

    report = judged("attention_decode", without_window, examples=40, only={"lengths": [(5,)], "head_dim": [8]})
    assert report.outcome == "within bounds"
    assert sum(report.not_judged.values()) > 0
    assert any("does not take window" in line for line in counterexample(report, CONTRACTS["attention_decode"]))


def test_a_reused_buffer_is_a_finding_without_an_optional_keyword():
    """A reused buffer is found even if the candidate lacks an optional keyword.

    A call that fails because of the keyword would make the worker forget the earlier result.
    """
    buffers = {}

    def one_buffer(q, k, v, lengths):
        o = IMPLEMENTATIONS["attention_decode"].function(q, k, v, lengths, window=None)
        buffer = buffers.setdefault((o.shape, o.dtype), np.zeros_like(o))
        buffer[...] = o
        return buffer

    report = judged("attention_decode", one_buffer, examples=40, only={"lengths": [(5,)], "head_dim": [8]})
    assert report.worst.finding is not None and report.worst.finding.kind == "reused"


def test_only_one_call_fails_because_of_an_optional_keyword():
    """If a candidate lacks the keyword `window`, the value None makes only one call fail; later calls omit the keyword.

    Draws with a different value of `window` are not judged.
    """
    passed = []

    def without_window(q, k, v, lengths, **named):
        passed.append(named)
        if "window" in named:
            raise TypeError("decode() got an unexpected keyword argument 'window'")
        return IMPLEMENTATIONS["attention_decode"].function(q, k, v, lengths, window=None)

    report = judged("attention_decode", without_window, examples=40, only={"lengths": [(5,)], "head_dim": [8]})
    assert report.outcome == "within bounds"
    assert passed.count({"window": None}) == 1
    assert sum("window" in named for named in passed) == 1 + sum(report.not_judged.values()) > 1


def test_a_dtype_is_taken_without_an_optional_keyword():
    def without_window(q, k, v, lengths):
        return IMPLEMENTATIONS["attention_decode"].function(q, k, v, lengths, window=None)

    contract = CONTRACTS["attention_decode"]
    draws = uniform(contract, None, {"lengths": [(5,)], "window": [None]}, seed=0)
    assert takes(contract, Direct(without_window), precision("bfloat16"), itertools.islice(draws, 2))


def test_a_keyword_that_an_op_needs_is_not_left_out():
    report = judged("rmsnorm", lambda x, weight: x, examples=3)
    assert report.outcome == "violated"
