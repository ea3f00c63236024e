"""Draws a model and its first block as SVG.

The left side shows the whole model, how its bytes are divided, and the largest tensors. The right side shows every
operator of block 0, with its weights and the shape of its result.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import prod

from llamaspec.learn.model_graph.boxes import BlockGraph, Box, Weight
from llamaspec.learn.model_graph.layout import ACROSS, Layout, Place, layout
from llamaspec.model.insight.describe import format_bytes

WIDE, HIGH = 188, 46  # pixels of a box
LEFT, TOP = 24, 96  # of the drawing's contents
RESIDUAL = 400  # where the residual stream runs
START = TOP + 22  # where it starts
ROUND = 13  # radius of the sign of a sum or a product
GAP = 24  # from a box to the lines that run across below it
LISTED = 6  # largest tensors in the list

FILLS = {"matrix": "#dbe7ff", "norm": "#fff1c9", "attention": "#d8f3dc", "plain": "#f1f1f4"}
BARS = {
    "embedding": "#7b61c9",
    "attention": "#2f9e58",
    "feed-forward": "#4053d3",
    "norms": "#ddb310",
    "head": "#b51d14",
    "RoPE tables": "#777",
}
SIGNS = {"Add": "+", "Mul": "×"}
ACTIVATIONS = {("Gelu",): "GELU", ("Sigmoid", "Mul"): "SiLU", ("Relu", "Mul"): "ReLU²"}


def draw_graph(graph: BlockGraph, *, title: str) -> str:
    """Draw a model as an SVG document."""
    plan = layout(graph.blocks[0], graph.embedding.name)
    body, model_foot = _whole_model(graph)
    width = RESIDUAL + plan.right + WIDE / 2 + LEFT
    height = max(START + plan.foot + 56, model_foot + 24)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="#555"/>'
            "</marker></defs>",
            '<rect width="100%" height="100%" fill="white"/>',
            _text(LEFT, 34, title, size=18, weight="bold"),
            _text(LEFT, 54, _summary(graph), fill="#555"),
            *body,
            _text(RESIDUAL - 36, TOP - 14, f"Block 0 of {len(graph.blocks)}", size=14, weight="bold"),
            f'<g transform="translate({RESIDUAL},{START})">',
            *_block(graph, plan),
            "</g>",
            "</svg>\n",
        ]
    )


def _block(graph: BlockGraph, plan: Layout) -> list[str]:
    """Draw the boxes of block 0, the lines between them, and the KV cache."""
    block = graph.blocks[0]
    signs = {box.name for box in block if _is_sign(box)}
    largest = max(weight.bytes for box in block for weight in box.weights)
    stream = [plan.places[name].y for name in plan.stream]
    body = [_path(f"M0,{stream[0]:.0f} V{stream[-1] + 44:.0f}", width=3, arrow=True)]
    for (source, target), route in plan.routes.items():
        if not {source, target} <= {*plan.stream}:
            body.append(_line(route, source in plan.stream, target in plan.stream, target in signs))
    start = plan.places[plan.stream[0]]
    body += [_sign(start, "x"), _text(ROUND + 5, start.y + 4, f"residual stream {_axes(graph.embedding)}", fill="#555")]
    for box in block:
        place = plan.places[box.name]
        if box.name in signs:
            body.append(_sign(place, SIGNS[box.operators[0]]))
            body.append(_text(place.x + ROUND + 5, place.y - 7, _axes(box), fill="#555"))
            continue
        body += _box(box, place, largest)
        body.append(_text(place.x + WIDE / 2, place.y + HIGH / 2 + 13, _axes(box), anchor="end", fill="#555"))
        if box.name in plan.caches:
            body += _cache(box, plan.caches[box.name], {known.name: known for known in block})
    return body


def _line(route: Sequence[Place], from_stream: bool, to_stream: bool, to_sign: bool) -> str:
    """Draw the line from a box to another, down and across. The line to a sum of the stream arrives from the right."""
    end = route[-1]
    if from_stream:
        across = end.y - (HIGH / 2 + GAP)
        return _path(f"M0,{across:.0f} H{end.x:.0f} V{end.y - (ROUND if to_sign else HIGH / 2) - 2:.0f}", arrow=True)
    path, x = f"M{route[0].x:.0f},{route[0].y:.0f}", route[0].x
    for upper, lower in pairwise(route):
        if to_stream and lower is end:
            path += f" V{end.y:.0f} H{ROUND + 2}"
        else:
            if lower.x != x:
                path += f" V{upper.y + HIGH / 2 + GAP:.0f} H{lower.x:.0f}"
            path += f" V{lower.y - ((ROUND if to_sign else HIGH / 2) + 2 if lower is end else 0):.0f}"
        x = lower.x
    return _path(path, arrow=True)


def _box(box: Box, place: Place, largest: int) -> list[str]:
    """Draw a box. The bar at its foot shows its bytes, compared with the largest tensor of the block."""
    title, remark = _words(box)
    x, y = place.x - WIDE / 2, place.y - HIGH / 2
    parts = [_frame(place, FILLS[_kind(box)])]
    own = sum(weight.bytes for weight in box.weights if not _is_table(weight))
    if own:
        length = max(2.0, (WIDE - 8) * min(own / largest, 1))
        parts.append(f'<rect x="{x + 4:.0f}" y="{y + HIGH - 6:.0f}" width="{length:.0f}" height="3" fill="#4053d3"/>')
    parts.append(_text(place.x, y + 17, title, anchor="middle", size=12 if len(title) < 23 else 11, weight="bold"))
    parts.append(_text(place.x, y + 33, remark, anchor="middle"))
    return parts


def _words(box: Box) -> tuple[str, str]:
    """Return the title of a box, and the line below it."""
    module = box.name.rpartition(".")[2]
    if "Attention" in box.operators:
        heads, own = box.attributes["q_num_heads"], box.attributes["kv_num_heads"]
        shared = "" if heads == own else f", {own} for k and v"
        return f"attention, {_seen(box)}", f"{heads} heads{shared}"
    weights = [weight for weight in box.weights if weight.name.endswith("weight")] or list(box.weights)
    size = format_bytes(sum(weight.bytes for weight in box.weights))
    if "RotaryEmbedding" in box.operators:
        return f"RoPE of {module}", f"cos, sin {list(weights[0].shape)}"
    if "MatMul" in box.operators:
        formula = "W x + b" if "Add" in box.operators else "W x"
        return f"{module}: {formula}", f"{list(weights[0].shape)}, {size}"
    if not weights:
        return ACTIVATIONS.get(box.operators, module), ", ".join(box.operators)
    kind = {"RMSNormalization": "RMSNorm", "LayerNormalization": "LayerNorm"}.get(box.operators[-1], box.operators[-1])
    shapes = f"{list(weights[0].shape)}" + (f" × {len(weights)}" if len(weights) > 1 else "")
    return module, f"{kind}, {shapes}, {size}"


def _seen(box: Box) -> str:
    """Say which positions attention sees."""
    mask = str(box.attributes.get("mask", ""))
    return f"window of {mask.removeprefix('window_')}" if mask else "causal"


def _cache(box: Box, place: Place, by_name: Mapping[str, Box]) -> list[str]:
    """Draw the KV cache next to attention."""
    heads = box.attributes["kv_num_heads"]
    width = prod(axis for axis in by_name[box.inputs[1]].shape[2:] if isinstance(axis, int))
    assert isinstance(heads, int)
    x, y = place.x, place.y - HIGH / 2
    return [
        _frame(place, "white", ' stroke-dasharray="4 3"'),
        f'<path d="M{x - WIDE / 2 - 2:.0f},{place.y:.0f} h{WIDE + 4 - ACROSS}" stroke="#555" '
        'marker-start="url(#head)" marker-end="url(#head)"/>',
        _text(x, y + 17, "KV cache", anchor="middle", size=12, weight="bold"),
        _text(x, y + 33, f"k, v [{heads}, past + seq, {width // heads}]", anchor="middle"),
        _text(x + WIDE / 2, y + HIGH + 13, f"{format_bytes(2 * width * 4)} a token", anchor="end", fill="#555"),
    ]


def _whole_model(graph: BlockGraph) -> tuple[list[str], float]:
    """Draw the left side: the parts of the model, how its bytes are divided, and its largest tensors.

    Also returns where it ends.
    """
    body, y = [_text(LEFT, TOP - 14, "The model", size=14, weight="bold")], TOP
    blocks = Counter(sum(weight.bytes for weight in _of_block(block)) for block in graph.blocks)
    each, count = blocks.most_common(1)[0]
    about = f"{format_bytes(each)} each" if count == len(graph.blocks) else format_bytes(sum(blocks.elements()))
    known: set[str] = set()
    rows = [("input_ids", "[seq]", "plain"), _row(graph.embedding, known, "embedding")]
    rows.append((f"{len(graph.blocks)} blocks", f"{about}; {_windows(graph)}", "attention"))
    rows += [_row(box, known, "norm" if "Normalization" in box.operators[0] else "head") for box in graph.after]
    for i, (name, remark, kind) in enumerate(rows):
        if i:
            body.append(_path(f"M{LEFT + 138},{y - 14} V{y - 3}", arrow=True))
        for shift in (6, 3, 0) if kind == "attention" else (0,):
            place = f'x="{LEFT + shift}" y="{y + shift}" width="276" height="36"'
            fill = FILLS.get(kind, FILLS["matrix"])
            body.append(f'<rect {place} rx="5" fill="{fill}" stroke="#8a93a6"/>')
        body.append(_text(LEFT + 10, y + 15, name, size=12, weight="bold"))
        body.append(_text(LEFT + 10, y + 30, remark))
        y += 50 + (6 if kind == "attention" else 0)
    more, foot = _bytes(graph, y + 16)
    return [*body, *more], foot


def _row(box: Box, known: set[str], kind: str) -> tuple[str, str, str]:
    """Describe a box of the whole model by its name, its weights and its result."""
    shapes = ", ".join(f"{list(weight.shape)}" for weight in box.weights[:1])
    size = format_bytes(sum(weight.bytes for weight in box.weights))
    if {weight.name for weight in box.weights} <= known:
        size = "the embedding"
    known |= {weight.name for weight in box.weights}
    return f"{'head' if kind == 'head' else box.name}: {_operation(box)}", f"{shapes}, {size}; gives {_axes(box)}", kind


def _operation(box: Box) -> str:
    names = {"Gather": "lookup", "RMSNormalization": "RMSNorm", "LayerNormalization": "LayerNorm", "MatMul": "W x"}
    kinds = [names.get(kind, kind) for kind in box.operators if kind != "Cast"]
    return ", ".join(kinds)


def _windows(graph: BlockGraph) -> str:
    """Say how many blocks have a window."""
    boxes = [box for block in graph.blocks for box in block if "Attention" in box.operators]
    windowed = sum("mask" in box.attributes for box in boxes)
    return f"{windowed} with a window" if windowed else "all causal"


def _bytes(graph: BlockGraph, y: float) -> tuple[list[str], float]:
    """Draw a bar for each part's share of the bytes, and the largest tensors."""
    sizes = _sizes(graph)
    total = sum(sizes.values())
    body = [_text(LEFT, y, f"Where {format_bytes(total)} are", size=14, weight="bold")]
    y += 12
    for name, size in sizes.items():
        length = max(1.0, 120 * size / max(sizes.values()))
        body.append(f'<rect x="{LEFT + 84}" y="{y}" width="{length:.0f}" height="12" fill="{BARS[name]}"/>')
        body.append(_text(LEFT, y + 10, name))
        body.append(_text(LEFT + 90 + length, y + 10, f"{format_bytes(size)}, {100 * size / total:.0f} %"))
        y += 19
    y += 22
    body.append(_text(LEFT, y, "The largest tensors", size=14, weight="bold"))
    for weight, count in _largest(graph):
        y += 19
        times = f"{count} × " if count > 1 else ""
        body.append(_text(LEFT, y, f"{times}{_short(weight.name)}, {list(weight.shape)}, {format_bytes(weight.bytes)}"))
    return body, y


def _sizes(graph: BlockGraph) -> dict[str, int]:
    """Return the bytes of each part of the model that has any. A tensor with two readers counts once."""
    parts: dict[str, str] = {}
    for box in (graph.embedding, *(box for block in graph.blocks for box in block), *graph.after):
        for weight in box.weights:
            parts.setdefault(weight.name, "RoPE tables" if _is_table(weight) else _part(box, graph))
    sizes = {weight.name: weight.bytes for weight in _weights(graph)}
    counted = {part: sum(sizes[name] for name, own in parts.items() if own == part) for part in BARS}
    return {part: size for part, size in counted.items() if size}


def _part(box: Box, graph: BlockGraph) -> str:
    if box.name == graph.embedding.name:
        return "embedding"
    if "Normalization" in box.operators[-1]:
        return "norms"
    return "attention" if ".self_attn" in box.name else "head" if box in graph.after else "feed-forward"


def _largest(graph: BlockGraph) -> list[tuple[Weight, int]]:
    """Return the largest tensors; equal tensors of all blocks are one, with their number."""
    counts: dict[tuple, list[Weight]] = {}
    for weight in _weights(graph):
        counts.setdefault((_short(weight.name), weight.shape, weight.bytes), []).append(weight)
    largest = sorted(counts.values(), key=lambda weights: -weights[0].bytes)[:LISTED]
    return [(weights[0], len(weights)) for weights in largest]


def _weights(graph: BlockGraph) -> list[Weight]:
    """Return all tensors of the model, each once."""
    boxes = (graph.embedding, *(box for block in graph.blocks for box in block), *graph.after)
    return list({weight.name: weight for box in boxes for weight in box.weights}.values())


def _of_block(block: Sequence[Box]) -> list[Weight]:
    return [weight for box in block for weight in box.weights if not _is_table(weight)]


def _is_table(weight: Weight) -> bool:
    return weight.name.startswith("rope.")


def _short(name: str) -> str:
    """Shorten the name of a tensor to its module, without the block.

    >>> _short("model.layers.3.self_attn.q_proj.weight"), _short("rope.cos")
    ('self_attn.q_proj', 'rope.cos')
    """
    return re.sub(r"^(.*\blayers\.\d+|model)\.", "", name).removesuffix(".weight")


def _summary(graph: BlockGraph) -> str:
    tensors = [weight for weight in _weights(graph) if not _is_table(weight)]
    count = sum(prod(weight.shape) for weight in tensors)
    return f"{count:,} parameters in {len(tensors)} tensors; seq is the number of new tokens"


def _kind(box: Box) -> str:
    if "Attention" in box.operators:
        return "attention"
    if "Normalization" in box.operators[-1]:
        return "norm"
    return "matrix" if "MatMul" in box.operators else "plain"


def _axes(box: Box) -> str:
    return "[" + ", ".join(map(str, box.shape[1:])) + "]"


def _is_sign(box: Box) -> bool:
    """Return whether a box is drawn as the sign of a sum or a product."""
    return len(box.operators) == 1 and box.operators[0] in SIGNS and not box.weights


def _frame(place: Place, fill: str, style: str = "") -> str:
    corner = f'x="{place.x - WIDE / 2:.0f}" y="{place.y - HIGH / 2:.0f}"'
    return f'<rect {corner} width="{WIDE}" height="{HIGH}" rx="5" fill="{fill}" stroke="#8a93a6"{style}/>'


def _sign(place: Place, sign: str) -> str:
    circle = f'<circle cx="{place.x:.0f}" cy="{place.y:.0f}" r="{ROUND}" fill="white" stroke="#333"/>'
    return circle + _text(place.x, place.y + 5, sign, anchor="middle", size=15)


def _path(path: str, *, width: float = 1.4, arrow: bool = False) -> str:
    head = ' marker-end="url(#head)"' if arrow else ""
    return f'<path d="{path}" fill="none" stroke="#555" stroke-width="{width}"{head}/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, fill: str = "#111", weight: str = "normal"
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'
