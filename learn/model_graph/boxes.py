"""Reads an ONNX graph of `model.checkpoints.onnx.graph` as boxes: what a reader of a drawing wants to see of it.

A box is an operator, or a few that belong together, such as a product and the bias after it. Nodes that only decode or
reshape are left out: a Transpose of a weight belongs to the product that reads it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onnx import ModelProto, NodeProto, TensorProto, helper, shape_inference

PASSING = ("Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze")  # nodes that do not change numbers
BEFORE_MUL = ("Sigmoid", "Relu")  # activations that belong to the box of the product after them
BLOCK = re.compile(r"(.*\blayers\.(\d+))(\..*)?")


class Weight(NamedTuple):
    """A tensor of the data file; codes and their scales are one weight."""

    name: str
    shape: tuple[int, ...]  # as in the checkpoint: matrices are [out, in]
    bytes: int


class Box(NamedTuple):
    """A part of the drawing."""

    name: str  # the name of the result, as in the graph
    operators: tuple[str, ...]
    inputs: tuple[str, ...]  # names of the boxes and graph inputs that it reads
    shape: tuple[int | str, ...]  # of the result
    weights: tuple[Weight, ...]
    attributes: Mapping[str, object]


class BlockGraph(NamedTuple):
    """A model as boxes."""

    embedding: Box  # the input of the first block
    blocks: list[list[Box]]
    after: list[Box]  # the last norm and the head


def read_graph(model: ModelProto) -> BlockGraph:
    """Read the boxes of a graph, in the order of the computation."""
    boxes = {box.name: box for box in _boxes(model)}
    blocks: list[list[Box]] = []
    for box in boxes.values():
        if match := BLOCK.fullmatch(box.name):
            if int(match[2]) == len(blocks):
                blocks.append([])
            blocks[-1].append(box)
    reached, after = {blocks[-1][-1].name}, []
    for box in boxes.values():
        if reached & {*box.inputs}:
            reached.add(box.name)
            after.append(box)
    return BlockGraph(boxes[blocks[0][0].inputs[0]], blocks, after)


def _boxes(model: ModelProto) -> list[Box]:
    inferred = shape_inference.infer_shapes(model).graph
    shapes = {
        value.name: tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in (*inferred.value_info, *inferred.output)
    }
    weights = _weights(model)
    passed: dict[str, str] = {}  # the result of a node that is left out: the result that it passes on
    parts: dict[str, Box] = {}  # nodes that belong to the box of a later node
    boxes = []
    for node in model.graph.node:
        result, values = node.output[0], [passed.get(name, name) for name in node.input if name]
        if all(name in weights for name in values):
            weights[result] = tuple(weight for name in values for weight in weights[name])
            continue
        sources = [name for name in values if name not in weights]
        earlier = [parts[name] for name in sources if name in parts]
        if node.op_type in PASSING and not earlier:
            passed[result] = sources[0]
            continue
        box = Box(
            result,
            operators=(*(kind for part in earlier for kind in part.operators), node.op_type),
            inputs=_unique(source for name in sources for source in (parts[name].inputs if name in parts else [name])),
            shape=shapes.get(result, ()),
            weights=_unique(
                weight
                for group in (*(part.weights for part in earlier), *(weights.get(name, ()) for name in values))
                for weight in group
            ),
            attributes=_attributes(node),
        )
        if node.op_type in BEFORE_MUL or re.search(r"\.step_\d+$", result):
            parts[result] = box
        else:
            boxes.append(box)
    return boxes


def _unique[T](items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def _weights(model: ModelProto) -> dict[str, tuple[Weight, ...]]:
    """Return the weights behind each initializer. Small constants, which are not in the data file, have none."""
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        sizes[_weight_name(tensor)] = sizes.get(_weight_name(tensor), 0) + _bytes(tensor)
    weights: dict[str, tuple[Weight, ...]] = {}
    for tensor in model.graph.initializer:
        name, shape = _weight_name(tensor), tuple(tensor.dims)
        if tensor.data_location != TensorProto.EXTERNAL:
            weights[tensor.name] = ()
        elif name == tensor.name:
            weights[name] = (Weight(name, shape, sizes[name]),)
        else:  # codes are stored transposed
            weights[tensor.name] = (Weight(name, shape[::-1], sizes[name]),) if tensor.name.endswith(".codes") else ()
    return weights


def _weight_name(tensor: TensorProto) -> str:
    return re.sub(r"\.(codes|scales|zero_points)$", "", tensor.name)


def _bytes(tensor: TensorProto) -> int:
    return next((int(entry.value) for entry in tensor.external_data if entry.key == "length"), 0)


def _attributes(node: NodeProto) -> dict[str, object]:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "Attention" and len(node.input) > 3 and node.input[3]:
        attributes["mask"] = node.input[3]
    return attributes
