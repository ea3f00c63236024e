"""Walking through a model reports the first wrong op, and not later ops that read its result."""

import inspect
from dataclasses import replace

import jax
import numpy as np
import pytest

from llamaspec.model.candidates.walking import random_checkpoint, tables, walkable
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.tensors import tensor_shapes
from llamaspec.verify.judging.walk import BEYOND, CONFIGS, first_wrong, report, table, walk, walk_through, weights

CONFIG = replace(CONFIGS["7 heads to 1"], ffn=8)
TOKENS = [np.array([3, 1, 4, 1, 5], np.int32), np.array([9], np.int32)]
FLOAT32 = np.dtype(np.float32)


def compiled(op):
    named = [name for name in ("config", "window") if name in inspect.signature(op).parameters]
    return jax.jit(op, static_argnames=named)


OPS = Ops(*map(compiled, XLA))


def steps(ops):
    checkpoint = random_checkpoint(CONFIG, weights(tensor_shapes(CONFIG), seed=0))
    model = replace(walkable(checkpoint, XLA, dtype=FLOAT32, rows=8), ops=ops)
    return list(walk(model, TOKENS, config=CONFIG, unit=0.0))


def test_a_right_model():
    walked = steps(OPS)
    assert first_wrong(walked) is None
    assert len(walked) == 2 * (2 * 7 + 1)  # chunks, layers, results of a block, logits
    assert 0 < max(step.ratio for step in walked) < 1
    assert report(walked, candidate="m", dtype="float32", seed=0, seconds=0.0).outcome == "within bounds"


@pytest.mark.parametrize("op", ["attend", "project_add", "norm_gate_up", "down_add"])
def test_the_first_wrong_op_is_named(op):
    calls = []

    def wrong(*arguments, **named):
        calls.append(op)
        return getattr(OPS, op)(*arguments, **named) * (1 + 1e-4 * (len(calls) >= 2))

    walked = steps(OPS._replace(**{op: wrong}))
    first = first_wrong(walked)
    assert first and first.name == f"layer 1 {op}"
    summary = report(walked, candidate="m", dtype="float32", seed=0, seconds=0.0)
    assert summary.outcome == "violated"
    assert summary.worst.finding and summary.worst.finding.message.startswith(
        f"layer 1 {op} is the first op out of bounds"
    )
    assert any(line.startswith(op) for line in table(walked))


def test_keys_in_the_wrong_place_are_a_fault_of_norm_qkv():
    def wrong(*arguments, **named):
        q, cache = OPS.norm_qkv(*arguments, **named)
        return q, cache._replace(k=cache.k[:, ::-1])

    first = first_wrong(steps(OPS._replace(norm_qkv=wrong)))
    assert first and first.name == "layer 0 norm_qkv (k)"


def test_a_result_that_is_not_finite_is_wrong():
    first = first_wrong(steps(OPS._replace(norm_logits=lambda *a, **n: OPS.norm_logits(*a, **n) * np.nan)))
    assert first and (first.name, first.ratio) == ("norm_logits", np.inf)


def test_a_table_of_ops_is_walked_through_from_python():
    checkpoint = random_checkpoint(CONFIG, weights(tensor_shapes(CONFIG), seed=3))
    model = walkable(checkpoint, tables()["cpu"].ops, dtype=FLOAT32, rows=26)
    heard = []
    walked, summary = walk_through(
        model, config=CONFIG, dtype="float32", seed=3, progress=lambda stage, share: heard.append((stage, share))
    )
    assert summary.outcome == "within bounds" and summary.examples == len(walked) == 3 * (2 * 7 + 1)
    assert summary.compared > 24 * CONFIG.vocab
    assert [stage for stage, _ in heard] == [step.name for step in walked]
    assert {share for _, share in heard} == {0.0, 0.5}


@pytest.mark.slow  # 4 s
def test_sinks_and_biased_experts_are_walked_through():
    config = replace(BEYOND["sinks, experts with biases"], layers=1, windows=None)
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=0))
    model = walkable(checkpoint, XLA, dtype=FLOAT32, rows=8)

    def forgets(*arguments, sinks, **named):
        return model.ops.attend(*arguments, **named)

    def wrong(model):
        wrong_step = first_wrong(list(walk(model, TOKENS, config=config, unit=0.0)))
        return wrong_step and wrong_step.op

    assert wrong(model) is None
    assert wrong(replace(model, ops=model.ops._replace(attend=forgets))) == "attend"
    experts = model.params.layers[0].ffn._replace(router_bias=None)
    layer = model.params.layers[0]._replace(ffn=experts)
    assert wrong(replace(model, params=model.params._replace(layers=[layer]))) == "moe_add"
