"""A kernel that supports only some values of a draw is not tested by laws that would need other values."""

import re

import pytest

from llamaspec.verify.campaign import Campaign, CandidateJob, run
from llamaspec.verify.catalogue import CONTRACTS

CAUSAL = """
import numpy as np


def attention(q, k, v, mask, scale=1.0):
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k).astype(np.float32) * np.float32(scale / np.sqrt(q.shape[-1]))
    s = np.where(np.arange(keys)[None] <= np.arange(queries)[:, None] + keys - queries, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isinf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", e / np.where(total == 0, 1, total), v).astype(v.dtype)


def scaled(q, k, v, mask):
    return attention(q, k, v, mask, scale=1.01)


def rmsnorm(x, weight, *, eps):
    root = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-5)
    return (x * weight / root).astype(x.dtype)
"""


@pytest.fixture
def judged(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CAUSAL)

    def judged(op: str, function: str, **only):
        campaign = Campaign(seed=1, arrays="numpy", dtypes=("float32",), examples=60, seconds=300.0, timeout=60.0)
        [(report, lines)] = run(
            [CandidateJob(op, f"{file}:{function}", only=only)], campaign, progress=lambda _, total=None: lambda _: None
        )
        return report, "\n".join(lines)

    return judged


@pytest.mark.slow
def test_a_causal_kernel_is_right_only_for_causal_masks(judged):
    report, output = judged("attention", "attention", mask=["causal"])
    assert report.outcome == "within bounds", output
    assert re.search("skipped laws, .*: the order of the keys .*; a query ", output)
    assert judged("attention", "attention")[0].outcome == "violated"
    assert judged("attention", "scaled", mask=["causal"])[0].outcome == "violated"


def test_an_epsilon_that_is_built_in_is_right_where_it_is_meant(judged):
    report, output = judged("rmsnorm", "rmsnorm", eps=[1e-5])
    assert report.outcome == "within bounds" and re.search("skipped laws, ", output), output
    assert judged("rmsnorm", "rmsnorm")[0].outcome == "violated"


def test_laws_set_draws_that_there_are():
    fixed_draws = {
        (op, name) for op, contract_of_op in CONTRACTS.items() for law in contract_of_op.laws for name in law.sets
    }
    assert {("attention", "mask"), ("rmsnorm", "eps")} <= fixed_draws
    assert all(name in CONTRACTS[op].draws for op, name in fixed_draws)
