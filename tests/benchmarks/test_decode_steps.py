"""The decode steps that the GPU gates compile without a GPU: JAX can trace each of them. They have a burst's shapes."""

import jax
import pytest

from llamaspec.benchmarks.gates.decode_steps import CAPACITY, DTYPES, FEW_LAYERS, STEPS, decode_step
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.running.programs import longest_burst


@pytest.mark.sampled(5)  # 18 cases, 9 s
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_a_burst_of_the_model(name: str):
    model, dtype, *_ = name.split()
    step, config = decode_step(name, layers=FEW_LAYERS), SHAPES[model]
    drawn, count, text, cache = jax.eval_shape(step.function, *step.arguments)
    assert (drawn.shape, count.shape, step.layers) == ((longest_burst("gpu"), 1), (), FEW_LAYERS)
    assert step.cache == FEW_LAYERS * 2 * config.kv_heads * CAPACITY * config.head_dim * DTYPES[dtype].itemsize
    (donated,) = step.donated
    for result, argument in ((text, step.arguments[1]), (cache, step.arguments[donated])):  # what the next step gets
        assert jax.tree.map(kind, result) == jax.tree.map(kind, argument)


def kind(array: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], str]:
    return array.shape, array.dtype.name
