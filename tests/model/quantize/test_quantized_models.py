"""Quantized models compute what the reference computes with the decoded weights."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec import SamplingOptions, load
from llamaspec.commands.options import MIXTURE_NAMES, SCHEME_NAMES
from llamaspec.model.cache import empty_cache
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.gguf.mixtures import MIXTURES
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.forward import forward
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.reference.quantizers.schemes import SCHEMES
from llamaspec.verify.bounds import running_error
from tests.model.test_model_against_reference import composed_bound, one_layer
from tests.support.families import is_matrix
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.support.strategies import assert_within, seeds, share_of

FLOAT32 = np.dtype(np.float32)
PROMPT = "Once upon a time"
FORWARD = jax.jit(forward, static_argnames=("config", "ops"))
NARROW = sorted(name for name, config in CONFIGS.items() if config.dim < 64)


@pytest.mark.slow  # 16 s
@settings(max_examples=share_of(8))  # each example compiles two programs
@given(name=st.sampled_from(NARROW), scheme=st.sampled_from(sorted(SCHEMES)), table=st.booleans(), seed=seeds)
def test_logits_are_within_the_composed_bound(name, scheme, table, seed):
    """Logits are within the unquantized model's error bound, plus one rounding per product for the scale."""
    config = one_layer(CONFIGS[name])
    checkpoint = quantized(random_checkpoint(config, seed=seed), scheme)
    params, exact = load_params(checkpoint, dtype=FLOAT32, positions=8), load_reference_params(checkpoint)
    tokens = np.random.default_rng(seed).integers(0, config.vocab, 5)
    cache = empty_cache(config, batch=1, capacity=8, dtype=FLOAT32)
    ops = CPU if table else XLA
    rows = []
    for chunk in np.split(tokens.astype(np.int32), [4]):  # a prompt, then one token
        logits, cache = FORWARD(params, chunk[None], cache, config=config, ops=ops)
        rows.append(np.asarray(logits)[0])
    gamma = running_error.gamma
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_error, "gamma", lambda n: gamma(n + 1))
        expected = composed_bound(exact, tokens, config)
    assert_within(np.concatenate(rows), expected.value, expected.error)


@pytest.mark.slow  # 4 to 6 s each
@pytest.mark.parametrize("scheme", ["q8", "q4"])
def test_both_backends_tell_the_same_story(scheme):
    stories = []
    for backend in ("jax", "reference"):
        llama = load("stories", context=64, quantize=scheme, backend=backend, greedy=True)
        generation = llama.generate(PROMPT, max_new_tokens=24, sampling=SamplingOptions(temperature=0.0))
        stories.append([token.id for token in generation])
    assert stories[0] == stories[1]
    assert len(stories[0]) == 24


def test_what_is_quantized():
    """All matrices are quantized except for embeddings, tied heads and routers."""
    for config in CONFIGS.values():
        tensors = quantized(random_checkpoint(config, seed=0), "q8").tensors
        plain = {name for name, tensor in tensors.items() if tensor.codes is None}
        assert {name for name in plain if len(tensors[name].shape) == 2} == {
            name for name in tensors if "embed_tokens" in name or ".gate." in name
        }
        assert all(is_matrix(name) == (name not in plain) for name in tensors)


def test_a_scheme_takes_a_tensor_that_is_quantized_already():
    checkpoint = random_checkpoint(CONFIGS["2 to 1, wide, tied"], seed=1)
    once = quantized(checkpoint, "q4")
    again = quantized(once, "q4")
    for name, tensor in once.tensors.items():
        np.testing.assert_array_equal(tensor.read(), again.tensors[name].read())


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match=r"q5.*q8,"):
        load("stories", quantize="q5")
    assert SCHEME_NAMES == tuple(SCHEMES) and MIXTURE_NAMES == tuple(MIXTURES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scheme", "form"), [("q4", "int4"), ("nf4", "nf4")])
def test_converting_quantized_equals_quantizing_at_load(run, tmp_path, scheme, form):
    request = ("--temperature", "0", "--max-new-tokens", "12", "--context", "64", "--json", "--backend", "reference")
    written = str(tmp_path / scheme)
    code, out, err = run("convert", "stories", written, "--to", "safetensors", "--quantize", scheme)
    assert (code, out) == (0, ""), err
    texts = []
    for model in (("--model", written), ("--quantize", scheme)):
        code, out, err = run("generate", PROMPT, *model, *request)
        assert code == 0, err
        texts.append(json.loads(out)["text"])
    assert texts[0] == texts[1]
    code, out, _ = run("inspect", written, "--json")
    description = json.loads(out)
    stored = {tensor["dtype"] for tensor in description["tensors"] if is_matrix(tensor["name"])}
    assert (code, stored) == (0, {form})
    assert description["bytes"] < sum(tensor.bytes for tensor in open_checkpoint("stories").tensors.values()) / 2


def test_options_that_mean_nothing_are_refused(run, tmp_path):
    code, out, err = run("generate", PROMPT, "--quantize", "q5")
    assert (code, out) == (2, "") and "'q5' is not one of 'q8'" in err
    code, out, err = run("convert", "stories", str(tmp_path / "x.bin"), "--to", "llama2c", "--quantize", "q8")
    assert (code, out) == (2, "") and re.search("q8 .*llama2c .*q8_0", err)


def written_logits(run: Callable, folder: Path, ids: str, forms: Iterable[Sequence[str]]) -> list[np.ndarray]:
    """Compute logits of the built-in model with `llamaspec logits`, once for each list of options in `forms`."""
    logits = []
    for options in forms:
        file = folder / f"{len(logits)}.npy"
        code, _, err = run("logits", "--tokens", ids, "--out", str(file), "--context", "64", *options)
        assert code == 0, err
        logits.append(np.load(file))
    return logits


@pytest.mark.slow  # 9 s
def test_logits_of_a_quantized_model(run, tmp_path):
    """Both backends use the same quantized weights; their logits differ from the unquantized model's."""
    forms = ("--quantize", "q4"), ("--quantize", "q4", "--backend", "reference"), ("--backend", "reference")
    logits = written_logits(run, tmp_path, "1,5,9,200", forms)
    quantized, exact, plain = logits
    assert [rows.dtype.name for rows in logits] == ["float32", "float64", "float64"]
    assert np.abs(quantized - exact).max() < np.abs(exact - plain).mean() / 1000
