"""A GPU reads a long prompt in wide chunks, and weights by several threads: here on a CPU that is told to do so."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from model.checkpoints.checkpoint import CheckpointError
from model.checkpoints.codes import quantized
from model.llama import load_backend
from model.options import SamplingOptions
from model.running.device import Device
from model.running.jax_backend import JaxBackend
from model.running.programs import prompt_chunk, wide_chunk
from model.running.session import Session
from model.weights import quantizing
from model.weights.params import load_params
from tests.random_models import SMALL, random_checkpoint

CONFIG = replace(SMALL, context=200)
GREEDY = SamplingOptions(temperature=0.0)


@pytest.mark.parametrize("codes", [False, True])
def test_only_a_gpu_with_room_for_them_has_wide_chunks(codes):
    assert wide_chunk("cpu", 4096, codes=codes) is None
    assert wide_chunk("gpu", 1023, codes=codes) is None
    assert wide_chunk("gpu", 1024, codes=codes) == 1024 > prompt_chunk(SMALL, "gpu")
    assert wide_chunk("gpu", 2048, codes=codes) == (2048 if codes else 1024)


@pytest.fixture
def narrow_and_wide(monkeypatch) -> tuple[JaxBackend, JaxBackend]:
    monkeypatch.setattr("model.llama.prompt_chunk", lambda config, platform: 8)
    load = partial(load_backend, random_checkpoint(CONFIG, seed=0), greedy=True)
    narrow = load()
    monkeypatch.setattr("model.llama.wide_chunk", lambda platform, capacity, codes: 32)
    return narrow, load()  # type: ignore


def test_prompts_of_any_length_give_the_same_tokens_and_leave_the_padding_out(narrow_and_wide):
    """Whether the last part is padded, read in narrow chunks, or fills the context."""
    narrow, wide = narrow_and_wide
    for length in (1, 9, 25, 26, 33, 57, 58, 64, 65, 129, 190, 200):
        prompt = np.random.default_rng(length).integers(0, CONFIG.vocab, length).tolist()
        drawn = []
        for backend in (narrow, wide):
            session = Session(backend, vocab=CONFIG.vocab)
            bursts = session.bursts(prompt, max_new_tokens=8, options=GREEDY, seed=0, stops=frozenset())
            drawn.append([id for ids, _ in bursts for id in ids])
            if length < 200:
                assert len(drawn[-1]) == 8
        assert drawn[0] == drawn[1], length


def test_the_wide_program_is_compiled_by_the_first_long_prompt(narrow_and_wide):
    _, wide = narrow_and_wide
    compiled = []

    def listen(event: str, duration_secs: float, **about: str | int):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        cache = wide.extend(wide.start(), [1] * 24)
        assert compiled == []
        cache = wide.extend(cache, [1] * 25)
        assert compiled == ["jit(prefill)"]
        cache = wide.extend(cache, [1] * 32)
        assert compiled == ["jit(prefill)"] and int(cache.lengths[0]) == 81
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("scheme", [None, "q8", "mxfp4"])
def test_several_readers_read_what_one_reads(monkeypatch, scheme):
    """With weights that the device quantizes as a whole, as on a GPU, a part at a time, and by NumPy."""
    checkpoint = random_checkpoint(replace(CONFIG, tied=scheme == "q8"), seed=0)
    run = quantized(checkpoint, scheme) if scheme else checkpoint
    load = partial(load_params, run, dtype=np.dtype(np.float32), positions=8)
    one = bits(load())
    assert bits(load(readers=3, checked=False)) == one
    monkeypatch.setattr(quantizing, "FEW", 0)
    assert bits(load()) == one
    monkeypatch.setattr(quantizing, "default_device", lambda: Device("gpu", "a GPU", "8.0"))
    assert bits(load(readers=3)) == one


def test_a_weight_that_is_no_number_is_found_while_it_is_read():
    checkpoint = random_checkpoint(CONFIG, seed=0)
    name = "model.layers.1.mlp.down_proj.weight"
    broken = checkpoint.tensors[name].read().copy()
    broken[3, 5] = np.nan
    tensors = {**checkpoint.tensors, name: checkpoint.tensors[name]._replace(read=lambda: broken)}
    for readers in (1, 3):
        for scheme in (None, "q8"):
            whole = replace(checkpoint, tensors=tensors)
            run = quantized(whole, scheme) if scheme else whole
            with pytest.raises(CheckpointError, match=r"down_proj\.weight\[3, 5\] is nan"):
                load_params(run, dtype=np.dtype(np.float32), positions=8, checked=False, readers=readers)


def test_a_part_that_is_not_exact_is_quantized_by_the_reference(monkeypatch):
    checkpoint = random_checkpoint(CONFIG, seed=0)
    name = "model.layers.1.mlp.down_proj.weight"
    small = checkpoint.tensors[name].read() * np.float32(1e-38)
    tensors = {**checkpoint.tensors, name: checkpoint.tensors[name]._replace(read=lambda: small)}
    run = quantized(replace(checkpoint, tensors=tensors), "q8")
    load = partial(load_params, run, dtype=np.dtype(np.float32), positions=8)
    exact = bits(load())
    monkeypatch.setattr(quantizing, "FEW", 0)
    assert bits(load()) == exact
    monkeypatch.setattr(quantizing, "default_device", lambda: Device("gpu", "a GPU", "8.0"))
    assert bits(load()) == exact
