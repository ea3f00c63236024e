"""Families beyond Llama: both backends agree with transformers, and models survive every file format."""

import json
from dataclasses import fields, replace
from functools import cache
from itertools import islice

import jax
import numpy as np
import pytest

from llamaspec.model.cache import empty_cache
from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.family import families
from llamaspec.model.forward import forward
from llamaspec.model.llama import load_backend
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.options import RunOptions
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.reference import llama
from llamaspec.reference.config import Config, for_sequences
from llamaspec.reference.logsumexp import logsumexp
from llamaspec.reference.rope import DynamicScaling, YarnScaling
from tests.goldens.make_families import FOLDER, SEQ, write_checkpoint

GOLDENS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
FLOAT32 = np.dtype(np.float32)
FORWARD = jax.jit(forward, static_argnames=("config", "ops"))
# Two float32 computations of a model differ by at most this share of the largest logit: see
# tests/model/test_forward.py.
AGREE = 1e-5
# llama.cpp has a fixed value for a switch that these models set differently; each entry quotes the refusal.
NO_GGUF = {
    "exaone4": "sliding windows",
    "gemma3-text": "attention scale",
    "llama-dynamic": "dynamic rescaling",
    "phi3": "sliding windows",
    "qwen3-yarn": "YaRN with other numbers",
    "starcoder2": "sliding windows",
}

# Compiling a decode step takes a second; together these models have most switches.
DECODED = ("gemma2", "olmo3", "phi4-mini", "qwen2-moe")
# `make test` runs JAX on these models, which together have every switch; RoPE rescaling has its own tests.
FIRST = (*DECODED, "exaone4", "gpt-oss-mxfp4", "granite", "nemotron", "stablelm2-12b")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes the checkpoint of a golden once, and opens it."""

    @cache
    def of(name: str) -> Checkpoint:
        directory = tmp_path_factory.mktemp(name)
        write_checkpoint(directory, GOLDENS[name])
        return as_short(open_checkpoint(directory))

    return of


def as_short(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with LongRoPE's factors for short sequences, such as those of the goldens."""
    return replace(checkpoint, config=for_sequences(checkpoint.config, SEQ))


def exact_logits(checkpoint: Checkpoint, golden: dict) -> np.ndarray:
    config = checkpoint.config
    params = load_reference_params(checkpoint)
    return llama.forward(params, np.array(golden["tokens"]), llama.empty_cache(config), config=config)[0]


def assert_golden(logits: np.ndarray, golden: dict) -> None:
    expected = np.array(golden["logits"])
    assert np.abs(expected).max() >= 4
    np.testing.assert_allclose(logits[golden["positions"]], expected, rtol=0, atol=AGREE * np.abs(expected).max())


def test_every_family_beyond_the_first_has_a_golden():
    first = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
    assert families().keys() - first <= {golden["config"]["model_type"] for golden in GOLDENS.values()}


@pytest.mark.parametrize("name", GOLDENS)
def test_the_reference_has_the_logits_and_the_text_of_transformers(name, written):
    golden, checkpoint = GOLDENS[name], written(name)
    assert_golden(exact_logits(checkpoint, golden), golden)
    text = llama.greedy(load_reference_params(checkpoint), np.array(golden["tokens"][:8]), config=checkpoint.config)
    assert list(islice(text, len(golden["greedy"]))) == golden["greedy"]


@pytest.mark.sampled(9, first=True)  # 1 to 2 s each
@pytest.mark.parametrize("name", sorted(GOLDENS, key=lambda name: name not in FIRST))
def test_jax_has_the_logits_and_the_text_of_transformers(name, written):
    golden, checkpoint = GOLDENS[name], written(name)
    config = checkpoint.config
    params = load_params(checkpoint, dtype=FLOAT32, positions=32)

    def run(tokens: list[int], cache):
        return FORWARD(params, np.array([tokens], np.int32), cache, config=config, ops=CPU)

    empty = empty_cache(config, batch=1, capacity=32, dtype=FLOAT32)
    assert_golden(np.asarray(run(golden["tokens"], empty)[0])[0], golden)
    tokens, kv_cache = golden["tokens"][:8], empty
    for step in range(7 if name not in DECODED else 0, 7 + len(golden["greedy"])):
        if name in DECODED:  # token by token
            logits, kv_cache = run([tokens[step]], kv_cache)
        else:  # by the program that is compiled already: later tokens do not affect a position
            logits = run([*tokens, *[0] * (SEQ - len(tokens))], empty)[0][:, step]
        if step >= 7:
            tokens = [*tokens, int(np.argmax(logits))]
    assert tokens[8:] == golden["greedy"]


@pytest.mark.sampled(13)  # 25 cases, 2 s
@pytest.mark.parametrize("name", GOLDENS)
def test_written_for_transformers_it_is_the_same_model(name, written, tmp_path):
    checkpoint = written(name)
    write_huggingface(checkpoint, tmp_path / "again")
    again = as_short(open_checkpoint(tmp_path / "again"))
    assert again.config == checkpoint.config
    assert_golden(exact_logits(again, GOLDENS[name]), GOLDENS[name])


@pytest.mark.sampled(13)  # 25 cases, 1 s
@pytest.mark.parametrize("name", GOLDENS)
def test_gguf_holds_the_same_model_or_the_switch_is_named(name, written, tmp_path):
    checkpoint = written(name)
    if name in NO_GGUF:
        with pytest.raises(CheckpointError, match=NO_GGUF[name]):
            write_gguf(checkpoint, tmp_path / "model.gguf")
        return
    write_gguf(checkpoint, tmp_path / "model.gguf")
    again = as_short(open_checkpoint(tmp_path / "model.gguf"))
    assert replace(again.config, scaling=None) == replace(checkpoint.config, scaling=None)
    logits = exact_logits(again, GOLDENS[name])
    assert_golden(logits, GOLDENS[name])
    expected = np.array(GOLDENS[name]["llama_cpp"])
    if isinstance(again.config.scaling, YarnScaling) and not again.config.scaling.truncate:
        # In every model, llama.cpp rounds YaRN's two dimension indices.
        rounded = replace(again.config, scaling=replace(again.config.scaling, truncate=True))
        logits = exact_logits(replace(again, config=rounded), GOLDENS[name])
    # llama.cpp computes in float32, with a float16 table for GELU.
    limit = 2.0**-8 if again.config.activation == "gelu_tanh" else AGREE * np.abs(logits[-1]).max()
    assert np.abs(logits[-1] - logsumexp(logits[-1:]) - expected).max() <= limit


def test_the_context_decides_which_form_longrope_has(tmp_path):
    golden = GOLDENS["phi3-long"]  # original context: 16 positions
    write_checkpoint(tmp_path, golden)

    def logits(context: int) -> np.ndarray:
        backend = load_backend(open_checkpoint(tmp_path), RunOptions(context=context, backend="reference"))
        return backend.logits(golden["tokens"][:context])

    assert_golden(logits(SEQ), golden)
    assert np.abs(logits(16) - logits(SEQ)[:16]).max() > 0.1


# These switches choose which arrays a model has: without them the model has other tensors.
CHOICES = ("pre_norms", "post_norms", "wide_qk_norm", "shared_ffn", "gated", "head_qk_norm", "parallel_residual")
PLAIN = {field.name: field.default for field in fields(Config)}


@pytest.mark.sampled(9)  # 25 cases, 2 s
@pytest.mark.parametrize("name", GOLDENS)
def test_a_golden_sees_every_switch_of_its_family(name, written):
    """The golden's logits change by more than the allowed error if one option of its family is reset to its default."""
    golden, checkpoint = GOLDENS[name], written(name)
    right = exact_logits(checkpoint, golden)
    switches = [switch for switch in ("scaling", "windows", *checkpoint.config.beyond_llama()) if switch not in CHOICES]
    for switch in switches:
        if getattr(checkpoint.config, switch) is None or isinstance(checkpoint.config.scaling, DynamicScaling):
            continue
        changes = {switch: PLAIN[switch]} | ({"scaling": None} if switch == "rotary_dim" else {})  # LongRoPE's pairs
        if switch == "activation" and not checkpoint.config.gated:
            changes = {switch: "relu2" if checkpoint.config.activation == "gelu_tanh" else "gelu_tanh"}
        without = replace(checkpoint, config=replace(checkpoint.config, **changes))
        assert np.abs(exact_logits(without, golden) - right).max() > 100 * AGREE * np.abs(right).max(), switch
