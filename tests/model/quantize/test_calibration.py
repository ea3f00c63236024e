"""AWQ, GPTQ and SmoothQuant on whole models: error guarantees, written files, and refusals."""

import json
import random
import re
import sys
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.progress
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.cache import empty_cache
from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from llamaspec.model.checkpoints.codes import exact_parts, quantized
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.convert import CALIBRATED
from llamaspec.model.forward import forward
from llamaspec.model.ops.xla import XLA
from llamaspec.model.quantize import calibration
from llamaspec.model.quantize.calibration import calibrated, read_windows
from llamaspec.model.quantize.methods import METHODS, Q4, Inputs, Method, awq_factors, errors, gptq_codes, observe
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.weights.loading import Progress, load_params
from llamaspec.reference import llama as reference
from llamaspec.reference.quantizers import affine, awq, gptq
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.training.stories.corpus import story
from tests.support.families import is_matrix
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.support.refusals import mentions
from tests.support.strategies import Noise, U, noises, seeds

FLOAT32 = np.dtype(np.float32)
FOUR_BITS = ("awq", "gptq")


def text(seed: int, stories: int) -> str:
    rng = random.Random(seed)
    return "\n\n".join(story(rng).text for _ in range(stories))


def windows_of(text: str, tokenizer: Tokenizer, *, count: int, length: int) -> np.ndarray:
    ids = tokenizer.encode(text)[: count * (length - 1)]
    return np.array([[tokenizer.bos, *row] for row in np.reshape(ids, (count, length - 1))], np.int32)


def random_windows(checkpoint: Checkpoint, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, checkpoint.config.vocab, (3, 8)).astype(np.int32)


def nearest(w: np.ndarray) -> np.ndarray:
    """Round each weight to its nearest 4-bit code, and decode the codes."""
    return Q4.dequantize(Q4.quantize(w))


def correlated(seed: int, tokens: int, cols: int) -> np.ndarray:
    """Draw correlated inputs of very different sizes; one column is 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, cols)) @ rng.normal(size=(cols, cols)) * np.exp(rng.normal(size=cols))
    x[:, cols // 2] = 0
    return x


def sums(x: np.ndarray) -> Inputs:
    return Inputs(x.T @ x, np.mean(np.abs(x), axis=0), np.mean(x**2, axis=0), np.max(np.abs(x), axis=0))


@given(noise=noises, split=st.integers(1, 4))
def test_sums_over_parts_are_those_over_all(noise, split):
    """Statistics of inputs that come in parts equal the statistics of all inputs, within float32's rounding."""
    x = noise(5, 6)
    observed = observe(map(jnp.asarray, np.split(x, [split])), gram=True)
    wide = x.astype(np.float64)
    exact, magnitudes = sums(wide), np.abs(wide)
    gamma = 5 * 2.0**-24 / (1 - 5 * 2.0**-24)
    tiny = 5 * 2.0**-126  # float32 may flush smaller products to 0
    assert observed.gram is not None
    assert (np.abs(observed.gram - exact.gram) <= gamma * (magnitudes.T @ magnitudes) + tiny).all()
    assert (np.abs(observed.means - exact.means) <= gamma * exact.means + tiny).all()
    np.testing.assert_array_equal(observed.tops, exact.tops)


@given(seed=seeds, rows=st.integers(1, 6), cols=st.sampled_from([5, 64, 130]))
def test_the_error_from_sums_is_that_of_the_outputs(seed, rows, cols):
    rng = np.random.default_rng(seed)
    w, q, x = rng.normal(size=(rows, cols)), rng.normal(size=(rows, cols)), rng.normal(size=(9, cols))
    wide = np.abs(q - w) @ np.abs(x).T
    direct = np.sum(((q - w) @ x.T) ** 2, axis=1)
    # Both computations round each product at most cols + 9 + 2 times.
    assert (np.abs(errors(w, q, x.T @ x) - direct) <= 4 * (cols + 11) * U * np.sum(wide**2, axis=1)).all()


@pytest.mark.sampled(3)  # 9 cases, 3 s
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rows", "cols"), [(3, 64), (5, 192), (2, 320)])
def test_gptq_in_blocks_of_columns_is_gptq(seed, rows, cols):
    """GPTQ in blocks of columns chooses the codes of plain GPTQ; no drawn weight is near a rounding tie.

    Codes are compared only in rows where plain GPTQ has no larger error than rounding to nearest.
    """
    w, x = Noise(seed)(rows, cols, dtype=np.float64), correlated(seed, 2 * cols, cols)
    plain = gptq.quantize(w, x, bits=4, group=64, even=True)
    actual = gptq_codes(w, sums(x))
    better = errors(w, affine.dequantize(plain), x.T @ x) <= errors(w, nearest(w), x.T @ x)
    assert better.any()
    np.testing.assert_array_equal(actual.codes[better], plain.codes[better] - np.int16(8))
    np.testing.assert_array_equal(actual.scales, plain.scales)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_from_sums_is_that_over_inputs(seed):
    w, x = Noise(seed)(7, 128, dtype=np.float64), correlated(seed, 40, 128)
    np.testing.assert_array_equal(awq_factors(w, sums(x)), awq.search(w, x, rounded=nearest))


@given(noise=noises, seed=seeds, cols=st.sampled_from([1, 33, 64, 100]))
def test_no_row_is_worse_than_the_nearest_codes(noise, seed, cols):
    w, inputs = noise(4, cols).astype(np.float64), sums(correlated(seed, 12, cols))
    assert inputs.gram is not None
    gptq_errors = errors(w, Q4.dequantize(gptq_codes(w, inputs)), inputs.gram)
    assert (gptq_errors <= errors(w, nearest(w), inputs.gram)).all()


@given(noise=noises, seed=seeds, cols=st.sampled_from([1, 33, 64, 100]))
def test_no_matrix_is_worse_than_the_nearest_codes(noise, seed, cols):
    w, inputs = noise(4, cols).astype(np.float64), sums(correlated(seed, 12, cols))
    assert inputs.gram is not None
    s = awq_factors(w, inputs)
    scaled = np.sum(errors(w, nearest(w * s) / s, inputs.gram))
    assert scaled <= np.sum(errors(w, nearest(w), inputs.gram))


@pytest.mark.slow  # 4 to 7 s each
@pytest.mark.parametrize("name", FOUR_BITS)
def test_calibrated_errors_are_at_most_those_of_rounding_to_nearest(name, monkeypatch):
    """On the calibration inputs, no matrix has a larger error than with rounding to nearest.

    Most matrices have a smaller error.
    """
    ratios, method = [], METHODS[name]

    def compare(w: np.ndarray, q: np.ndarray, inputs: Inputs):
        assert inputs.gram is not None
        ratios.append(np.sum(errors(w, q, inputs.gram)) / np.sum(errors(w, nearest(w), inputs.gram)))

    def quantize(w: np.ndarray, inputs: Inputs):
        part = method.quantize(w, inputs)
        compare(w, Q4.dequantize(part), inputs)
        return part

    def factors(w: np.ndarray, inputs: Inputs):
        s = awq_factors(w, inputs)
        compare(w, nearest(w * s) / s, inputs)
        return s

    spied = {"factors": factors} if name == "awq" else {"quantize": quantize}
    monkeypatch.setitem(METHODS, name, method._replace(**spied))
    checkpoint = open_checkpoint("stories")
    windows = windows_of(text(1, 8), load_tokenizer(checkpoint.path), count=2, length=128)
    read_all(calibrated(checkpoint, windows, method=name))
    assert len(ratios) == checkpoint.config.layers * (4 if name == "awq" else 7)
    assert max(ratios) <= 1
    assert np.median(ratios) < 1


def read_all(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


# Lossless codes, so that a calibration's changes to a model cancel bit for bit.


def sevens(checkpoint: Checkpoint) -> Checkpoint:
    """Round the weights of all matrices to k / 128 for integers k with |k| <= 127."""

    def rounded(tensor: Tensor) -> Tensor:
        w = (np.rint(tensor.read() * 128).clip(-127, 127) / 128).astype(np.float32)
        return tensor._replace(read=lambda: w)

    tensors = {name: rounded(t) if is_matrix(name) else t for name, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def exact_codes(w: np.ndarray, inputs: Inputs) -> Quantized:
    """Quantize each weight exactly: its own scale is a power of two, and its code is at most 127 in magnitude.

    Such a code exists, because the weights of `sevens` have at most seven significant bits.
    """
    magnitudes = np.where(w == 0, 1, np.abs(w))
    scales = 2.0 ** (np.floor(np.log2(magnitudes)) - 6)
    codes = (w / scales).astype(np.int8)
    np.testing.assert_array_equal(codes * scales, w)
    return Quantized(codes, scales.astype(np.float32))


def powers(w: np.ndarray, inputs: Inputs) -> np.ndarray:
    return 2.0 ** np.rint(np.log2(np.maximum(inputs.means, 2.0**-9)))


@pytest.mark.sampled(3)  # 10 cases, 7 s
@pytest.mark.parametrize("into_matrices", [False, True])
@pytest.mark.parametrize("config", sorted(CONFIGS))
def test_calibration_factors_cancel(config, into_matrices, monkeypatch):
    """Calibration with factors that are powers of 2, and without rounding, changes tensors but no logits."""
    lossless = Method("int8", 8, 1, False, powers, exact_codes, into_matrices=into_matrices)
    monkeypatch.setitem(METHODS, "lossless", lossless)
    checkpoint = sevens(random_checkpoint(CONFIGS[config], seed=5))
    moved = calibrated(checkpoint, random_windows(checkpoint, 6), method="lossless")
    before, after = (load_reference_params(model) for model in (checkpoint, moved))
    changed = [not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
    assert sum(changed) > len(changed) / (2 if into_matrices else 4)
    tokens = np.arange(9)
    plain, folded = (
        reference.forward(params, tokens, reference.empty_cache(checkpoint.config), config=checkpoint.config)[0]
        for params in (before, after)
    )
    np.testing.assert_array_equal(plain, folded)


@pytest.mark.sampled(1)  # 3 s each
@pytest.mark.parametrize("name", CALIBRATED)
def test_tensors_are_the_same_whenever_they_are_read(name):
    checkpoint = random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=1)
    model = calibrated(checkpoint, random_windows(checkpoint, 2), method=name)
    forwards = read_all(model)
    for tensor in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"):
        np.testing.assert_array_equal(model.tensors[tensor].read(), forwards[tensor])
    for name, tensor in model.tensors.items():
        assert (tensor.codes is not None) == is_matrix(name)
        assert forwards[name].shape == tensor.shape and forwards[name].dtype == tensor.dtype


# Quality on text that the calibration has not seen.


def log_probabilities(checkpoint: Checkpoint, windows: np.ndarray) -> np.ndarray:
    config, length = checkpoint.config, windows.shape[1]
    params = load_params(checkpoint, dtype=FLOAT32, positions=length)
    run = jax.jit(partial(forward, config=config, ops=XLA))
    cache = empty_cache(config, batch=1, capacity=length, dtype=FLOAT32)
    return np.concatenate([jax.nn.log_softmax(run(params, row[None], cache)[0][0]) for row in windows])


def divergence(of: np.ndarray, base: np.ndarray) -> float:
    return float(np.mean(np.sum(np.exp(base) * (base - of), axis=-1)))


def check_held_out(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    """Check that on text outside the calibration text, GPTQ diverges less from the float model than plain rounding.

    Plain rounding takes the nearest code. AWQ is not checked: it helps with outlier features, which such small models
    lack.
    """
    seen, unseen = (windows_of(text(seed, 30), tokenizer, count=8, length=128) for seed in (1, 2))
    base = log_probabilities(checkpoint, unseen)
    rounded = divergence(log_probabilities(quantized(checkpoint, "q4"), unseen), base)
    assert divergence(log_probabilities(calibrated(checkpoint, seen, method="gptq"), unseen), base) < rounded


@pytest.mark.slow  # 21 s
def test_four_bits_cost_the_built_in_model_less():
    check_held_out(open_checkpoint("stories"), load_tokenizer(open_checkpoint("stories").path))


@pytest.mark.slow  # 8 s
def test_four_bits_cost_stories260k_less(data):
    folder = data / "stories260K"
    check_held_out(open_checkpoint(folder / "stories260K.bin"), load_tokenizer(folder / "tok512.model"))


# Written files.


@pytest.mark.slow  # 4 s each
@pytest.mark.parametrize("name", CALIBRATED)
def test_a_calibrated_model_is_written_and_read(name, tmp_path):
    checkpoint = random_checkpoint(replace(CONFIGS["2 to 1, wide, tied"], tied=False), seed=3)
    model = calibrated(checkpoint, random_windows(checkpoint, 4), method=name)
    write_huggingface(model, tmp_path / "there", int8_activations=name == "smoothquant")
    again = open_checkpoint(tmp_path / "there")
    for tensor in model.tensors:
        expected, actual = (np.concatenate(list(exact_parts(source.tensors[tensor]))) for source in (model, again))
        np.testing.assert_array_equal(expected, actual)
    settings = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
    group = settings["config_groups"]["group_0"]
    assert settings["ignore"] == ["lm_head"]
    if name == "smoothquant":
        assert (settings["format"], group["input_activations"]["strategy"]) == ("int-quantized", "token")
        assert (group["weights"]["num_bits"], group["weights"]["strategy"]) == (8, "channel")
    else:
        assert (settings["format"], group["input_activations"]) == ("pack-quantized", None)
        assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (4, 64)
        assert group["weights"]["symmetric"] is True


@pytest.fixture
def stories_text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text(3, 10))
    return path


@pytest.mark.slow  # 18 s
def test_both_backends_tell_the_same_story_with_a_model_that_was_converted(run, tmp_path, stories_text):
    there = str(tmp_path / "gptq")
    request = ("--quantize", "gptq", "--calibration", str(stories_text))  # safetensors: the only format for these codes
    code, out, err = run("convert", "stories", there, *request)
    assert (code, out) == (0, ""), err
    texts = []
    for backend in ("jax", "reference"):
        options = ("--temperature", "0", "--max-new-tokens", "20", "--context", "64", "--backend", backend)
        code, out, err = run("generate", "Once upon a time", "--model", there, *options)
        assert code == 0, err
        texts.append(out)
    assert texts[0] == texts[1]
    code, out, err = run("convert", there, str(tmp_path / "twice"), *request)
    assert (code, out) == (1, "") and re.search("already quantized.*gptq", err)
    assert not (tmp_path / "twice").exists()


LAYERS, WINDOWS, SEQ = 4, 5, 13


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_activations_of_one_layer_are_in_memory_at_a_time(name):
    """After each step of calibration, memory holds the activations of only one layer.

    For each window, these are the input of the layer and the input of its feed-forward half. At most two more arrays
    exist.
    """
    checkpoint = random_checkpoint(replace(CONFIGS["experts"], layers=LAYERS), seed=2)
    windows = np.random.default_rng(0).integers(0, checkpoint.config.vocab, (WINDOWS, SEQ)).astype(np.int32)
    counts: list[int] = []

    def count(stage: str, share: float) -> None:
        shapes = [array.shape for array in jax.live_arrays()]
        activations = [
            shape for shape in shapes if len(shape) == 3 and shape[1] == SEQ and shape[2] >= checkpoint.config.dim
        ]
        counts.append(len(activations))

    read_all(calibrated(checkpoint, windows, method=name, progress=count))
    kinds = 3 + checkpoint.config.experts  # q, k and v; o; gates and ups; each expert's down
    assert len(counts) == LAYERS * kinds * WINDOWS
    assert WINDOWS <= min(counts) and max(counts) <= 2 * WINDOWS + 2


def test_progress_is_told_of_each_layer():
    checkpoint = random_checkpoint(replace(CONFIGS["1 to 1, biases, scaled, tied"], layers=LAYERS), seed=2)
    reported: dict[str, list[float]] = {}
    windows = random_windows(checkpoint, 0)
    read_all(
        calibrated(
            checkpoint, windows, method="gptq", progress=lambda *now: reported.setdefault(now[0], []).append(now[1])
        )
    )
    assert list(reported) == [f"layer {layer} of {LAYERS}" for layer in range(1, LAYERS + 1)]
    for shares in reported.values():
        assert shares == sorted(set(shares)) and shares[0] == 0 and 0.9 < shares[-1] < 1


def test_a_terminal_shows_a_bar_a_layer(run, tmp_path, stories_text, monkeypatch):
    """In a terminal, calibration shows a progress bar per layer on stderr; otherwise it prints only the last line."""

    def two_layers(checkpoint: Checkpoint, windows: np.ndarray, *, method: str, progress: Progress) -> Checkpoint:
        for layer in (1, 2):
            for share in (0.25, 0.75):
                progress(f"layer {layer} of 2", share)
        return quantized(checkpoint, "q4")

    update = rich.progress.Progress.update
    monkeypatch.setattr(calibration, "calibrated", two_layers)
    monkeypatch.setattr(rich.progress.Progress, "update", partialmethod(update, refresh=True))  # not ten times a second
    request = ("--to", "safetensors", "--quantize", "gptq", "--calibration", str(stories_text))
    code, out, err = run("convert", "stories", str(tmp_path / "a"), *request)
    assert (code, out, err) == (0, "", f"wrote 92 tensors to {tmp_path / 'a'}\n")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = run("convert", "stories", str(tmp_path / "b"), *request)
    bars = re.findall(r"(layer \d of 2|writing \S+) .*? +(\d+)%", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err))
    assert (code, out) == (0, "")
    layers = [line for line in dict.fromkeys(bars) if line[0].startswith("layer")]
    assert layers == [("layer 1 of 2", "25"), ("layer 1 of 2", "75"), ("layer 2 of 2", "25"), ("layer 2 of 2", "75")]
    assert bars[-1] == ("writing model.norm.weight", "100")


# Refusals.


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--quantize", "awq"), "awq calibration"),
        (("--quantize", "q4", "--calibration", "x"), "calibration awq gptq smoothquant"),
        (("--calibration", "x"), "calibration awq gptq smoothquant"),
        (("--quantize", "awq2", "--calibration", "x"), "'awq2'"),
    ],
)
def test_requests_that_mean_nothing_are_refused(options, what, run, tmp_path):
    code, out, err = run("convert", "stories", str(tmp_path / "there"), "--to", "safetensors", *options)
    assert (code, out) == (2, "") and mentions(err, what)
    code, out, err = run("convert", "stories", "x", "--to", "gguf", "--quantize", "gptq", "--calibration", "x")
    assert (code, out) == (2, "") and mentions(err, "--quantize gptq gguf")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "No such file"),
        (b"", "contains no text"),
        (b" \n\n", "contains no text"),
        (b"Once upon a time", "calibration needs at least 511"),
        (b"Once \xff upon", "is not UTF-8 byte 5 0xff"),
    ],
)
def test_a_text_that_does_not_serve_is_refused(content, what, run, tmp_path):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    request = ("--to", "safetensors", "--quantize", "awq", "--calibration", str(path))
    code, out, err = run("convert", "stories", str(tmp_path / "there"), *request)
    assert (code, out) == (1, "")
    assert f"error: {path}: " in err and mentions(err, what) and err.count("\n") == 1
    assert not (tmp_path / "there").exists()


def test_sizes_that_no_format_holds_are_refused_before_anything_is_computed(run, data, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration._Layer, "pass_through", None)
    folder = data / "stories260K"
    request = ("--to", "safetensors", "--quantize", "gptq", "--tokenizer", str(folder / "tok512.model"))
    (tmp_path / "text.txt").write_text(text(1, 12))
    there = tmp_path / "there"
    source = (str(folder / "stories260K.bin"), str(there))
    code, out, err = run("convert", *source, *request, "--calibration", str(tmp_path / "text.txt"))
    assert (code, out) == (1, "")
    assert re.search(r"down_proj\.weight .*172 .*64", err)
    assert not there.exists()


def test_an_interrupted_conversion_leaves_nothing(run, tmp_path, stories_text, monkeypatch):
    entered = []

    def interrupted(layer: calibration._Layer, streams: list) -> list:
        entered.append(layer)
        if len(entered) > 1:
            raise KeyboardInterrupt
        return through(layer, streams)

    through = calibration._Layer.pass_through
    monkeypatch.setattr(calibration._Layer, "pass_through", interrupted)
    request = ("--to", "safetensors", "--quantize", "smoothquant", "--calibration", str(stories_text))
    code, out, _ = run("convert", "stories", str(tmp_path / "there"), *request)
    assert (code, out) == (130, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_inputs_beyond_float32_are_refused():
    checkpoint = random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    huge = checkpoint.tensors[name]._replace(read=lambda: np.full((320, 128), 1e38, np.float32))
    broken = replace(checkpoint, tensors={**checkpoint.tensors, name: huge})
    model = calibrated(broken, random_windows(checkpoint, 2), method="smoothquant")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight .*overflow"):
        read_all(model)


def test_windows_begin_texts_and_are_whole(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(open_checkpoint("stories").path)
    path = tmp_path / "text.txt"
    path.write_text(text(1, 3))
    ids = tokenizer.encode(path.read_text())
    windows = read_windows(path, tokenizer, context=40)
    assert windows.shape == (len(ids) // 39, 40)
    assert (windows[:, 0] == tokenizer.bos).all()
    np.testing.assert_array_equal(windows[:, 1:].ravel(), ids[: len(ids) // 39 * 39])
    monkeypatch.setattr(calibration, "WINDOWS", 2)
    np.testing.assert_array_equal(read_windows(path, tokenizer, context=40), windows[:2])


def test_methods_have_the_names_that_the_command_takes():
    assert tuple(METHODS) == CALIBRATED
    with pytest.raises(ValueError, match=r"hqq.*awq, gptq, smoothquant"):
        calibrated(random_checkpoint(CONFIGS["experts"], seed=0), np.zeros((1, 4), np.int32), method="hqq")
