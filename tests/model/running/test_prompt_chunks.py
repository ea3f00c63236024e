"""Behavior on a GPU, tested on a CPU: wide chunks for long prompts, and several threads that read weights."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.device import Device, Room
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.parallel.load import load_parallel
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.memory import memory_of
from llamaspec.model.running.programs import Layout, first_programs, prompt_chunk, wide_chunks
from llamaspec.model.running.session import Session
from llamaspec.model.running.start_clock import StartClock
from llamaspec.model.weights import loading, quantizing
from llamaspec.model.weights.loading import abstract_params, load_params, no_progress
from tests.support.random_models import SMALL, random_checkpoint

CONFIG = replace(SMALL, context=200)
GREEDY = SamplingOptions(temperature=0.0)


@pytest.mark.parametrize("codes", [False, True])
def test_only_a_gpu_with_room_for_them_has_wide_chunks(codes):
    assert wide_chunks("cpu", 4096, codes=codes) == wide_chunks("gpu", 511, codes=codes) == ()
    assert wide_chunks("gpu", 1023, codes=codes) == (512,) and prompt_chunk(SMALL, "gpu") < 512
    assert wide_chunks("gpu", 1024, codes=codes) == (512, 1024)
    assert wide_chunks("gpu", 2047, codes=codes) == (512, 1024)
    assert wide_chunks("gpu", 2048, codes=codes) == ((512, 1024, 2048) if codes else (512, 1024))


def test_codes_of_medium_prompts_are_decoded_once_for_a_thousand_tokens():
    layout = Layout(1, 8192, 256, 1, np.dtype(np.float32), wide=wide_chunks("gpu", 8192, codes=True))
    expected = {1023: [1024], 1535: [1024, 512], 1792: [1024, 512, 256], 1793: [2048], 4095: [2048, 2048]}
    expected |= {512: [512], 768: [512, 256], 769: [1024]}
    assert {tokens: [width for width, _ in layout.parts(tokens)] for tokens in expected} == expected


@pytest.fixture
def narrow_and_wide(monkeypatch) -> tuple[JaxBackend, JaxBackend]:
    monkeypatch.setattr("llamaspec.model.llama.prompt_chunk", lambda config, platform: 8)
    load = partial(load_backend, random_checkpoint(CONFIG, seed=0), RunOptions(greedy=True))
    narrow = load()
    monkeypatch.setattr("llamaspec.model.llama.wide_chunks", lambda platform, capacity, codes: (16, 32))
    return narrow, load()  # type: ignore


def test_prompts_of_any_length_give_the_same_tokens_and_leave_the_padding_out(narrow_and_wide):
    """Narrow and wide chunks give the same tokens for prompts of any length. The padding does not change the cache."""
    narrow, wide = narrow_and_wide
    for length in (1, 9, 10, 17, 18, 25, 26, 33, 42, 43, 57, 58, 64, 65, 129, 190, 200):
        prompt = np.random.default_rng(length).integers(0, CONFIG.vocab, length).tolist()
        drawn = []
        for backend in (narrow, wide):
            session = Session(backend, vocab=CONFIG.vocab)
            bursts = session.bursts(prompt, max_new_tokens=8, options=GREEDY, seed=0, stops=frozenset())
            drawn.append([id for ids, _ in bursts for id in ids])
            if length < 200:
                assert len(drawn[-1]) == 8
        assert drawn[0] == drawn[1], length


class Planned(Exception):
    """Raised after planning, to stop before anything is compiled."""


@pytest.mark.parametrize(
    ("room_for", "less", "wide"), [(32, 0, (16, 32)), (32, 1, (16,)), (16, 1, ()), (8, 0, ()), (8, 1, None)]
)
@pytest.mark.parametrize("in_other_processes", [9, 1])
def test_several_devices_read_by_the_widest_chunks_that_have_room(
    monkeypatch, room_for, less, wide, in_other_processes
):
    """Several devices process a prompt in the widest chunks for which the device with the least free memory has room.

    The plan must include the memory of wide chunks. A plan for narrow chunks only would be too small.
    """
    dtype = np.dtype(np.float32)
    layout = Layout(1, 200, 8, 1, dtype, wide=(16, 32))
    shapes = abstract_params(CONFIG, dtype=dtype, positions=layout.rows)
    sizes = {"batch": 1, "context": 200, "chunk": 8, "platform": "gpu", "cache_dtype": dtype}
    free = memory_of(shapes, CONFIG, wide=room_for, **sizes).peak - less
    layouts = []

    def plan_only(*_, layout: Layout, **__):
        layouts.append(layout)
        raise Planned

    monkeypatch.setattr("llamaspec.model.parallel.load.room", lambda: Room(free))
    monkeypatch.setattr("llamaspec.model.parallel.load.all_min", lambda number: min(number, in_other_processes))
    monkeypatch.setattr("llamaspec.model.parallel.load.compile_programs", plan_only)
    with pytest.raises(MemoryError if wide is None else Planned):
        load_parallel(
            random_checkpoint(CONFIG, seed=0),
            RunOptions(kernels="xla", greedy=True),
            **{"layout": layout, "dtype": dtype, "device": Device("gpu", "a GPU", "8.0")},
            progress=no_progress,
            clock=StartClock(),
        )
    assert [layout.wide for layout in layouts] == ([] if wide is None else [wide[:in_other_processes]])


@given(st.integers(0, 5000), st.integers(1, 300), st.sets(st.integers(0, 2100), max_size=3))
@example(768, 256, {256, 768})
@example(1793, 256, {256, 1792})
def test_a_prompt_is_cut_into_full_chunks_and_a_shorter_last_one(count, chunk, more):
    layout = Layout(1, 5000, chunk, 1, np.dtype(np.float32), wide=tuple(chunk + extra for extra in sorted(more)))
    parts = [*layout.parts(count)]
    assert sum(tokens for _, tokens in parts) == count
    assert all(width == tokens for width, tokens in parts[:-1])
    assert sum(width for width, _ in parts) < count + chunk  # so `Layout.rows` suffices
    assert [width for width, _ in parts] == sorted((width for width, _ in parts), reverse=True)
    # A session passes a prompt in pieces, which are split as the whole prompt would be.
    pieces = range(0, count, layout.widest)
    assert [part for start in pieces for part in layout.parts(min(layout.widest, count - start))] == parts


def test_programs_for_the_first_prompt_are_compiled_at_once():
    layout = Layout(1, 4096, 256, 1, np.dtype(np.float32), wide=(512, 1024))
    expected = {None: ["prefill_256"], 0: [], 1: [], 2: ["prefill_256"], 257: ["prefill_256"], 258: ["prefill_512"]}
    expected |= {600: ["prefill_512", "prefill_256"], 2049: ["prefill_1024"]}
    for tokens, names in expected.items():
        assert first_programs(layout, greedy=True, prompt=tokens) == ["decode_greedy", *names]


@pytest.fixture
def compiled():
    """Record the names of the functions that XLA compiles."""
    names = []

    def listen(event: str, duration_secs: float, **about: str | int):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_wide_program_is_compiled_by_the_first_prompt_that_needs_it(narrow_and_wide, compiled):
    _, wide = narrow_and_wide
    cache = wide.extend(wide.start(), [1] * 8)
    assert compiled == []
    cache = wide.extend(cache, [1] * 25)
    assert compiled == ["jit(prefill)"]
    cache = wide.extend(cache, [1] * 32)
    assert compiled == ["jit(prefill)"]
    cache = wide.extend(cache, [1] * 9)
    assert compiled == ["jit(prefill)"] * 2 and int(cache.lengths[0]) == 74


@pytest.mark.usefixtures("narrow_and_wide")
def test_a_prompt_of_known_length_compiles_what_reads_it_and_nothing_else(compiled):
    backend = load_backend(random_checkpoint(CONFIG, seed=0), RunOptions(greedy=True, prompt=18))
    assert isinstance(backend, JaxBackend)
    before = compiled.count("jit(prefill)")
    backend.extend(backend.start(), [1] * 17)
    assert (before, compiled.count("jit(prefill)")) == (2, 2)  # chunks of 16 and of 8


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("scheme", [None, "q8", "mxfp4"])
def test_several_reader_threads_load_the_same_weights(monkeypatch, scheme):
    """Several reader threads load the same bits as one thread, whether the device or NumPy quantizes."""
    checkpoint = random_checkpoint(replace(CONFIG, tied=scheme == "q8"), seed=0)
    run = quantized(checkpoint, scheme) if scheme else checkpoint
    load = partial(load_params, run, dtype=np.dtype(np.float32), positions=8)
    expected = bits(load())
    assert bits(load(readers=3, checked=False)) == expected
    monkeypatch.setattr(quantizing, "FEW", 0)
    assert bits(load()) == expected
    assert bits(load(readers=3, device=Device("gpu", "a GPU", "8.0"))) == expected


def test_several_reader_threads_begin_with_the_largest_arrays(monkeypatch):
    """Several reader threads load the largest arrays first.

    Their temporary copies then need memory while the device still holds few weights.
    """
    checkpoint, sizes = random_checkpoint(CONFIG, seed=0), []

    class Pool(loading.ThreadPoolExecutor):
        def submit(self, place, *names, **options):
            sizes.append(sum(checkpoint.tensors[name].bytes for name in names))
            return super().submit(place, *names, **options)

    monkeypatch.setattr(loading, "ThreadPoolExecutor", Pool)
    load_params(checkpoint, dtype=np.dtype(np.float32), positions=8, readers=2)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2


def test_a_weight_that_is_no_number_is_found_while_it_is_read():
    checkpoint = random_checkpoint(CONFIG, seed=0)
    name = "model.layers.1.mlp.down_proj.weight"
    broken = checkpoint.tensors[name].read().copy()
    broken[3, 5] = np.nan
    tensors = {**checkpoint.tensors, name: checkpoint.tensors[name]._replace(read=lambda: broken)}
    for readers in (1, 3):
        for scheme in (None, "q8"):
            full = replace(checkpoint, tensors=tensors)
            run = quantized(full, scheme) if scheme else full
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
    assert bits(load(device=Device("gpu", "a GPU", "8.0"))) == exact
