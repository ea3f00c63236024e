"""Parameter counts of the published shapes equal the counts that their publishers state."""

import math

import pytest

from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.tensors import tensor_shapes

# Hugging Face shows these counts for safetensors files; for llama2.c's models we added the layers up by hand.
PARAMETERS = {
    "stories-15m": 15_191_712,
    "stories-42m": 41_689_600,
    "stories-110m": 109_529_856,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name: str):
    assert sum(math.prod(shape) for shape in tensor_shapes(SHAPES[name]).values()) == PARAMETERS[name]
    assert SHAPES[name].heads % SHAPES[name].kv_heads == 0


def test_the_published_shapes_are_all_there():
    assert SHAPES.keys() == PARAMETERS.keys()
