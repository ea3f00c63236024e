"""GGUF files of Llama models: we read the tensors and configs that an independent writer wrote."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.codes import dequantized, exact_parts
from llamaspec.model.checkpoints.gguf.rope import from_factors, to_factors
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.rope import LinearScaling, Llama3Scaling, frequencies
from tests.support import families, gguf_files
from tests.support.families import is_matrix
from tests.support.gguf_files import CODES, F32, STRING, U32, Tensor
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.refusals import load, mentions

READABLE = [
    name for name, config in families.FAMILIES.items() if name not in ("qwen2-window", "mistral", "qwen3-moe-window")
]


FACTOR_ROUNDINGS = 32 * 32 * 2.0**-24  # see `gguf.rope.ROUNDINGS`; no factor here is above 32


def turns(config: Config) -> np.ndarray:
    return frequencies(config.head_dim, theta=config.theta, scaling=config.scaling)


def written(path: Path, family: str, *, type: str = "F32", seed: int = 0) -> dict[str, np.ndarray]:
    """Write a model as a GGUF file, and return its tensors under the names that we use."""
    config = families.FAMILIES[family]
    tensors = families.random_tensors(config, seed=seed)
    gguf_files.file_of(config, tensors, type=type).write(path)
    return families.by_our_names(tensors)


@pytest.mark.parametrize("family", READABLE)
@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
def test_floats_are_read_as_they_are_stored(tmp_path, family, type):
    tensors = written(tmp_path / "x.gguf", family, type=type)
    families.write_checkpoint(tmp_path, families.FAMILIES[family])
    checkpoint, beside = load(tmp_path / "x.gguf"), open_checkpoint(tmp_path)
    assert replace(checkpoint.config, scaling=None) == replace(beside.config, scaling=None)
    np.testing.assert_allclose(turns(checkpoint.config), turns(beside.config), rtol=FACTOR_ROUNDINGS, atol=0)
    assert checkpoint.format == "gguf-v3"
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        dtype = gguf_files.DTYPES[type if tensors[name].ndim > 1 else "F32"]
        assert tensor.read().dtype == dtype
        np.testing.assert_array_equal(tensor.read(), tensors[name].astype(dtype), err_msg=name)


@pytest.mark.parametrize("type", sorted(ggml.TYPES))
def test_quantized_weights_are_read_as_ggml_reads_them(tmp_path, type):
    """We read ggml's blocks as ggml does, even in matrices with rows that llama.cpp permutes."""
    config = {**families.FAMILIES["llama-2"], "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    kind, random = ggml.TYPES[type], np.random.default_rng(0)
    file = gguf_files.file_of(config, families.random_tensors(config))
    packed = {}
    for name, tensor in file.tensors.items():
        if name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight", "output.weight"):
            drawn = random.normal(size=tensor.shape).astype(np.float32)
            packed[name] = ggml.encode(drawn, type)
            file.tensors[name] = Tensor(tensor.shape, packed[name].tobytes(), CODES[type])
    tensors = load(file.write(tmp_path / "x.gguf")).tensors
    for own_name, gguf_name in (("model.layers.0.mlp.up_proj", "blk.0.ffn_up"), ("lm_head", "output")):
        expected = ggml.decode(packed[f"{gguf_name}.weight"], type).astype(np.float32)
        np.testing.assert_array_equal(tensors[f"{own_name}.weight"].read(), expected)
    back = gguf_files.interleaved(tensors["model.layers.0.self_attn.q_proj.weight"].read(), 64)
    np.testing.assert_array_equal(back, ggml.decode(packed["blk.0.attn_q.weight"], type).astype(np.float32))
    assert kind.bytes == packed["output.weight"].shape[1] // (256 // kind.weights)


@pytest.mark.parametrize("at_once", [1500, 1 << 20])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "MXFP4"])
def test_codes_stand_for_the_weights(tmp_path, monkeypatch, type, at_once):
    """Codes of a GGUF tensor decode to its weights, even if its rows are read in parts and reordered for RoPE."""
    monkeypatch.setattr("llamaspec.model.checkpoints.gguf.blocks.AT_ONCE", at_once)
    checkpoint = random_checkpoint(replace(SMALL, dim=64, heads=4, kv_heads=2, head_dim=16, ffn=96), seed=0)
    write_gguf(checkpoint, tmp_path / "x.gguf", to=type.lower())
    quantized = 0
    for name, tensor in open_checkpoint(tmp_path / "x.gguf").tensors.items():
        if tensor.codes is None:
            assert not is_matrix(name)
            continue
        weights = tensor.read()
        np.testing.assert_array_equal(np.concatenate(list(exact_parts(tensor))).astype(np.float32), weights)
        np.testing.assert_array_equal(dequantized(tensor.codes, tensor.shape), weights)
        quantized += 1
    assert quantized == 7 * SMALL.layers + 2


def test_a_tensor_of_many_rows_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("llamaspec.model.checkpoints.gguf.blocks.AT_ONCE", 10_000)
    test_quantized_weights_are_read_as_ggml_reads_them(tmp_path, "Q4_0")


def test_version_2_is_read(tmp_path):
    config = families.FAMILIES["llama-2"]
    file = gguf_files.file_of(config, families.random_tensors(config))
    file.version = 2
    assert load(file.write(tmp_path / "x.gguf")).format == "gguf-v2"


@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_any_alignment_is_read(tmp_path, alignment):
    config = families.FAMILIES["qwen3"]
    tensors = families.random_tensors(config)
    file = gguf_files.file_of(config, tensors)
    file.alignment = alignment
    file.keys["general.alignment"] = (U32, alignment)
    for name, tensor in load(file.write(tmp_path / "x.gguf")).tensors.items():
        np.testing.assert_array_equal(tensor.read(), tensors[name])


scalings = st.builds(
    Llama3Scaling,
    factor=st.floats(1.5, 64),
    low_frequency=st.floats(0.5, 2),
    high_frequency=st.floats(2.5, 8),
    original_context=st.integers(16, 100_000),
)


@given(scaling=scalings, head_dim=st.sampled_from([4, 6, 64, 128]), theta=st.floats(1e3, 1e6))
def test_rope_factors_go_there_and_back(scaling, head_dim, theta):
    """RoPE scaling survives a round trip: we write it to GGUF as one factor per pair, and recover it from the factors.

    If no RoPE pair rotates slowly enough to be scaled by the full factor, the factors are refused.
    """
    factors = to_factors(scaling, head_dim=head_dim, theta=theta)
    exact = frequencies(head_dim, theta=theta, scaling=scaling)
    slowest = frequencies(head_dim, theta=theta)[-1] * scaling.original_context / (2 * np.pi)
    try:
        recovered = from_factors(factors, head_dim=head_dim, theta=theta, path="x.gguf")
    except CheckpointError:
        assert slowest > scaling.low_frequency
        return
    again = frequencies(head_dim, theta=theta, scaling=recovered)
    np.testing.assert_allclose(again, exact, rtol=64 * 32 * 2.0**-24, atol=0)


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_the_published_llamas_are_recognized(factor, head_dim):
    """The scaling of Llama 3.1 8B and 3.2 1B is recovered from the factors that llama.cpp's converter writes."""
    stated = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**stated, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    factors = gguf_files.rope_factors({"rope_parameters": rope, "head_dim": head_dim})
    assert factors is not None
    scaling = from_factors(factors, head_dim=head_dim, theta=500_000.0, path="x.gguf")
    assert scaling == Llama3Scaling(factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("type", "key", "expected"),
    [
        (None, "rope.scaling.factor", LinearScaling(4.0)),
        (None, "rope.scale_linear", LinearScaling(4.0)),
        ("linear", "rope.scaling.factor", LinearScaling(4.0)),
        ("none", "rope.scaling.factor", None),
    ],
)
def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path, type, key, expected):
    config = families.FAMILIES["llama-2"]
    file = gguf_files.file_of(config, families.random_tensors(config))
    file.keys[f"llama.{key}"] = (F32, 4.0)
    if type:
        file.keys["llama.rope.scaling.type"] = (STRING, type)
    assert load(file.write(tmp_path / "x.gguf")).config.scaling == expected


def test_equal_factors_are_a_linear_rescaling():
    def read(*factors):
        return from_factors(np.array(factors, np.float32), head_dim=2 * len(factors), theta=1e4, path="x.gguf")

    assert read(1, 1) is None
    assert read(4, 4) == LinearScaling(4.0)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        *((factors, "Llama 3") for factors in ([4, 1], [1, 4, 1], [1, 3, 2], [1, 0.5])),
        *(([1, factor], "factor positive") for factor in (0, -1, np.nan, np.inf)),
        ([1], "1 2 head_dim 4"),
    ],
)
def test_factors_that_no_rescaling_has(factors, words):
    head_dim = max(4, 2 * len(factors))
    with pytest.raises(CheckpointError, match=r"^x\.gguf: .*rope_freqs\.weight") as caught:
        from_factors(np.array(factors, np.float32), head_dim=head_dim, theta=1e4, path="x.gguf")
    assert mentions(str(caught.value), words)


def test_a_signaling_nan_is_refused_without_a_warning():
    factors = np.full(32, 0x7F800001, np.uint32).view(np.float32)
    with pytest.raises(CheckpointError, match=r"^x\.gguf: .*rope_freqs\.weight.*positive"):
        from_factors(factors, head_dim=64, theta=1e4, path="x.gguf")
