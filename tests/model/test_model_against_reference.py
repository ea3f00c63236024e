"""The JAX model against the reference: every op, and the logits of a whole model, are within a proven error bound."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.model.cache import Cache, empty_cache
from llamaspec.model.forward import forward
from llamaspec.model.ops.attention import SPANS, attend
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.model.weights.params import Params
from llamaspec.reference import llama as reference
from llamaspec.reference.attention import causal_mask
from llamaspec.reference.config import Config
from llamaspec.verify.bounds import running_error as bound
from llamaspec.verify.bounds.running_error import Approx, exactly
from tests.support.random_models import CONFIGS, random_checkpoint
from tests.support.strategies import assert_within, seeds, share_of

CAPACITY = 8
CHUNK = 6
FLOAT32 = np.dtype(np.float32)
UNITS = {"float32": 0.0, "bfloat16": 2.0**-8}  # rounding by the dtype, in addition to float32's own

configs = st.sampled_from(sorted(CONFIGS))
narrow = st.sampled_from(sorted(name for name, config in CONFIGS.items() if config.dim < 64))
# Table, dtype, rows, and the largest number of cache blocks that attention reads.
forms = st.sampled_from(
    [("XLA", "float32", 3, 1), ("CPU", "float32", 1, 1), ("CPU", "bfloat16", 1, 1), ("XLA in blocks", "float32", 3, 3)]
)
# 8 tokens are not whole blocks of 3, so the last block overlaps the previous one.
TABLES = {
    "XLA": XLA,
    "CPU": CPU,
    "XLA in blocks": XLA._replace(attend=partial(attend, spans=SPANS._replace(longest=3))),
}


def jit(op):
    named = inspect.signature(op).parameters
    return jax.jit(op, static_argnames=[name for name in ("config", "window") if name in named])


JITTED = {name: Ops(*map(jit, table)) for name, table in TABLES.items()}


FORWARD = jax.jit(forward, static_argnames=("config", "ops"))


def row_lengths(rows: int):
    """Draw how many tokens of the first chunk are valid in each row."""
    return st.lists(st.integers(1, CHUNK), min_size=rows, max_size=rows)


def check(actual, expected: Approx):
    assert_within(actual, expected.value, expected.error)


@settings(max_examples=share_of(20, part=10))  # each example compiles up to 18 programs
@given(name=configs, form=forms, seed=seeds, data=st.data())
def test_every_op_is_within_its_bound(name, form, seed, data):
    """Each op is within its error bound if it gets the reference's input, for a prompt chunk and a decode step."""
    table, dtype, rows, blocks = form
    lengths = data.draw(row_lengths(rows), "tokens of each row")
    config, ops, unit = CONFIGS[name], JITTED[table], UNITS[dtype]
    np_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    checkpoint = random_checkpoint(config, seed=seed, dtype=np_dtype)
    params = load_params(checkpoint, dtype=np_dtype, positions=CAPACITY)
    exact = load_reference_params(checkpoint)
    rng = np.random.default_rng(seed)
    cache = empty_cache(config, batch=len(lengths), capacity=CAPACITY, dtype=np_dtype)

    starts = np.zeros(len(lengths), np.int32)
    for chunk, counts in ((CHUNK, np.array(lengths)), (1, np.ones(len(lengths), int))):
        tokens = rng.integers(0, config.vocab, (len(lengths), chunk)).astype(np.int32)
        cache = walk(params, exact, tokens, cache, starts, counts, config=config, ops=ops, unit=unit, blocks=blocks)
        starts = starts + counts.astype(np.int32)


def walk(
    params: Params,
    exact: reference.Params,
    tokens,
    cache: Cache,
    starts,
    counts,
    *,
    config: Config,
    ops,
    unit,
    blocks,
    weights_unit=0.0,
):
    index = (starts[:, None] + np.arange(tokens.shape[1])).astype(np.int32)
    positions = Positions(*map(jax.device_put, (index, *params.rope.on_host(index))))
    rows = [(row, slice(0, int(n)), int(start)) for row, (n, start) in enumerate(zip(counts, starts, strict=True))]
    x = jax.device_put(np.asarray(params.embedding)[tokens])
    layers = []
    for i, (layer, exact_layer) in enumerate(zip(params.layers, exact.layers, strict=True)):
        q, layer_cache = ops.norm_qkv(x, layer, cache.layers[i], positions, config=config)
        for row, new, start in rows:
            at = start + np.arange(new.stop)
            expected = bound.norm_qkv(exactly(np.asarray(x)[row, new]), exact_layer, at, config=config, unit=unit)
            k, v = (np.asarray(a)[row, :, at].reshape(new.stop, config.kv_heads, -1) for a in layer_cache)
            for actual, part in zip((np.asarray(q)[row, new], k, v), expected, strict=True):
                check(actual, part)

        h = ops.attend(q, layer_cache, positions, window=config.window(i), config=config)
        for row, new, start in rows:
            used = start + new.stop
            k, v = (exactly(np.asarray(a)[row, :, :used].swapaxes(0, 1)) for a in layer_cache)
            mask = causal_mask(new.stop, used, offset=start, window=config.window(i))
            attention = bound.attend(
                exactly(np.asarray(q)[row, new]), k, v, mask, unit=unit, blocks=blocks, weights_unit=weights_unit
            )
            check(np.asarray(h)[row, new], attention)

        before, x = x, ops.project_add(h, layer, x)
        for row, new, _ in rows:
            expected = bound.project_add(
                exactly(np.asarray(h)[row, new]), exact_layer, exactly(np.asarray(before)[row, new]), unit=unit
            )
            check(np.asarray(x)[row, new], expected)

        before = x
        if config.experts:
            x = ops.moe_add(x, layer, config=config)
            for row, new, _ in rows:
                expected = bound.moe_add(exactly(np.asarray(before)[row, new]), exact_layer, config=config, unit=unit)
                check(np.asarray(x)[row, new], expected)
        else:
            g = ops.norm_gate_up(x, layer, config=config)
            x = ops.down_add(g, layer, x)
            for row, new, _ in rows:
                inner = bound.norm_gate_up(exactly(np.asarray(before)[row, new]), exact_layer, config=config, unit=unit)
                check(np.asarray(g)[row, new], inner)
                expected = bound.down_add(
                    exactly(np.asarray(g)[row, new]), exact_layer, exactly(np.asarray(before)[row, new]), unit=unit
                )
                check(np.asarray(x)[row, new], expected)
        layers.append(layer_cache)

    logits = ops.norm_logits(x, params, config=config)
    for row, new, _ in rows:
        expected = bound.norm_logits(exactly(np.asarray(x)[row, new]), exact, config=config, unit=unit)
        check(np.asarray(logits)[row, new], expected)
    return Cache(layers, cache.lengths)


def composed_bound(
    exact: reference.Params, tokens: np.ndarray, config: Config, *, unit: float = 0.0, blocks: int = 1
) -> Approx:
    """Compute a whole model's logits for one sequence in float64, with a bound on the error of each logit.

    Each op's bound includes the error of its input. `unit` is the roundoff of the dtype; attention weights are
    rounded to it, too. The online softmax reads the keys in `blocks` blocks.
    """
    x, at = exactly(exact.embedding[tokens]), np.arange(len(tokens))
    for i, layer in enumerate(exact.layers):
        q, k, v = bound.norm_qkv(x, layer, at, config=config, unit=unit)
        mask = causal_mask(len(tokens), len(tokens), window=config.window(i))
        h = bound.attend(q, k, v, mask, unit=unit, blocks=blocks, weights_unit=unit)
        x = bound.project_add(h, layer, x, unit=unit)
        if config.experts:
            x = bound.moe_add(x, layer, config=config, unit=unit)
        else:
            x = bound.down_add(bound.norm_gate_up(x, layer, config=config, unit=unit), layer, x, unit=unit)
    return bound.norm_logits(x, exact, config=config, unit=unit)


@given(name=narrow, table=st.sampled_from(["CPU", "XLA"]), lengths=row_lengths(2), seed=seeds)
def test_the_whole_model_is_within_the_composed_bound(name, table, lengths, seed):
    """The logits of a narrow one-layer model are within the composed bound. For a larger model the bound is useless."""
    config = one_layer(CONFIGS[name])
    checkpoint = random_checkpoint(config, seed=seed)
    params, exact = load_params(checkpoint, dtype=FLOAT32, positions=CAPACITY), load_reference_params(checkpoint)
    tokens = np.random.default_rng(seed).integers(0, config.vocab, (len(lengths), CHUNK)).astype(np.int32)
    cache = empty_cache(config, batch=len(lengths), capacity=CAPACITY, dtype=FLOAT32)

    logits, _ = FORWARD(params, tokens, cache, lengths=np.array(lengths, np.int32), config=config, ops=TABLES[table])
    for row, length in enumerate(lengths):
        expected = composed_bound(exact, tokens[row, :length], config)
        value, _ = reference.forward(exact, tokens[row, :length], reference.empty_cache(config), config=config)
        np.testing.assert_allclose(expected.value, value, rtol=1e-12, atol=1e-12)  # it gives the reference's own values
        check(np.asarray(logits)[row, :length], expected)
        certain = expected.error < 1e6  # without tokens with experts that depend on rounding
        assert np.median(expected.error[certain]) < 0.1 * np.abs(value).max()  # the bound is useful


def one_layer(config: Config) -> Config:
    return replace(config, layers=1, windows=config.windows and config.windows[:1])
