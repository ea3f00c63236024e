"""GGUF weights stay quantized in device memory, with exactly the file's values; no whole matrix becomes float32."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llamaspec.reference.llama
from llamaspec.model.cache import empty_cache
from llamaspec.model.checkpoints import Checkpoint, CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.codes import exact_parts, in_common_form
from llamaspec.model.checkpoints.gguf.blocks import FORMS
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from llamaspec.model.device import HOPPER, Device
from llamaspec.model.forward import forward
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.gpu import PROMPT, pallas_ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.memory import memory_of
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tensors import EMBEDDING
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.embedding import Embedding
from llamaspec.model.weights.forms.integers import Int4MinWords, Int6Words, Int8Min
from llamaspec.model.weights.gpu_codes import Stacked, arranged
from llamaspec.model.weights.loading import abstract_params, check_weights, load_params
from llamaspec.model.weights.params import FeedForward, weight_bytes
from llamaspec.reference.quantizers import ggml
from tests.support import families, gguf_files
from tests.support.families import is_matrix
from tests.support.gguf_files import CODES, NAMES, Tensor
from tests.support.strategies import seeds

FLOAT32 = np.dtype(np.float32)
FORWARD = jax.jit(forward, static_argnames=("config", "ops"))
CONFIG = {**families.FAMILIES["llama-2"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
FLOATS = {  # the bytes of a block that hold float16 numbers
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [],
}  # fmt: skip
# Zeros, subnormal numbers, the largest numbers, and numbers between.
SPECIAL = np.array([0, -0.0, 2**-24, -(2**-24), 1023 * 2**-24, 65504, -65504, 1, 2**-14, 1 / 3], np.float16)
BITS = {  # bits per weight on the device: 4 or 8 for the code; a scale or minimum adds 32 per group
    "Q8_0": 9, "Q5_0": 9, "Q5_1": 10, "Q4_0": 5, "Q4_1": 6, "Q6_K": 10, "Q5_K": 10, "Q4_K": 6, "Q3_K": 6, "Q2_K": 8,
    "IQ4_NL": 5, "MXFP4": 4.25, "TQ1_0": 4.25, "TQ2_0": 4.25,
}  # fmt: skip

Types = Callable[[str], str]  # maps a matrix's name to its type


def random_blocks(type: str, shape: tuple[int, ...], *, seed: int) -> bytes:
    """Draw blocks with random bytes as codes, and with scales drawn from `SPECIAL`."""
    kind, rng = ggml.TYPES[type], np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // kind.weights, kind.bytes)).astype(np.uint8)
    for at in FLOATS[type]:
        blocks[:, at : at + 2] = rng.choice(SPECIAL, (len(blocks), 1)).astype("<f2").view(np.uint8)
    if type == "MXFP4":
        blocks[:, 0] = rng.integers(3, 253, len(blocks))  # only exponents that keep the weights within float32
    return blocks.tobytes()


def normal_blocks(type: str, shape: tuple[int, ...], *, seed: int) -> bytes:
    """Quantize random weights that are small enough to keep activations near 1."""
    weights = np.random.default_rng(seed).normal(size=shape) * shape[-1] ** -0.5
    return ggml.encode(weights.astype(np.float32), type).tobytes()


def file_in(types: Types, *, blocks: Callable[..., bytes] = random_blocks, seed: int = 0, **fields: Any):
    """Make a GGUF file. `types` maps a matrix's name to its type, and `blocks` draws a matrix's blocks in this type."""
    config = {**CONFIG, **fields}
    tensors = families.random_tensors(config, seed=seed)
    file = gguf_files.file_of(config, tensors)
    for i, name in enumerate(name for name in tensors if is_matrix(name) or name == EMBEDDING):
        *_, part, kind = name.split(".")
        gguf_name = f"blk.{name.split('.')[2]}.{NAMES[part]}.{kind}" if ".layers." in name else f"{NAMES[part]}.{kind}"
        shape, type = file.tensors[gguf_name].shape, types(name)
        file.tensors[gguf_name] = Tensor(shape, blocks(type, shape, seed=seed + i), CODES[type])
    return file


def normal_model(path: Path, types: Types, **fields: Any) -> Checkpoint:
    return open_checkpoint(file_in(types, blocks=normal_blocks, **fields).write(path))


def mixed(name: str) -> str:
    """Choose a matrix's type as llama.cpp's Q4_K_M does: more bits for v, down and the head."""
    return "Q6_K" if any(part in name for part in ("v_proj", "down_proj", "lm_head")) else "Q4_K"


def joined(checkpoint: Checkpoint, *names: str) -> np.ndarray:
    """Read the exact weights of the named tensors, and stack them along the rows."""
    parts = [part for name in names for part in exact_parts(checkpoint.tensors[name])]
    return np.concatenate(parts).astype(np.float32)


def matrices(checkpoint: Checkpoint) -> Mapping[str, tuple[Any, np.ndarray]]:
    """Pair each matrix on the device with its exact weights, by name.

    These are the matrices of the first layer, the head, and the embedding if it is not tied to the head.
    """
    params = load_params(checkpoint, dtype=FLOAT32, positions=1)
    layer, prefix = params.layers[0], "model.layers.0"
    assert isinstance(layer.ffn, FeedForward)
    names = {
        "qkv": (layer.qkv.weight, [f"{prefix}.self_attn.{part}_proj.weight" for part in "qkv"]),
        "o": (layer.o.weight, [f"{prefix}.self_attn.o_proj.weight"]),
        "gate_up": (layer.ffn.gate_up.weight, [f"{prefix}.mlp.{part}_proj.weight" for part in ("gate", "up")]),
        "down": (layer.ffn.down.weight, [f"{prefix}.mlp.down_proj.weight"]),
        "head": (params.head, [EMBEDDING if params.tied else "lm_head.weight"]),
    }
    if not params.tied:
        assert isinstance(params.embedding, Embedding)
        names["embedding"] = params.embedding.matrix, [EMBEDDING]
    return {name: (weight, joined(checkpoint, *parts)) for name, (weight, parts) in names.items()}


WEIGHTS = jax.jit(QuantizedMatrix.weights)


@pytest.mark.sampled(3)  # 14 cases, 10 s
@pytest.mark.parametrize("type", sorted(ggml.TYPES))
def test_codes_stand_for_the_weights_bit_for_bit(tmp_path, type):
    """Codes on the device decode to the file's exact weights, even for extreme scales and rows reordered for RoPE."""
    checkpoint = open_checkpoint(file_in(lambda name: type).write(tmp_path / "x.gguf"))
    for name, tensor in checkpoint.tensors.items():
        if tensor.codes:
            np.testing.assert_array_equal(joined(checkpoint, name), tensor.read())
    for weight, exact in matrices(checkpoint).values():
        assert isinstance(weight, QuantizedMatrix)
        np.testing.assert_array_equal(np.asarray(WEIGHTS(weight))[:, : exact.shape[1]], exact)


@given(types=st.lists(st.sampled_from(sorted(set(ggml.TYPES) - {"MXFP4"})), min_size=3, max_size=3), seed=seeds)
def test_matrices_of_several_types_become_one_bit_for_bit(tmp_path_factory, types, seed):
    path = tmp_path_factory.mktemp("mixed") / "x.gguf"
    chosen: dict[str, str] = dict(zip(("q_proj", "k_proj", "v_proj"), types, strict=True))
    checkpoint = open_checkpoint(
        file_in(lambda name: chosen.get(name.split(".")[-2], "Q8_0"), seed=seed, vocab_size=32).write(path)
    )
    weight, exact = matrices(checkpoint)["qkv"]
    assert isinstance(weight, QuantizedMatrix)
    np.testing.assert_array_equal(np.asarray(WEIGHTS(weight)), exact)


def test_what_has_no_form_in_common_is_float32(tmp_path):
    types = {"k_proj": "MXFP4"}
    checkpoint = open_checkpoint(
        file_in(lambda name: types.get(name.split(".")[-2], "Q4_K")).write(tmp_path / "x.gguf")
    )
    weight, exact = matrices(checkpoint)["qkv"]
    np.testing.assert_array_equal(np.asarray(weight), exact)
    assert in_common_form([None]) is None


@pytest.mark.sampled(5)  # 14 cases, 3 s
@pytest.mark.parametrize("type", sorted(ggml.TYPES))
def test_no_matrix_is_float32_on_the_device(tmp_path, type):
    """No matrix on the device is float32, and the memory plan counts exactly the bytes that the weights take."""
    checkpoint = open_checkpoint(file_in(lambda name: type).write(tmp_path / "x.gguf"))
    check = matrices(checkpoint).values()
    for weight, exact in check:
        leaves = jax.tree.leaves(weight)
        assert sum(8 * leaf.nbytes for leaf in leaves) <= BITS[type] * exact.size
        assert all(leaf.size < exact.size for leaf in leaves if leaf.dtype == FLOAT32)
    shapes = abstract_params(checkpoint.config, dtype=FLOAT32, positions=1, tensors=checkpoint.tensors)
    params = load_params(checkpoint, dtype=FLOAT32, positions=1)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    planned = memory_of(
        shapes, checkpoint.config, batch=1, context=64, chunk=64, platform="cpu", cache_dtype=FLOAT32
    ).weights
    assert planned == weight_bytes(params)
    assert sum(leaf.nbytes for weight, _ in check for leaf in jax.tree.leaves(weight)) < planned


def test_a_file_of_several_types_stays_in_codes(tmp_path):
    """In Q4_K_M, v may have a different type than q and k; loading joins all three into one int8 matrix."""
    weights = matrices(open_checkpoint(file_in(mixed).write(tmp_path / "x.gguf")))
    kinds = {name: (type(weight).form, weight.group) for name, (weight, _) in weights.items()}
    expected = {"qkv": ("int8_min", 16), "o": ("int4_min", 32), "gate_up": ("int4_min", 32)}
    assert kinds == {**expected, "down": ("int6", 16), "head": ("int6", 16), "embedding": ("int4_min", 32)}
    weight, exact = weights["qkv"]
    assert isinstance(weight, Int8Min)
    np.testing.assert_array_equal(np.asarray(WEIGHTS(weight)), exact)


def test_on_a_gpu_with_kernels_q_k_and_v_keep_their_types(tmp_path):
    """For a GPU with kernels, q, k and v keep their types and exact weights. The memory plan has the same shapes."""
    checkpoint = open_checkpoint(file_in(mixed).write(tmp_path / "x.gguf"))
    device = Device("gpu", "NVIDIA H200", HOPPER)
    params = load_params(checkpoint, dtype=FLOAT32, positions=1, device=device)
    planned = abstract_params(checkpoint.config, dtype=FLOAT32, positions=1, tensors=checkpoint.tensors, device=device)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(lambda a: (a.shape, a.dtype), planned)
    weight, prefix = params.layers[0].qkv.weight, "model.layers.0.self_attn"
    assert isinstance(weight, Stacked)
    assert [(type(part), part.group) for part in weight.parts] == [(Int4MinWords, 32), (Int6Words, 16)]
    for part, names in zip(weight.parts, ("qk", "v"), strict=True):
        exact = joined(checkpoint, *(f"{prefix}.{name}_proj.weight" for name in names))
        np.testing.assert_array_equal(part.weights(), exact)
    tokens = np.array([[3, 47, 3], [0, 1, 2]])
    np.testing.assert_array_equal(np.asarray(params.embedding[tokens]), joined(checkpoint, EMBEDDING)[tokens])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_of_an_embedding_are_decoded_as_they_are_looked_up(tmp_path, tied, dtype):
    """An embedding stays quantized, and only the rows of the prompt's tokens are decoded.

    A tied head uses the codes of the embedding, without a copy.
    """
    checkpoint = open_checkpoint(file_in(mixed, tie_word_embeddings=tied).write(tmp_path / "x.gguf"))
    params = load_params(checkpoint, dtype=np.dtype(dtype), positions=1)
    assert isinstance(params.embedding, Embedding)
    assert (params.embedding.dtype, params.tied) == (dtype, tied)
    tokens = np.array([[3, 47, 3], [0, 1, 2]])
    rows = params.embedding[tokens]
    assert rows.dtype == dtype
    np.testing.assert_array_equal(np.asarray(rows), joined(checkpoint, EMBEDDING)[tokens].astype(dtype))
    assert isinstance(params.head, QuantizedMatrix)
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(params._replace(rope=None))}.values()  # type: ignore
    assert weight_bytes(params) == sum(array.nbytes for array in arrays)


ALL: dict[str, Types] = {**{type: lambda name, type=type: type for type in sorted(ggml.TYPES)}, "Q4_K_M": mixed}


ONE_OF_EACH = {kind: type for type, kind in sorted(FORMS.items()) if type in ggml.TYPES}.values()


@pytest.mark.sampled(1)  # 5 to 8 s each
@pytest.mark.parametrize(("types", "ops"), [*((type, CPU) for type in ONE_OF_EACH), ("Q4_K_M", CPU), ("Q4_K_M", XLA)])
def test_logits_are_those_of_the_reference(tmp_path, types, ops):
    """Logits differ from the reference's by less than 1e-5 times the largest logit.

    test_quantized_products.py bounds the error of each product.
    """
    checkpoint = normal_model(tmp_path / "x.gguf", ALL[types], intermediate_size=256, vocab_size=32)
    config = checkpoint.config
    params, exact = load_params(checkpoint, dtype=FLOAT32, positions=8), load_reference_params(checkpoint)
    tokens = np.random.default_rng(0).integers(0, config.vocab, 5)
    cache = empty_cache(config, batch=1, capacity=8, dtype=FLOAT32)
    rows = []
    for chunk in np.split(tokens.astype(np.int32), [4]):  # a prompt, then one token
        logits, cache = FORWARD(params, chunk[None], cache, config=config, ops=ops)
        rows.append(np.asarray(logits)[0])
    expected, _ = llamaspec.reference.llama.forward(
        exact, tokens, llamaspec.reference.llama.empty_cache(config), config=config
    )
    assert np.abs(np.concatenate(rows) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.sampled(1)  # 1 to 2 s each
@pytest.mark.parametrize("types", ["Q4_K", "Q3_K", "Q4_K_M", "IQ4_NL"])
def test_kernels_leave_rows_that_are_too_short_to_the_plain_form(tmp_path, types):
    """For rows of fewer than 1,024 columns, tracing a kernel raises an error, and XLA's ops run instead.

    These ops read the codes in the kernels' layout.
    """
    checkpoint = normal_model(tmp_path / "x.gguf", ALL[types])
    params = arranged(load_params(checkpoint, dtype=FLOAT32, positions=1))
    table, reasons = pallas_ops(checkpoint.config, params, capacity=64)
    assert all(reason for op, reason in reasons.items() if op not in ("attend", PROMPT)), reasons
    x = jax.device_put(np.random.default_rng(0).normal(size=(1, checkpoint.config.dim)).astype(np.float32))
    routed, plain = (np.asarray(ops.norm_logits(x, params, config=checkpoint.config)) for ops in (table, XLA))
    np.testing.assert_array_equal(routed, plain)


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize("types", ["Q4_K", "Q6_K", "Q4_K_M", "IQ4_NL"])
def test_the_text_is_that_of_the_weights_in_float32(tmp_path, types):
    checkpoint = normal_model(tmp_path / "x.gguf", ALL[types], seed=2, num_hidden_layers=2)
    plain = {name: tensor._replace(codes=None) for name, tensor in checkpoint.tensors.items()}
    assert checkpoint.tensors[EMBEDDING].codes
    texts = [greedy(model, tokens=24) for model in (checkpoint, replace(checkpoint, tensors=plain))]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2  # more than one token repeated


def greedy(checkpoint: Checkpoint, *, tokens: int) -> list[int]:
    config = checkpoint.config
    params = load_params(checkpoint, dtype=FLOAT32, positions=64)
    cache, ids, step = empty_cache(config, batch=1, capacity=64, dtype=FLOAT32), [1], np.array([[1]], np.int32)
    for _ in range(tokens):
        logits, cache = FORWARD(params, step, cache, config=config, ops=CPU)
        step = np.asarray(logits[:, -1:].argmax(-1), np.int32)
        ids.append(int(step[0, 0]))
    return ids


@pytest.mark.parametrize("type", sorted(set(ggml.TYPES) - {"MXFP4"}))
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(tmp_path, type, value):
    """An infinite or NaN scale is refused, even if all codes of its block are 0."""
    for at in FLOATS[type]:
        file = file_in(lambda name: type)
        blocks = np.frombuffer(file.tensors["output.weight"].data, np.uint8).reshape(-1, ggml.TYPES[type].bytes).copy()
        blocks[3, at : at + 2] = np.array([value], "<f2").view(np.uint8)
        file.tensors["output.weight"].data = blocks.tobytes()
        checkpoint = open_checkpoint(file.write(tmp_path / f"{at}.gguf"))
        with pytest.raises(CheckpointError, match=r"lm_head.weight's (scales|minima)"):
            check_weights(checkpoint)


@pytest.mark.parametrize("types", ["Q4_K_M", "IQ4_NL", "Q5_1", "Q6_K"])
def test_other_formats_get_the_weights(tmp_path, types):
    """Converting GGUF codes to a format without such codes writes the weights as float32."""
    checkpoint = normal_model(tmp_path / "x.gguf", ALL[types])
    write_huggingface(checkpoint, tmp_path / "theirs")
    write_llama2c(checkpoint, tmp_path / "x.bin")
    again = open_checkpoint(tmp_path / "theirs")
    assert {bool(again.tensors[name].codes) for name in again.tensors if is_matrix(name)} == {types == "Q6_K"}
    for copy in (again, open_checkpoint(tmp_path / "x.bin")):
        for name, tensor in checkpoint.tensors.items():
            np.testing.assert_array_equal(copy.tensors[name].read(), tensor.read())


def test_every_type_has_a_form():
    assert FORMS.keys() == ggml.READABLE.keys()
    assert ggml.TYPES.keys() == BITS.keys() == FLOATS.keys()
