"""Sequence, pipeline and expert parallelism give the results of one device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference import collectives, parallel
from llamaspec.reference.parallel import expert_parallel, pipeline, sequence_parallel
from llamaspec.reference.swiglu import swiglu


def check_sequence(devices: int, tokens: int, seed: int) -> None:
    """Check that sequence parallelism, with part of the tokens on each device, gives the whole feed-forward output."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(devices * tokens, 6))
    gate, up = rng.normal(size=(2, 4 * devices, 6))
    down = rng.normal(size=(6, 4 * devices))

    def part(device):
        own_rows = slice(4 * device, 4 * device + 4)
        return lambda x: swiglu(x @ gate[own_rows].T, x @ up[own_rows].T) @ down[:, own_rows].T

    expected = swiglu(x @ gate.T, x @ up.T) @ down.T
    parts = sequence_parallel(np.split(x, devices), [part(device) for device in range(devices)])
    assert np.allclose(np.concatenate(parts), expected, rtol=1e-12, atol=1e-12)


def check_pipeline(stages: int, count: int) -> None:
    """Check that a pipeline gives the same outputs as running its stages one after the other."""
    batches = [np.array([float(i)]) for i in range(count)]
    functions = [lambda x, s=s: 3 * x + s for s in range(stages)]
    outputs, ticks = pipeline(batches, functions)
    assert len(outputs) == count
    for x, y in zip(batches, outputs, strict=True):
        for function in functions:
            x = function(x)
        assert np.array_equal(x, y)
    assert ticks == count + stages - 1


def check_experts(devices: int) -> None:
    """Check that expert parallelism returns to each token the output of the expert that it chose."""
    rng = np.random.default_rng(devices)
    x = [rng.normal(size=(5, 4)) for _ in range(devices)]
    chosen = [rng.integers(0, devices, 5) for _ in range(devices)]
    matrices = rng.normal(size=(devices, 4, 4))
    answers = expert_parallel(x, chosen, [lambda rows, m=m: rows @ m for m in matrices])
    for tokens, experts, answer in zip(x, chosen, answers, strict=True):
        assert np.allclose(answer, [token @ matrices[e] for token, e in zip(tokens, experts, strict=True)], atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_feed_forward_layer_on_parts_of_the_tokens(devices, tokens, seed):
    check_sequence(devices, tokens, seed)


@given(st.integers(1, 5), st.integers(1, 5))
def test_a_pipeline_gives_all_micro_batches_in_order(stages, count):
    check_pipeline(stages, count)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_each_token_gets_the_output_of_its_chosen_expert(devices):
    check_experts(devices)


MISTAKES = {
    "sums that stay partial": (
        "reduce_scatter",
        lambda arrays: [np.split(a, len(arrays))[i] for i, a in enumerate(arrays)],
    ),
    "the parts of others": ("reduce_scatter", lambda arrays: collectives.reduce_scatter(arrays)[::-1]),
    "tokens of one device only": ("all_gather", lambda arrays: [np.concatenate([a] * len(arrays)) for a in arrays]),
    "answers that do not come back": ("all_to_all", lambda arrays: list(arrays)),
    "parts in the order of the devices after": ("all_to_all", lambda arrays: collectives.all_to_all(arrays)[::-1]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_exchange_is_found(mistake, monkeypatch):
    name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(parallel, name, wrong)
    with pytest.raises(AssertionError):
        check_experts(2) if name == "all_to_all" else check_sequence(2, 2, seed=0)


def test_a_pipeline_that_stops_a_tick_too_early_is_found(monkeypatch):
    monkeypatch.setattr(parallel, "range", lambda ticks: range(ticks - 1), raising=False)
    with pytest.raises(AssertionError):
        check_pipeline(3, 2)
