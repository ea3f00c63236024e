"""A prefill program and a decode program serve all prompts and turns. The weights are in memory only once.

Greedy decoding and sampling have different decode programs, so a model that is used for both has three programs.
"""

import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from llamaspec.model.cache import empty_cache
from llamaspec.model.chat.chat import Chat
from llamaspec.model.chat.template import find_template
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from llamaspec.model.forward import forward
from llamaspec.model.llama import Llama, load_backend
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import BackendName, RunOptions, SamplingOptions
from llamaspec.model.running.session import Session
from llamaspec.model.weights.loading import abstract_params
from tests.model.test_generation import VOCAB, Alphabet
from tests.support.processes import run_python
from tests.support.random_models import SMALL, random_checkpoint

CONFIG = replace(SMALL, vocab=VOCAB, context=700)


def make_llama(backend: BackendName = "jax", *, greedy: bool = False) -> Llama:
    running = load_backend(random_checkpoint(CONFIG, seed=0), RunOptions(backend=backend, greedy=greedy))
    return Llama(CONFIG, Alphabet(), running, stops=frozenset({257}))


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Yield a list that gets an entry for every program that XLA compiles from now on."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_prompts_of_any_length_compile_two_programs(compiled):
    llama = make_llama()
    for length, temperature in ((3, 1e-30), (40, 0.8), (300, 1.0)):
        sampling = SamplingOptions(temperature=temperature, top_k=length)
        tokens = llama.generate("x" * length, sampling=sampling, seed=length, max_new_tokens=20)
        assert "".join(token.text for token in tokens)
    chat = Chat(llama, find_template(llama.tokenizer))
    for question in ("Hello?", "And then?", "Thank you!"):
        assert list(chat.reply(question, seed=3, max_new_tokens=30))
    assert len(compiled) == 2, compiled
    assert llama.describe_run() == "float32 on CPU"


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize("greedy", [True, False])
def test_the_other_decode_program_is_compiled_once_on_demand(compiled, greedy):
    """A model loaded for greedy decoding compiles the sampling program once, when first needed, and vice versa.

    The texts equal the reference's when the temperature changes from turn to turn.
    """
    expected, reference = {}, make_llama("reference")
    for temperature in (0.0, 0.8, 1.2):
        expected[temperature] = ids_of(reference, temperature)
    assert len(set(map(tuple, expected.values()))) == 3
    compiled.clear()
    llama = make_llama(greedy=greedy)
    assert sorted(compiled) == ["jit(decode)", "jit(prefill)"]
    turns = (0.0, 0.0, 0.8, 0.0, 1.2, 0.8) if greedy else (0.8, 1.2, 0.8, 0.0, 0.8, 0.0)
    first = turns.index(0.8) if greedy else turns.index(0.0)
    for turn, temperature in enumerate(turns):
        assert ids_of(llama, temperature) == expected[temperature]
        assert compiled.count("jit(decode)") == (1 if turn < first else 2)
    assert len(compiled) == 3, compiled


def ids_of(llama: Llama, temperature: float) -> list[int]:
    generation = llama.generate("Hello", sampling=SamplingOptions(temperature=temperature), seed=3, max_new_tokens=24)
    return [token.id for token in generation]


@pytest.mark.slow  # 4 to 7 s each
@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("command", ["story", "chat"])
def test_a_command_compiles_only_its_own_programs(run, compiled, monkeypatch, tmp_path, command, temperature):
    """A command compiles only its decode program and, if it has a prompt, one prefill program.

    The greedy decode program and the sampling one have different names in JAX's cache.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    code, out, err = run(command, "--temperature", temperature, "--seed", "3", "--max-new-tokens", "3")
    assert code == 0 and out, err
    decoder = "decode_greedy" if temperature == "0" else "decode"
    names = sorted(re.sub("_[0-9a-f]{16}", "", name) for name in compiled)
    assert names == [f"jit({decoder})", *(["jit(prefill_128)"] if command == "chat" else [])]


def test_equal_layers_are_traced_once():
    config = replace(CONFIG, layers=5)
    shapes = abstract_params(config, dtype=np.dtype(np.float32), positions=64)
    cache = jax.eval_shape(partial(empty_cache, config, batch=1, capacity=64, dtype=np.dtype(np.float32)))
    text = jax.jit(partial(forward, config=config, ops=XLA)).lower(shapes, _ids(1, 8), cache).as_text()
    assert len(re.findall(r"func\.func private @_block", text)) == 1
    assert len(re.findall(r"call @_block", text)) == 5


def _ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


ARGUMENTS = """
from tests.model.running.test_programs import CONFIG, make_llama
from tests.support.random_models import random_checkpoint
from llamaspec import SamplingOptions
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions
checkpoint, llama = random_checkpoint(CONFIG, seed=0), make_llama("reference")
for call in (
    lambda: load_backend(checkpoint, RunOptions(backend="numpy")),
    lambda: load_backend(checkpoint, RunOptions(dtype="float16")),
    lambda: load_backend(checkpoint, RunOptions(context=701)),
    lambda: load_backend(checkpoint, RunOptions(kernels="fast")),
    lambda: SamplingOptions(top_k=1.5),
    lambda: llama.generate("x", max_new_tokens=2.5),
    lambda: llama.continue_ids(llama.session(), [300]),
    lambda: llama.continue_ids(llama.session(), []),
):
    try:
        call()
    except ValueError as error:
        print(error)
assert "".join(token.text for token in llama.generate("x", stop="zz", max_new_tokens=3, seed=1))
"""


def test_arguments_out_of_range_are_refused():
    """Arguments out of range are refused, even in this separate process, which has no run-time type checks."""
    done = run_python(ARGUMENTS)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    for word, line in zip(
        ["numpy", "float16", "701", "fast", "1.5", "2.5", "300", "at least one token"], lines, strict=False
    ):
        assert word in line
    assert len(lines) == 8


def test_more_stops_than_a_program_takes_are_refused():
    llama = make_llama()
    with pytest.raises(ValueError, match=r"64 .*65"):
        list(llama.continue_ids(llama.session(), [1, 2], stops=frozenset(range(65))))


@pytest.mark.slow  # 3 s
def test_both_backends_tell_the_same_story():
    llama, reference = make_llama(), make_llama("reference")
    prompts = ["", "a", "Hello", "x" * 70, "1 2 3", "\n", "🦊 fox", "The end", "AbC", "?!"]
    for seed, prompt in enumerate(prompts):
        for temperature in (0.0, 0.8):
            sampling = SamplingOptions(temperature=temperature)
            ids = []
            for model in (llama, reference):
                generation = model.generate(prompt, sampling=sampling, seed=seed, max_new_tokens=24)
                assert "".join(token.text for token in generation) == generation.completion
                ids.append(generation.ids)
            assert ids[0] == ids[1], (prompt, temperature)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_seen_tokens_and_the_end_carry_over_between_calls(temperature, ahead, reference_texts):
    """Seen tokens and the end of a text carry over between decode calls of three tokens each.

    A repetition penalty makes the text depend on the seen tokens, and the text ends in the middle of a call.
    """
    backend: Any = make_llama(greedy=temperature == 0)._backend
    backend.burst, backend.ahead = 3, ahead
    options, prompt, expected = penalized(temperature), [256, *b"abab"], reference_texts[temperature]
    assert drawn_by(backend, options) == expected
    stop = next(id for id in expected[10:] if expected.index(id) > 9)
    ended = expected[: expected.index(stop) + 1]
    assert drawn_by(backend, options, stops=frozenset({stop})) == ended

    seen = np.isin(np.arange(VOCAB), prompt)
    cache = backend.extend(backend.start(), prompt[:-1])
    drawing, draws = backend.begin(prompt[-1], seen=seen, seed=3, options=options, stops=[stop]), []
    for _ in range(len(ended) // 3 + 3):
        read, drawing, cache = backend.decode(cache, drawing, steps=3)
        draws.append(read())
    assert list(itertools.chain(*draws)) == ended and draws[-2:] == [[], []]


@pytest.fixture(scope="module")
def reference_texts() -> dict[float, list[int]]:
    backend = make_llama("reference")._backend
    texts = {temperature: drawn_by(backend, penalized(temperature)) for temperature in (0.0, 0.8)}
    assert all(len(text) == 40 for text in texts.values())
    return texts


def penalized(temperature: float) -> SamplingOptions:
    return SamplingOptions(temperature=temperature, repetition_penalty=1.3)


def drawn_by(backend: Any, options: SamplingOptions, *, stops: frozenset[int] = frozenset()) -> list[int]:
    bursts = Session(backend, vocab=VOCAB).bursts(
        [256, *b"abab"], max_new_tokens=40, options=options, seed=3, stops=stops
    )
    return list(itertools.chain(*(drawn for drawn, _ in bursts)))


LONG = """
from dataclasses import replace
import jax
import numpy as np
from llamaspec.model.cache import cache_bytes
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import weight_bytes
from tests.support.random_models import SMALL, random_checkpoint
config = replace(SMALL, dim=64, layers=1, heads=32, kv_heads=8, head_dim=128, context=32768)
backend = load_backend(random_checkpoint(config, seed=0), RunOptions(context=config.context, own_process=True))
cache = backend.rewind(backend.start(), config.context - backend.chunk)
jax.block_until_ready(backend.extend(cache, [1] * backend.chunk))
float32 = np.dtype(np.float32)
rows = cache_bytes(config, batch=1, capacity=config.context + backend.chunk, dtype=float32)
print(weight_bytes(abstract_params(config, dtype=float32, positions=0)) + rows)
"""


@pytest.mark.slow  # 5 s
def test_the_end_of_a_long_cache_takes_no_more_memory():
    """Attention at the end of a long cache needs no memory beyond the plan.

    If it kept all scores of 64 queries, 32 heads and 32,768 keys, it would need 268 MB more.
    """
    done = run_python(LONG)
    assert done.code == 0, done.err
    assert done.peak < int(done.out) + 400_000_000


WRITE = """
import sys
from llamaspec.model.checkpoints.llama2c.write import write_llama2c
from llamaspec.reference.config import Config
from tests.support.processes import run_python
from tests.support.random_models import random_checkpoint
config = Config(dim=1024, layers=8, heads=16, kv_heads=16, head_dim=64, ffn=2816, vocab=16000, context=512,
                eps=1e-5, theta=10_000.0)
write_llama2c(random_checkpoint(config, seed=0), sys.argv[1])
"""
GENERATE = """
import sys
import numpy as np
from llamaspec.model.cache import cache_bytes
from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.running.session import Session
checkpoint = open_checkpoint(sys.argv[1])
backend = load_backend(checkpoint, RunOptions(own_process=True))
session = Session(backend, vocab=checkpoint.config.vocab)
for _ in session.bursts([1, 2, 3], max_new_tokens=4, options=SamplingOptions(), seed=0, stops=frozenset()):
    pass
print(cache_bytes(checkpoint.config, batch=1, capacity=backend.capacity + backend.chunk, dtype=np.dtype(np.float32)))
"""


@pytest.mark.slow  # 13 s
def test_weights_are_in_memory_once(tmp_path):
    """Loading a model and drawing tokens needs at most the weights, the cache, and 400 MB for everything else."""
    model = tmp_path / "model.bin"
    assert run_python(WRITE, str(model)).code == 0
    weights = model.stat().st_size
    assert weights > 450_000_000  # a second copy would exceed the 400 MB
    done = run_python(GENERATE, str(model))
    assert done.code == 0, done.err
    assert done.peak < weights + int(done.out) + 400_000_000


def overflowing(largest: float) -> Checkpoint:
    """Make a model with logits beyond float32: the weights of its head are finite but too large."""
    checkpoint = random_checkpoint(CONFIG, seed=0)
    head = checkpoint.tensors["lm_head.weight"]
    huge = head._replace(read=lambda: np.full(head.shape, largest, np.float32))
    return replace(checkpoint, tensors={**checkpoint.tensors, "lm_head.weight": huge})


def test_logits_that_are_not_finite_are_refused():
    backend = load_backend(overflowing(3e38), RunOptions(context=16))
    with pytest.raises(FloatingPointError, match="the model's logits are NaN or infinite"):
        backend.logits([1, 2, 3])
    reference = load_backend(overflowing(3e38), RunOptions(context=16, backend="reference"))
    assert np.isfinite(reference.logits([1, 2, 3])).all()  # float64 can hold these logits


def test_the_command_writes_no_logits_that_are_not_finite(tmp_path, run):
    write_llama2c(overflowing(3e38), tmp_path / "model.bin")
    out = tmp_path / "logits.npy"
    request = ["logits", "--model", str(tmp_path / "model.bin"), "--tokens", "1,2", "--out", str(out)]
    code, printed, errors = run(*request)
    assert (code, printed, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("error: ") and "logits" in errors
    assert not out.exists() and [file.name for file in tmp_path.iterdir() if "logits" in file.name] == []
