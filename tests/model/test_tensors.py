"""The table of weights: Hugging Face's names and shapes, roles, and rows that divide into equal parts for devices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.huggingface.config import read_config
from llamaspec.model.family import families
from llamaspec.model.tensors import (
    NAMES,
    QUANTIZABLE,
    Role,
    by_layer,
    quantizable,
    row_order,
    stacks,
    tensor_shapes,
    weights,
)
from llamaspec.reference.config import Config
from tests.support.families import FAMILIES, is_matrix
from tests.support.families import tensor_shapes as hub_shapes
from tests.support.random_models import CONFIGS

SIZES = {"dim": 6, "layers": 1, "vocab": 9, "context": 9, "eps": 1e-5, "theta": 1e4}


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_the_hub(name):
    config = read_config(FAMILIES[name], "config.json")
    names = families()[FAMILIES[name]["model_type"]].names
    assert {weight.named(names): weight.shape for weight in weights(config)} == hub_shapes(FAMILIES[name])
    assert {weight.name: weight.shape for weight in weights(config)} == tensor_shapes(config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_roles_are_told_from_names_elsewhere(config):
    for weight in weights(config):
        assert (weight.role in QUANTIZABLE) == is_matrix(weight.name) == (weight.name in quantizable(config))
        assert (weight.role is Role.BIAS) == weight.name.endswith(".bias")
        assert (weight.role is Role.NORM) == ("norm" in weight.name)
        assert len(weight.axes) == len(weight.shape)
        assert weight.named(NAMES) == weight.name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_weight_is_in_one_stack_and_one_layer(config):
    every = list(weights(config))
    assert sorted(w.name for s in stacks(config) for w in (*s.weights, *s.biases)) == sorted(w.name for w in every)
    grouped = [weight for parts in by_layer(config).values() for part in parts.values() for weight in part]
    assert set(grouped) == {weight for weight in every if weight.role is not Role.BIAS}


@given(
    n=st.integers(1, 4),
    kv=st.integers(1, 3),
    shared=st.integers(1, 3),
    pairs=st.integers(1, 3),
    width=st.integers(1, 4),
    experts=st.sampled_from([0, 2]),
)
def test_an_even_cut_gives_each_device_whole_heads(n, kv, shared, pairs, width, experts):
    """An equal cut gives device i the part [q_i; k_i; v_i] or [gate_i; up_i]; x_i is the i-th of n equal parts of x."""
    heads, kv_heads, head_dim, ffn = n * kv * shared, n * kv, 2 * pairs, n * width
    chosen = {"experts": experts, "experts_per_token": min(1, experts)}
    config = Config(**SIZES, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, **chosen)  # pyright: ignore
    order = row_order(config, n)
    stacked = {
        "qkv": [[("q", row) for row in range(heads * head_dim)]]
        + [[(part, row) for row in range(kv_heads * head_dim)] for part in "kv"],
        "gate_up": [[(part, row) for row in range(ffn)] for part in ("gate", "up")],
    }
    assert order.keys() == stacked.keys()
    for field, matrices in stacked.items():
        rows = [row for matrix in matrices for row in matrix]
        cut = np.split(np.array([rows[i] for i in order[field]], dtype=object), n)
        for device, part in enumerate(cut):
            share = [matrix[device * len(matrix) // n : (device + 1) * len(matrix) // n] for matrix in matrices]
            assert [tuple(row) for row in part] == [row for row_range in share for row in row_range]
        if n == 1:
            assert order[field].tolist() == list(range(len(rows)))


@pytest.mark.parametrize(
    ("n", "what"),
    [(3, "4 heads"), (4, "2 kv heads"), (0, "4 heads"), (-1, "4 heads")],
)
def test_what_cannot_be_cut_evenly_is_refused(n, what):
    config = Config(**SIZES, heads=4, kv_heads=2, head_dim=2, ffn=8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=f"{what} cannot be cut into {n} equal parts"):
        row_order(config, n)
