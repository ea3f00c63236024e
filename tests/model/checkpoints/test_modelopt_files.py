"""Model Optimizer's layouts in Hugging Face folders are read as Model Optimizer reads them."""

import hashlib

import pytest

from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.model_optimizer import read_modelopt
from tests.model.checkpoints.stored_goldens import arrays_of, weights_read
from tests.support.goldens import read_golden
from tests.support.refusals import mentions

GOLDENS = read_golden("quantizers/modelopt_files")
SHAPE = tuple(GOLDENS["shape"])
CASES = GOLDENS["cases"]


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_model_optimizer(case):
    rule, arrays = read_modelopt(Fields(CASES[case]["config"], "config.json")), arrays_of(CASES[case]["tensors"])
    arrays.pop("input_scale", None)  # for activations
    arrays = {name: array.reshape(1) if array.shape == () else array for name, array in arrays.items()}
    weights = weights_read(rule, arrays, SHAPE, rows=32)
    assert hashlib.sha256(weights.astype("<f4").tobytes()).hexdigest() == CASES[case]["read"]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"quant_algo": "W4A16_AWQ", "group_size": 128}, 'quant_algo "W4A16_AWQ" scales activations'),
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "scales activations"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "groups of 16 got 32"),
        ({"quant_algo": "W4A8_NVFP4_FP8", "group_size": 16}, "groups of 32 got 16"),
        ({"quant_algo": ["FP8"]}, "not supported take a release FP8 or NVFP4"),
    ],
)
def test_other_settings_are_refused(settings, what):
    with pytest.raises(CheckpointError) as refusal:
        read_modelopt(Fields({"quant_method": "modelopt", **settings}, "config.json"))
    assert mentions(str(refusal.value), what)
