"""`trace` agrees with `verify`'s layer-by-layer walk, with the reference, and with the computed cost of a token."""

import json
from dataclasses import replace

import numpy as np
import pytest

from llamaspec.learn.trace import Trace, definitions, record, trace
from llamaspec.model.candidates.walking import random_checkpoint, walkable
from llamaspec.model.insight.cost import decode_cost
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tensors import tensor_shapes
from llamaspec.reference.llama import empty_cache, forward
from llamaspec.reference.softmax import softmax
from llamaspec.verify.judging.walk import BEYOND, CONFIGS, walk, weights
from tests.support.processes import REPOSITORY
from tests.support.refusals import mentions

TOKENS = [3, 14, 15, 9, 26, 5, 35]


def model_of(name, **changes):
    config = replace((CONFIGS | BEYOND)[name], **changes)
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=4))
    return config, checkpoint, walkable(checkpoint, XLA, dtype=np.dtype("float32"), rows=len(TOKENS))


def tell(config, model, **options) -> Trace:
    return trace(model, TOKENS, config=config, dtype="float32", **options)


# The third model of BEYOND differs in an activation, which has a contract; `llamaspec verify` walks through it.
@pytest.mark.sampled(3)  # 7 cases, 6 s
@pytest.mark.parametrize("name", [*CONFIGS, *list(BEYOND)[:2]])
def test_trace_distances_equal_the_walk_and_logits_the_reference(name):
    config, checkpoint, model = model_of(name)
    traces = [tell(config, model, position=i) for i in range(len(TOKENS))]
    steps = walk(model, [np.array(TOKENS, np.int32)], config=config, unit=0.0)
    for step in steps:
        shares = [
            output.share
            for trace_at in traces
            for visit in trace_at.visits
            if (visit.layer, visit.op) == (step.layer, step.op)
            for output in visit.outputs
            if output.name == step.output
        ]
        assert len(shares) == len(TOKENS) and max(shares) == step.ratio <= 1
    logits, _ = forward(load_reference_params(checkpoint), np.array(TOKENS), empty_cache(config), config=config)
    for position, trace_at in enumerate(traces):
        p = softmax(logits[position])
        assert [guess.id for guess in trace_at.next] == np.argsort(-p, kind="stable")[:5].tolist()
        np.testing.assert_allclose([guess.probability for guess in trace_at.next], np.sort(p)[::-1][:5], rtol=1e-4)
        last = trace_at.guesses[config.layers - 1]  # the guess after the last layer is the model's
        assert [guess.id for guess in last] == [guess.id for guess in trace_at.next]


def test_attention_weights_respect_the_mask():
    config, _, model = model_of("3 heads to 1, q/k norms, window")
    trace_at = tell(config, model)
    assert trace_at.position == 6
    for layer, seen in ((0, 3), (1, 7)):  # a window of 3, then none
        rows = trace_at.attention[layer]
        assert rows.shape == (config.heads, len(TOKENS))
        assert (np.count_nonzero(rows, axis=1) == seen).all() and (rows[:, -seen:] > 0).all()
        np.testing.assert_allclose(rows.sum(axis=1), 1, rtol=1e-14)
    assert tell(config, model, position=0).attention[1].tolist() == [[1.0]] * config.heads


@pytest.mark.parametrize("name", ["biases, scaled RoPE", "experts", "3 heads to 1, q/k norms, window"])
def test_what_ops_read_and_compute_adds_up_to_the_cost_of_a_token(name):
    config, _, model = model_of(name)
    trace_at = tell(config, model)
    cost = decode_cost(model.params, config, position=len(TOKENS) - 1, batch=1)
    assert sum(visit.flops for visit in trace_at.visits) == cost.flops
    outside = 0.0 if config.tied else config.dim * 4.0  # the row of the embedding
    norms = sum(
        np.asarray(a).nbytes
        for layer in model.params.layers
        for a in jax_leaves(layer)
        if np.asarray(a).ndim == 1 and not is_bias(layer, a)
    )
    assert sum(visit.bytes for visit in trace_at.visits) == cost.bytes - outside - norms - config.dim * 4


def test_an_op_reads_the_weights_of_its_own_layer():
    """`trace` counts an op's bytes from the weights of its own layer: a GGUF file may use more bits in some layers."""
    config, _, model = model_of("biases, scaled RoPE")
    recording = record(model, TOKENS, config=config, dtype="float32")
    first, *later_layers = model.params.layers
    wide = first._replace(o=first.o._replace(weight=np.asarray(first.o.weight, np.float64)))
    mixed = replace(model, params=model.params._replace(layers=[wide, *later_layers]))
    before, now = (
        {(visit.layer, visit.op): visit.bytes for visit in recorded.at(0).visits}
        for recorded in (recording, replace(recording, model=mixed))
    )
    more = first.o.weight.nbytes
    assert now == before | {(0, "project_add"): before[0, "project_add"] + more}


def jax_leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def is_bias(layer, array):
    norms = (layer.attention_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)
    return not any(array is norm for norm in norms)


def test_trace_shows_where_an_op_is_wrong():
    config, _, model = model_of("2 heads to 1, wide")

    def wrong(g, layer, x):
        return model.ops.down_add(g, layer, x) * 1.001

    trace_at = tell(config, replace(model, ops=model.ops._replace(down_add=wrong)))
    seen = {(visit.layer, visit.op) for visit in trace_at.visits for output in visit.outputs if output.share > 1}
    assert seen == {(0, "down_add"), (1, "down_add")}


def test_trace_computes_only_the_requested_layers():
    config, checkpoint, model = model_of("7 heads to 1")
    read = []
    tensors = {
        name: tensor._replace(read=lambda name=name, tensor=tensor: (read.append(name), tensor.read())[1])
        for name, tensor in checkpoint.tensors.items()
    }
    exact = load_reference_params(replace(checkpoint, tensors=tensors), lazily=True)
    part = tell(config, replace(model, exact=exact), layers=[1])
    assert {visit.layer for visit in part.visits} == {1, None} and set(part.guesses) == set(part.attention) == {1}
    assert not any(".layers.0." in name for name in read) and any(".layers.1." in name for name in read)
    full = tell(config, model)
    assert [v.outputs for v in part.visits] == [v.outputs for v in full.visits if v.layer != 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 7}, "expected a position from 0 to 6 .7 tokens., got 7"),
        ({"position": -8}, "expected a position from 0 to 6 .7 tokens., got -8"),
        ({"layers": [0, 2]}, "expected a layer from 0 to 1, got 2"),
    ],
)
def test_what_is_not_there_is_refused(options, message):
    config, _, model = model_of("7 heads to 1")
    with pytest.raises(ValueError, match=message):
        tell(config, model, **options)


def test_definitions_are_named_with_their_formula_and_line():
    for name, config in (CONFIGS | BEYOND).items():
        for op, layers in definitions(config).items():
            for layer in layers:
                with open(REPOSITORY / layer.file, encoding="utf-8") as file:
                    assert file.read().splitlines()[layer.line - 1].startswith(f"def {layer.name}("), (name, op)
                assert layer.formula
    assert [layer.name for layer in definitions(CONFIGS["experts"])["moe_add"]] == ["rmsnorm", "moe", "add"]


def test_the_command_shows_a_token_as_text_and_as_json(run):
    code, out, err = run("trace", "Once upon a time", "--layer", "9")
    assert code == 0 and "token 6 of 7: ' time'" in err
    assert "layer 9" in out and "layer 0" not in out and "head 3" in out
    assert max(map(len, out.splitlines())) <= 80
    value = json.loads(run("trace", "Once upon a time", "--layer", "9", "--position", "1", "--json")[1])
    assert value["position"] == 1 and value["tokens"][6]["text"] == " time"
    assert {visit["op"] for visit in value["visits"]} == set(value["definitions"])
    assert np.shape(value["attention"][0]["weights"]) == (4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Once", "--position", "9"], "--position 9 0"),
        (["Once", "--layer", "10"], "--layer 10 0 9"),
    ],
)
def test_the_command_refuses_what_is_not_there(run, arguments, message):
    code, out, err = run("trace", *arguments)
    assert code == 2 and mentions(err, message) and out == ""
