"""ggml's IQ types: decoded blocks equal those of the package gguf, and models run from codes or from floats."""

import numpy as np
import pytest

from llamaspec.model.checkpoints.codes import exact_parts
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.reference.quantizers import ggml, ggml_grids
from llamaspec.reference.quantizers.ggml_lattices import SUPERBLOCK
from tests.goldens.quantizers.make_ggml_lattices import BYTES, blocks, checksum
from tests.support import families, gguf_files
from tests.support.gguf_files import CODES, Tensor
from tests.support.goldens import read_golden

GOLDENS = read_golden("quantizers/ggml_lattices")
POINTS = {"IQ2_XXS": (256, 8), "IQ2_XS": (512, 8), "IQ2_S": (1024, 8), "IQ3_XXS": (256, 4), "IQ3_S": (512, 4)}


def decoded(packed: np.ndarray, name: str) -> np.ndarray:
    return ggml.decode(packed, name)


def test_every_type_that_is_only_read_has_a_golden():
    assert GOLDENS["sha256"].keys() == BYTES.keys() == ggml.READABLE.keys() - ggml.TYPES.keys()


@pytest.mark.parametrize("name", BYTES)
def test_weights_are_those_of_gguf_to_the_bit(name):
    exact = decoded(blocks(name), name)
    rounded = exact.astype(np.float32)
    assert checksum(rounded) == GOLDENS["sha256"][name]
    np.testing.assert_array_equal(rounded.astype(np.float64), exact)  # nothing was rounded


@pytest.mark.parametrize("name", POINTS)
def test_a_grid_has_as_many_points_as_codes(name):
    count, weights = POINTS[name]
    levels = tuple(range(3 if weights == 8 else 8))
    points = ggml_grids.grid(getattr(ggml_grids, name), levels=levels, weights=weights)
    assert points.shape == (count, weights)
    assert len(np.unique(points, axis=0)) == count


def test_an_unknown_type_and_a_type_that_is_not_written():
    with pytest.raises(ValueError, match="no ggml type IQ9"):
        ggml.decode(np.zeros((1, 32), np.uint8), "IQ9")
    with pytest.raises(ValueError, match="no ggml type IQ4_XS"):
        ggml.encode(np.zeros((1, 256)), "IQ4_XS")


@pytest.mark.parametrize("name", BYTES)
def test_a_model_runs_from_its_codes(tmp_path, name):
    """The codes of a GGUF model's tensors, permuted matrices included, decode to the weights that `read` returns."""
    config = {**families.FAMILIES["llama-2"], "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    file = gguf_files.file_of(config, families.random_tensors(config))
    packed = finite_blocks(name, 256)
    for part in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight"):
        file.tensors[part] = Tensor((256, 256), packed.tobytes(), CODES[name])
    tensors = open_checkpoint(file.write(tmp_path / "x.gguf")).tensors
    expected = decoded(packed, name)
    up, q = (tensors[f"model.layers.0.{part}.weight"] for part in ("mlp.up_proj", "self_attn.q_proj"))
    assert up.codes
    np.testing.assert_array_equal(up.read(), expected)
    np.testing.assert_array_equal(np.concatenate(list(exact_parts(up))), expected)
    np.testing.assert_array_equal(gguf_files.interleaved(q.read(), 64), expected)
    np.testing.assert_array_equal(np.concatenate(list(exact_parts(q))), q.read())


def finite_blocks(name: str, count: int) -> np.ndarray:
    """Draw random blocks of a type, with a small float16 number as the scale d."""
    packed = blocks(name)[:count]
    if name == "IQ1_M":
        packed[:, 49::2] &= 0x0F  # bits 12 to 15 of four 16-bit words hold d
        packed[:, 53] |= 0x80
    else:
        packed[:, 1] = 0x28
    assert np.isfinite(decoded(packed, name)).all()
    assert packed.shape[1] == ggml.READABLE[name].bytes
    assert ggml.READABLE[name].weights == SUPERBLOCK
    return packed
