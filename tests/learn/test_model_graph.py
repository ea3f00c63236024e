"""`inspect --graph` draws every operator and tensor of the graph, and nothing covers anything else."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from llamaspec.learn.model_graph.boxes import BlockGraph, Box, read_graph
from llamaspec.learn.model_graph.drawing import HIGH, WIDE, draw_graph
from llamaspec.learn.model_graph.layout import layout
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.onnx.graph import llama_graph
from llamaspec.model.checkpoints.open import open_checkpoint
from tests.commands.test_cli import assert_refused
from tests.support.processes import REPOSITORY
from tests.support.random_models import SMALL, random_checkpoint

SVG = "{http://www.w3.org/2000/svg}"
PICTURE = REPOSITORY / "docs/images/block.svg"
CONFIGS = {
    "biases, tied": replace(SMALL, qkv_bias=True, o_bias=True, ffn_bias=True, tied=True),
    "window, q/k norms": replace(SMALL, heads=4, kv_heads=1, qk_norm=True, windows=(3, None)),
    "more norms, caps": replace(SMALL, post_norms=True, activation="gelu_tanh", attention_cap=50.0, logit_cap=30.0),
    "scales": replace(SMALL, embedding_scale=2.0, residual_scale=0.5, logit_divisor=4.0),
    "parallel, norms of each head": replace(
        SMALL, layer_norm=True, parallel_residual=True, head_qk_norm=True, rotary_dim=2
    ),
    "q/k norms, no RoPE": replace(SMALL, kv_heads=2, qk_norm=True, rotary_layers=(False, True)),
    "no gate, no RoPE": replace(SMALL, gated=False, activation="relu2", rotary_layers=(False, True)),
}


def graph_of(checkpoint: Checkpoint) -> BlockGraph:
    return read_graph(llama_graph(checkpoint, data="x").model)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request) -> Checkpoint:
    return random_checkpoint(CONFIGS[request.param], seed=0)


def boxes(graph: BlockGraph) -> list[Box]:
    return [graph.embedding, *(box for block in graph.blocks for box in block), *graph.after]


def test_every_tensor_belongs_to_a_box(checkpoint):
    graph = graph_of(checkpoint)
    weights = {weight.name: weight for box in boxes(graph) for weight in box.weights}
    tables = {name for name in weights if name.startswith("rope.")}
    tensors = {name: (tensor.shape, tensor.bytes) for name, tensor in checkpoint.tensors.items()}
    assert Counter(weights[name][1:] for name in weights.keys() - tables) == Counter(tensors.values())
    assert len(tables) == 2 and len(graph.blocks) == checkpoint.config.layers
    for box in boxes(graph):
        assert box.shape[:2] == ("batch", "seq") and all(isinstance(axis, int) and axis > 0 for axis in box.shape[2:])


def test_every_box_reads_an_earlier_box_of_the_drawing(checkpoint):
    """The boxes of a block form one graph, from its input to its result."""
    block, start = graph_of(checkpoint).blocks[0], graph_of(checkpoint).embedding.name
    known = {start}
    for box in block:
        assert known & {*box.inputs}, box
        known.add(box.name)
    assert {box.name for box in block[:-1]} <= {name for box in block for name in box.inputs}


def test_no_box_covers_another_box_or_a_line(checkpoint):
    graph = graph_of(checkpoint)
    plan = layout(graph.blocks[0], graph.embedding.name)
    rectangles = {**plan.places, **{f"{name} cache": place for name, place in plan.caches.items()}}
    frames = {box.name for box in graph.blocks[0]} | {name for name in rectangles if name.endswith(" cache")}
    for name in frames:
        for neighbor, place in rectangles.items():
            apart = abs(place.x - rectangles[name].x), abs(place.y - rectangles[name].y)
            assert neighbor == name or apart[0] >= WIDE or apart[1] >= HIGH, (name, neighbor)
    for (source, target), route in plan.routes.items():
        rows = [place.y for place in route]
        assert rows == sorted(rows)
        if source not in plan.stream:  # a line down never skips a row
            steps = {lower - upper for upper, lower in pairwise(rows)}
            assert len(steps) == 1, (source, target)


def test_texts_fit_into_their_boxes(checkpoint):
    drawing = ElementTree.fromstring(draw_graph(graph_of(checkpoint), title="x"))
    texts = [text for text in drawing.iter(f"{SVG}text") if text.get("text-anchor") == "middle"]
    assert len(texts) > 20
    for text in texts:
        width = 0.62 if text.get("font-weight") == "bold" else 0.56  # of a letter, as a share of the font's size
        assert len(text.text or "") * width * int(text.get("font-size", "11")) <= WIDE, text.text


def test_codes_are_drawn_as_their_matrix():
    """Codes and scales are one weight, with the shape of the matrix and the bytes of both."""
    checkpoint = quantized(random_checkpoint(replace(SMALL, dim=64, ffn=128), seed=0), "q8")
    graph = graph_of(checkpoint)
    [down] = [box for box in graph.blocks[0] if box.name.endswith("down_proj")]
    assert [weight[1:] for weight in down.weights] == [((64, 128), 64 * 128 + 4 * 64 * 2)]


def test_the_picture_in_the_documents_is_of_the_built_in_model():
    assert PICTURE.read_text() == draw_graph(graph_of(open_checkpoint("stories")), title="stories")


def test_the_command_draws(run, tmp_path):
    path = tmp_path / "graph.svg"
    code, out, err = run("inspect", "stories", "--graph", str(path))
    assert (code, out, err) == (0, "", f"wrote {path}\n") and path.read_text() == PICTURE.read_text()
    for option in ("--json", "--plan"):
        assert_refused(run("inspect", "stories", "--graph", str(path), option), "--graph", option, status=2)
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    assert_refused(run("inspect", "stories", "--graph", str(folder)), str(folder))


def test_the_drawing_replaces_no_model(run, tmp_path):
    """Without MODEL, `inspect --graph llama.gguf` takes the user's checkpoint for the file to draw in."""
    path = tmp_path / "llama.gguf"
    path.write_bytes(b"weights")
    assert_refused(run("inspect", "--graph", str(path)), "ends in .svg", str(path), status=2)
    assert path.read_bytes() == b"weights"
