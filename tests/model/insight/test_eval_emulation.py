"""Our logits agree with llama.cpp's if activations are rounded as llama.cpp rounds them (goldens/gguf.json)."""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import llamaspec.model.cache
import llamaspec.reference.llama
from llamaspec.model.checkpoints import Checkpoint, open_checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.forward import forward as run_forward
from llamaspec.model.llama import load_backend
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.emulated import (
    EMULATED,
    ROUNDINGS,
    RoundedMatrix,
    RoundingArray,
    emulated_ops,
    emulating,
    roundings,
    with_roundings,
)
from llamaspec.model.ops.products import cpu_product, dot
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import RunOptions
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.reference.linear import linear
from llamaspec.reference.llama import empty_cache, forward
from llamaspec.reference.quantizers import ggml_activations, smoothquant
from llamaspec.verify.bounds import running_error
from tests.commands.test_cli import assert_refused
from tests.goldens import make_gguf
from tests.model.checkpoints.gguf.test_gguf_goldens import GOLDENS, IDS, distance, llama_cpp_logits, make_file
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.support.strategies import assert_within, noises

FLOAT32 = np.dtype(np.float32)
FORWARD = jax.jit(run_forward, static_argnames=("config", "ops"))

# These differences remain: at one position of each file, llama.cpp rounds a number within float32's noise of a tie to
# the other side. The noise comes from the order of llama.cpp's float32 sums, which depends on the processor, so we
# cannot reproduce it. Equal vectors give equal codes: test_the_tie_of_q5_0 shows this here, and test_libggml.py shows
# it for every product of every type. In Q4_1's file, all later positions read keys and values that a tie has changed.
FLIPPED = {"Q5_0": 4, "bfloat16": 5}
# In Q3_K's file, one position has such a tie, of Q8_K.
CHANGED = {"Q4_1": range(3, 10), "Q3_K": [8]}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that writes the GGUF file of a type once, with the bytes that llama.cpp read for the golden."""
    folder, paths = tmp_path_factory.mktemp("gguf"), {}

    def path(name: str) -> Path:
        if name not in paths:
            paths[name] = make_file(folder, name, GOLDENS["logits"][name]["sha256"])
        return paths[name]

    return path


def emulated_logits(path: Path, ids: np.ndarray) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    params = load_reference_params(checkpoint, roundings(checkpoint, "ggml"))
    return forward(params, ids, empty_cache(checkpoint.config), config=checkpoint.config)[0]


@pytest.mark.sampled(6)  # 15 cases, 8 s
@pytest.mark.parametrize("name", [name for name in GOLDENS["logits"] if name not in ("float32", "float16")])
def test_logits_are_those_of_llama_cpp(file, name):
    actual = emulated_logits(file(name), IDS)
    apart = CHANGED.get(name, [FLIPPED.get(name)])
    compared = [position for position in range(len(IDS)) if position not in apart]
    assert distance(actual[compared], llama_cpp_logits(name)[compared]) < 1e-5


def ties(x: np.ndarray, to: str) -> tuple[np.ndarray, np.ndarray]:
    """Measure how near each number is to a tie when it is rounded to `to`.

    Return the distance to the nearest tie as a fraction of a rounding step, and the size of the step.
    """
    if to == "q8_0":
        most = np.abs(x.reshape(*x.shape[:-1], -1, 32)).max(axis=-1).repeat(32, axis=-1)
        steps, step = x * (np.float32(127) / most), (most / np.float32(127)).astype(np.float16).astype(np.float64)
    else:  # bfloat16 has 8 bits, float16 11
        step = np.ldexp(1.0, np.frexp(np.abs(x))[1] - {"bfloat16": 8, "float16": 11}[to])
        steps = x / step
    return np.abs(steps - np.floor(steps) - 0.5), step


@pytest.mark.parametrize(("name", "position"), [*FLIPPED.items(), ("float16", 0)])
def test_remaining_differences_come_from_one_rounding_tie(file, monkeypatch, name, position):
    """Rounding one number at a tie to the other side reproduces llama.cpp's logits of the whole position.

    For float16, only the first position is checked. float16's rounding steps are so small (2^-11) that float32's
    roundoff moves several numbers of each later position across a tie.
    """
    path = file(name)
    to = "q8_0" if name in make_gguf.TYPES else name
    plain = ggml_activations.ROUNDINGS[to]
    seen: list[tuple[float, float]] = []  # distance to the tie, in steps, and the number
    chosen: list[float] = []

    def rounding(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        rounded, (near, step) = plain(x), ties(x, to)
        if len(x) > position:
            seen.extend((float(n), float(v)) for n, v in zip(near[position], x[position], strict=True))
        return rounded + np.where(np.isin(x, chosen), np.where(x < rounded, -step, step), 0)

    monkeypatch.setitem(ggml_activations.ROUNDINGS, to, rounding)
    ids, expected = IDS[: position + 1], llama_cpp_logits(name)
    assert distance(emulated_logits(path, ids)[position], expected[position]) > 1e-5
    nearest = sorted(set(seen))[: 8 if name == "float16" else 1]

    def without(number: float) -> float:
        chosen[:] = [number]
        return distance(emulated_logits(path, ids)[position], expected[position])

    assert min(without(number) for _, number in nearest) < 1e-5


def test_the_tie_of_q5_0(file, monkeypatch):
    """One number at a rounding tie explains the only position at which our logits differ from llama.cpp's.

    The number is feature 96 of an rmsnorm output in the second layer. Its exact value is -0.34963982; llama.cpp
    computes -0.34963974, which is 3 float32 steps away. The largest number of the block is 2.277141, so q8_0 multiplies
    both by 127 / 2.277141. The results, -19.500002 and -19.499998, round to -20 and -19. If we start from llama.cpp's
    vector, our product equals llama.cpp's; from our vector it does not.
    """
    type, name, position = make_gguf.TIE
    assert (type, name, position) == ("Q5_0", "blk.1.ffn_gate", FLIPPED["Q5_0"])
    golden_input, product = (np.frombuffer(base64.b64decode(GOLDENS["tie"][part]), "<f4") for part in "xy")
    seen: list[np.ndarray] = []
    plain = ggml_activations.q8_0
    monkeypatch.setitem(ggml_activations.ROUNDINGS, "q8_0", lambda x: (seen.append(x), plain(x))[1])
    checkpoint = open_checkpoint(file(type))
    params = load_reference_params(checkpoint, roundings(checkpoint, "ggml"))
    forward(params, IDS[: position + 1], empty_cache(checkpoint.config), config=checkpoint.config)
    own_input = seen[7 + 4][position].astype(np.float32)  # after the first layer's seven products: q, k, v, o
    codes, steps = zip(*(in_steps(x) for x in (own_input, golden_input)), strict=True)
    assert np.flatnonzero(codes[0] != codes[1]).tolist() == [96]
    assert [round(float(row[96]), 6) for row in steps] == [-19.500002, -19.499998]
    ffn = params.layers[1].ffn
    assert isinstance(ffn, llamaspec.reference.llama.FeedForward) and ffn.gate is not None
    w = np.asarray(ffn.gate.weight)
    bound = running_error.gamma(len(golden_input)) * np.abs(plain(golden_input)) @ np.abs(w).T
    assert_within(product.astype(np.float64), linear(plain(golden_input), w), bound)
    assert np.any(np.abs(product - linear(plain(own_input), w)) > bound)


def in_steps(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the q8_0 codes of `x`, and the scaled numbers before they are rounded to codes."""
    blocks = x.reshape(-1, 32)
    steps = (blocks * (np.float32(127) / np.abs(blocks).max(axis=-1, keepdims=True))).ravel()
    return np.rint(steps), steps


@given(noise=noises)
def test_roundings_of_jax_are_those_of_the_reference(noise):
    x = noise(3, 512)
    x[1, :256] = 0
    x[2] = np.rint(x[2] / max(np.abs(x[2]).max(), 1) * 127) / 2  # ties
    x = np.clip(x, -6e4, 6e4)  # float16's range
    for name, definition in ggml_activations.ROUNDINGS.items():
        if name == "q8_1":  # a sum of 32 numbers must fit, too
            x = np.clip(x, -2e3, 2e3)
        rounding, expected = ROUNDINGS[name], definition(x)
        np.testing.assert_array_equal(np.asarray(rounding(jnp.asarray(x))), expected.astype(np.float32), err_msg=name)


@given(noise=noises)
def test_no_number_moves_by_more_than_half_a_step(noise):
    x = noise(2, 512).astype(np.float64)
    most = np.abs(x.reshape(2, -1, 32)).max(axis=-1).repeat(32, axis=-1)
    # The rounding of d is 2^-11 of d, or 2^-25 if d is subnormal; a code multiplies it by up to 127.
    assert_within(ggml_activations.q8_0(x), x, (1 / 2 + 2**-4) * most / 127 + 2.0**-18)
    most = np.abs(x.reshape(2, -1, 256)).max(axis=-1).repeat(256, axis=-1)
    assert_within(ggml_activations.q8_k(x), x, (1 / 2 + 2**-15) * most / 127)


def jax_logits(checkpoint: Checkpoint, roundings_by_name: dict[str, str]) -> np.ndarray:
    params = with_roundings(
        load_params(checkpoint, dtype=FLOAT32, positions=16), roundings_by_name, config=checkpoint.config
    )
    cache = llamaspec.model.cache.empty_cache(checkpoint.config, batch=1, capacity=16, dtype=FLOAT32)
    logits, _ = FORWARD(params, IDS[None].astype(np.int32), cache, config=checkpoint.config, ops=EMULATED[XLA])
    return np.asarray(logits[0], np.float64)


@pytest.mark.sampled(1)  # 4 to 5 s each
@pytest.mark.parametrize("name", ["q8_0", "q4_0", "mxfp4", "Q5_0", "Q5_1", "Q4_K", "bfloat16"])
def test_jax_emulates_too(file, name):
    """With rounded activations, JAX's logits equal the reference's at one or more positions.

    At the other positions, a number at a rounding tie may change the logits.
    """
    path = file(name)
    checkpoint = open_checkpoint(path)
    actual = jax_logits(checkpoint, roundings(checkpoint, "ggml"))
    distances = [distance(row, expected) for row, expected in zip(actual, emulated_logits(path, IDS), strict=True)]
    assert min(distances) < 1e-5
    assert max(distances) < 0.06


@given(noise=noises)
def test_a_product_is_that_of_the_reference(noise):
    """A product with rounded activations is within its usual error bound. Both backends round the same vector."""
    x, w = noise(2, 256), noise(3, 256)
    for to in ("q8_0", "q8_k", "int8"):
        rounded = np.asarray(ROUNDINGS[to](jnp.asarray(x)), np.float64)
        bound = running_error.gamma(257) * np.abs(rounded) @ np.abs(w.astype(np.float64)).T
        for product in (dot, cpu_product):
            actual = emulating(product)(jnp.asarray(x), RoundedMatrix(jnp.asarray(w), to))
            assert_within(actual, linear(rounded, w.astype(np.float64)), bound)


def test_a_rounding_array_rounds_only_its_multiplier():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 32)), rng.normal(size=(5, 32))
    rounding = RoundingArray.of(w, "q8_0")
    assert np.array_equal(linear(x, rounding), linear(ggml_activations.q8_0(x), w))
    assert np.array_equal(linear(x, RoundingArray.of(w, "int8")), linear(smoothquant.activations(x), w))
    assert type(linear(x, rounding)) is np.ndarray
    assert np.array_equal(linear(np.asarray(rounding), x), w @ x.T)
    assert np.array_equal(rounding[1] + 1, w[1] + 1)


def test_a_rounding_array_multiplies_minima_by_sums():
    """A product with a `RoundingArray` multiplies the weights' minima by the sums of activations that q8_1 stores.

    The array may hold the matrices of several experts.
    """
    rng = np.random.default_rng(0)
    x, w, minima = rng.normal(size=(2, 64)), rng.normal(size=(3, 5, 64)), rng.normal(size=(3, 5, 2))
    numbers = ggml_activations.q8_1(x)
    np.testing.assert_array_equal(numbers[:, :64], ggml_activations.q8_0(x))
    assert numbers.shape == (2, 66) and np.all(numbers[:, 64:] != 0)
    rounding = RoundingArray.of(w, "q8_1", minima)
    for matrix, weights, least in [(rounding[i], w[i], minima[i]) for i in range(3)]:
        np.testing.assert_array_equal(linear(x, matrix), linear(numbers[:, :64], weights) + numbers[:, 64:] @ least.T)


@pytest.mark.slow  # 7 and 10 s
@pytest.mark.parametrize("name", ["experts", "2 to 1, wide, tied"])
def test_q8_0_activations_apply_to_every_quantized_matrix(name):
    """For every matrix of a q8 model, including the experts' matrices, both backends round the activations to q8_0."""
    checkpoint = quantized(random_checkpoint(replace(CONFIGS[name], layers=1), seed=7), "q8")
    assert roundings(checkpoint, "q8_0") == {n: "q8_0" for n, tensor in checkpoint.tensors.items() if tensor.codes}
    rows = [
        load_backend(checkpoint, RunOptions(emulate_activations="q8_0")).logits([1, 2, 3]),
        load_backend(checkpoint, RunOptions(emulate_activations="q8_0", backend="reference")).logits([1, 2, 3]),
        load_backend(checkpoint, RunOptions(backend="reference")).logits([1, 2, 3]),
    ]
    assert distance(rows[0].astype(np.float64), rows[1]) < 1e-5 < 1e-3 < distance(rows[1], rows[2])


@pytest.mark.slow  # 10 s
def test_int8_activations_apply_to_int8_matrices():
    """Activations are rounded to int8, one scale per token, for every matrix of a q8_row model, on both backends."""
    checkpoint = quantized(random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=7), "q8_row")
    assert roundings(checkpoint, "int8") == {n: "int8" for n, tensor in checkpoint.tensors.items() if tensor.codes}
    rows = [
        load_backend(checkpoint, RunOptions(emulate_activations="int8")).logits([1, 2, 3]),
        load_backend(checkpoint, RunOptions(emulate_activations="int8", backend="reference")).logits([1, 2, 3]),
        load_backend(checkpoint, RunOptions(backend="reference")).logits([1, 2, 3]),
    ]
    assert distance(rows[0].astype(np.float64), rows[1]) < 1e-5 < 1e-3 < distance(rows[1], rows[2])
    with pytest.raises(ValueError, match=r"no matrix .*int8"):
        roundings(quantized(checkpoint, "q4"), "int8")


def test_what_cannot_be_emulated_is_refused(run, tmp_path):
    out = ("--tokens", "1,2", "--out", str(tmp_path / "x.npy"))
    assert_refused(run("logits", *out, "--emulate-activations", "q8_0"), "no matrix", "q8_0", "activations")
    assert_refused(
        run("logits", *out, "--emulate-activations", "ggml", "--quantize", "q8"), "no matrix", "ggml", "activations"
    )
    assert_refused(run("logits", *out, "--emulate-activations", "q8_1"), "'q8_1' is not one of", status=2)
    plain = random_checkpoint(CONFIGS["experts"], seed=0)
    with pytest.raises(ValueError, match=r"activations .q9. .*q8_0, int8.*ggml"):
        roundings(plain, "q9")
    value = "model.layers.0.self_attn.v_proj.weight"
    mixed = {**quantized(plain, "q8").tensors, value: plain.tensors[value]}
    with pytest.raises(ValueError, match=r"q_proj\.weight and model\.layers\.0\.self_attn\.v_proj\.weight .*types"):
        roundings(replace(plain, tensors=mixed), "q8_0")
    assert emulated_ops(XLA) in EMULATED.values()
    with pytest.raises(ValueError, match="choose xla or cpu"):
        emulated_ops(XLA._replace(attend=CPU.norm_logits))
