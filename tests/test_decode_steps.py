"""The steps that are compiled without a GPU are those of the model: each can be traced on any machine."""

import jax
import pytest

from benchmarks.decode_steps import CAPACITY, DTYPES, FEW_LAYERS, STEPS, decode_step
from model.jax_backend import longest_burst
from model.shapes import SHAPES


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_a_burst_of_the_model(name: str):
    model, dtype, *_ = name.split()
    step, config = decode_step(name, layers=FEW_LAYERS), SHAPES[model]
    drawn, taken, cache = jax.eval_shape(step.function, *step.arguments)
    assert (drawn.shape, taken.shape, step.layers) == ((longest_burst("gpu"), 1), (), FEW_LAYERS)
    assert step.cache == FEW_LAYERS * 2 * config.kv_heads * CAPACITY * config.head_dim * DTYPES[dtype].itemsize
    (donated,) = step.donated
    taken_over = step.arguments[donated]
    assert jax.tree.map(lambda a: (a.shape, a.dtype), cache) == jax.tree.map(lambda a: (a.shape, a.dtype), taken_over)
