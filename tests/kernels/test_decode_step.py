"""Kernels compute a tiny Llama: each op is within its error bound, and greedy decoding gives the same tokens as XLA."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.model.cache import LayerCache, empty_cache
from llamaspec.model.forward import decode, prefill, state_after
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import PROMPT, pallas_ops
from llamaspec.model.ops.gpu_products import MOST_SEQUENCES
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.sampling import as_arrays
from llamaspec.model.weights.loading import abstract_params, load_params
from llamaspec.pallas_kernels.parts.attention_split_float32 import ROWS
from llamaspec.pallas_kernels.parts.compat import interpreter
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config
from tests.kernels.kernel_ops import KERNEL_OPS
from tests.model.test_model_against_reference import UNITS, walk
from tests.support.random_models import random_checkpoint
from tests.support.refusals import mentions

TINY = Config(
    dim=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=64, context=128, eps=1e-5, theta=1e4, tied=True
)
CAPACITY = 136
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}


@pytest.mark.slow  # 7 to 12 s each
@pytest.mark.parametrize(("dtype", "biased"), [("float32", False), ("bfloat16", True)])
def test_every_op_of_a_chunk_and_of_a_step_is_within_its_bound(dtype, biased):
    """For two sequences of different lengths, each op of prefill and decode is within its error bound."""
    config = replace(TINY, layers=1, qkv_bias=biased, o_bias=biased, ffn_bias=biased)
    checkpoint = random_checkpoint(config, seed=1, dtype=DTYPES[dtype])
    params = load_params(checkpoint, dtype=DTYPES[dtype], positions=CAPACITY)
    exact = load_reference_params(checkpoint)
    cache = empty_cache(config, batch=2, capacity=CAPACITY, dtype=DTYPES[dtype])
    starts, lengths = np.zeros(2, np.int32), np.array([1, 71])
    rng = np.random.default_rng(0)
    with interpreter():
        routed, _ = pallas_ops(config, params, batch=2, capacity=CAPACITY)
        for ops, counts in ((routed, lengths), (KERNEL_OPS, np.ones(2, int))):
            tokens = rng.integers(0, config.vocab, (2, counts.max())).astype(np.int32)
            cache = walk(
                params, exact, tokens, cache, starts, counts, config=config, ops=Ops(*ops), unit=UNITS[dtype],
                blocks=CAPACITY // ROWS + 3, weights_unit=UNITS[dtype],
            )  # fmt: skip
            starts = starts + counts.astype(np.int32)


@pytest.mark.slow  # 20 s
def test_a_prompt_and_what_follows_are_those_of_the_plain_form():
    """Kernels and XLA give the same four greedy tokens after a prefill chunk that is longer than one tile of keys."""
    dtype, config = DTYPES["bfloat16"], replace(TINY, layers=1, tied=False)
    params = load_params(random_checkpoint(config, seed=3, dtype=dtype), dtype=dtype, positions=CAPACITY)
    tokens = np.random.default_rng(3).integers(0, config.vocab, (1, 64)).astype(np.int32)

    def text(ops: Ops) -> list[int]:
        cache = empty_cache(config, batch=1, capacity=CAPACITY, dtype=dtype)
        cache = jax.jit(partial(prefill, config=config, ops=ops))(params, tokens, cache, np.array([62], np.int32))
        step = jax.jit(partial(decode, config=config, ops=ops, greedy=True, burst=4))
        keys, stops = np.zeros((1, 2), np.uint32), np.array([-1], np.int32)
        begun = state_after(np.array([1]), np.zeros((1, config.vocab), bool))
        sampling = as_arrays(SamplingOptions(temperature=0.0))
        drawn, _, _, _ = step(params, begun, cache, keys, sampling, stops, np.int32(4))
        return np.asarray(drawn)[:, 0].tolist()

    with interpreter():
        ops, reasons = pallas_ops(config, params, capacity=CAPACITY)
        assert not any(reasons.values())
        actual = text(ops)
    assert actual == text(XLA)
    assert len(set(actual)) > 1


@pytest.mark.parametrize("batch", [1, MOST_SEQUENCES, MOST_SEQUENCES + 1])
def test_products_of_floats_are_kernels_for_few_sequences(batch):
    """With more sequences than the kernels support, XLA computes the matrix products, but attention stays a kernel."""
    dtype = DTYPES["bfloat16"]
    params = abstract_params(TINY, dtype=dtype, positions=CAPACITY)
    layer = params.layers[0]
    cache = jax.eval_shape(partial(empty_cache, TINY, batch=batch, capacity=CAPACITY, dtype=dtype)).layers[0]

    def shape_of(*sizes: int, dtype: np.dtype = dtype) -> Any:
        return jax.ShapeDtypeStruct((batch, 1, *sizes), dtype)

    x, h, q = shape_of(TINY.dim), shape_of(TINY.heads * TINY.head_dim), shape_of(TINY.heads, TINY.head_dim)
    at, angles = shape_of(dtype=np.dtype(np.int32)), shape_of(TINY.head_dim // 2, dtype=DTYPES["float32"])
    positions = Positions(at, angles, angles)
    calls = {
        "norm_qkv": (x, layer, cache, positions),
        "attend": (q, cache, positions),
        "project_add": (h, layer, x),
        "norm_gate_up": (x, layer),
        "down_add": (h, layer, x),
        "norm_logits": (x, params),
    }
    fixed: dict[str, Any] = {name: {"config": TINY} for name in ("norm_qkv", "norm_gate_up", "norm_logits")}
    fixed["attend"] = {"config": TINY, "window": None}

    def has_kernel(ops: Ops, name: str) -> bool:
        """Return whether the op `name` runs as one of our kernels.

        Only our kernels contain the instruction that waits for the previous kernel.
        """
        program = jax.make_jaxpr(partial(getattr(ops, name), **fixed.get(name, {})))(*calls[name])
        return "griddepcontrol_wait" in str(program)

    few = batch <= MOST_SEQUENCES
    ops, reasons = pallas_ops(TINY, params, batch=batch, capacity=CAPACITY)
    assert {name for name in calls if has_kernel(ops, name)} == set(calls if few else ["attend"])
    refusals = {name: reason for name, reason in reasons.items() if reason is not None}
    assert set(reasons) == {*calls, PROMPT}
    assert set(refusals) == (set() if few else set(calls) - {"attend"})
    assert all(mentions(reason, f"floats {MOST_SEQUENCES} vectors {batch} XLA") for reason in refusals.values())


def refused(config: Config) -> dict[str, str | None]:
    """Return, for each op, the reason why it is not a kernel in bfloat16 with the default context, or None."""
    params = abstract_params(config, dtype=DTYPES["bfloat16"], positions=4352)
    _, reasons = pallas_ops(config, params, capacity=4352)
    return reasons


@pytest.mark.slow  # 11 s
def test_what_the_kernels_refuse():
    """Kernels decode every published shape, except for stories-15m (heads of 48) and stories-42m (1376 columns)."""
    reasons_by_shape = {name: refused(config) for name, config in SHAPES.items()}
    accepted = {name for name, reasons in reasons_by_shape.items() if not any(reasons.values())}
    assert accepted == set(SHAPES) - {"stories-15m", "stories-42m"}
    assert (
        reasons_by_shape["stories-42m"]["down_add"]
        == "gemv takes columns of W in multiples of 256 in bfloat16, got 1376"
    )
    assert reasons_by_shape["stories-15m"]["attend"] == "attention_decode takes a head_dim of 64 or 128, got 48"
    moe = replace(TINY, experts=4, experts_per_token=2)
    assert refused(moe)["moe_add"] == "experts have no kernel"


def test_a_cache_of_codes_is_refused_by_name():
    params = abstract_params(TINY, dtype=DTYPES["float32"], positions=8)
    codes = jnp.zeros((1, TINY.kv_heads, 8, TINY.head_dim + 4), jnp.int8)
    at = Positions(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 32)), jnp.zeros((1, 1, 32)))
    cache, x, q = LayerCache(codes, codes), jnp.ones((1, 1, TINY.dim)), jnp.ones((1, 1, TINY.heads, TINY.head_dim))
    with pytest.raises(Unsupported, match=r"cache.*float32.*int8"):
        KERNEL_OPS.norm_qkv(x, params.layers[0], cache, at, config=TINY)
    with pytest.raises(Unsupported, match=r"cache.*float32.*int8"):
        KERNEL_OPS.attend(q, cache, at, window=None, config=TINY)
