"""A Llama as an ONNX graph: a node for each formula of `reference.llama`.

    inputs     input_ids, position_ids [batch, seq], past_key_values.I.key and .value [batch, kv_heads, past, head_dim]
    outputs    logits [batch, seq, vocab], present.I.key and .value [batch, kv_heads, past + seq, head_dim]

Inputs and outputs have the names that Hugging Face's ONNX models use. A weight has the name, the shape and the bytes of
the checkpoint's tensor, and the result of a matrix or a norm has the name of its module, such as
`model.layers.0.self_attn.q_proj`. Weights in bfloat16 or float16 pass through a Cast node, and all arithmetic is in
float32. Matrices of int8 or int4 codes pass through DequantizeLinear; other quantized matrices become float32.

We use operator set 23, the first with RMSNormalization, RotaryEmbedding and Attention
(https://onnx.ai/onnx/operators/).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from llamaspec.model.checkpoints.checkpoint import Checkpoint, refused
from llamaspec.model.checkpoints.checks import check_finite
from llamaspec.model.checkpoints.codes import exact_parts
from llamaspec.model.checkpoints.onnx.codes import Layout, layout_of, write_codes
from llamaspec.model.family import nearest_family
from llamaspec.model.tensors import Role, Weight, by_layer
from llamaspec.reference.config import Config, for_sequences
from llamaspec.reference.rope import LongRopeScaling, Rotation

OPSET = 23
IR_VERSION = 11  # the version of the file format that came with operator set 23
ALIGNMENT = 4096  # of tensors in the data file, so that programs can map them into memory
ROPE_POSITIONS = 4096  # number of rows of the RoPE tables that we compute at a time

BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4), 4),
    **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8), 8),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16), 16),
    TensorProto.FLOAT: 32,
}
TYPES = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16}

Step = tuple[str, list[str], dict[str, Any]]  # an operator, its inputs after the first, and its attributes
TO_FLOAT32: Step = ("Cast", [], {"to": TensorProto.FLOAT})


class Stored(NamedTuple):
    """A weight or a table in the data file."""

    name: str  # the name in `model.tensors`, for a weight
    write: Callable[[BinaryIO], int]  # writes it at its place in the file, and returns its number of bytes


class Llama(NamedTuple):
    """A model as a graph, and the tensors that its data file has to hold."""

    model: ModelProto
    stored: list[Stored]
    decoded: list[str]  # quantized tensors that become float32
    positions: int  # the longest sequence


def llama_graph(checkpoint: Checkpoint, *, data: str) -> Llama:
    """Make the graph of a checkpoint. Its weights are in the file `data`, in the folder of the graph's file.

    Raises `CheckpointError` if the model has experts, attention sinks or clamped SwiGLU.
    """
    config = checkpoint.config
    features = {
        "experts": config.experts > 0,
        "attention sinks": config.sinks,
        "clamped SwiGLU": config.activation == "clamped_silu",
    }
    for feature, is_on in features.items():
        if is_on:
            raise refused(checkpoint.path, f"ONNX files of models with {feature} are not supported yet")
    positions, config = _sequences(config)
    graph = _Graph(replace(checkpoint, config=config), positions=positions, data=data)
    for name in ("input_ids", "position_ids"):
        graph.input(name, TensorProto.INT64, ["batch", "seq"])
    graph.output("logits", ["batch", "seq", config.vocab])
    x = graph.embedding()
    for i in range(config.layers):
        x = graph.block(x, i)
    graph.logits(x)
    return Llama(graph.model(), graph.stored, graph.decoded, positions)


def _sequences(config: Config) -> tuple[int, Config]:
    """Return the length of the longest sequence, and the config for such sequences.

    A model with LongRoPE has different frequencies for sequences longer than `original_context`. A graph can hold only
    one table of frequencies, so we choose the one for short sequences.
    """
    if isinstance(config.scaling, LongRopeScaling):
        positions = min(config.context, config.scaling.original_context)
        return positions, for_sequences(config, positions)
    return config.context, config


class _Graph:
    """A graph that grows node by node. Each method that adds nodes returns the name of its result."""

    def __init__(self, checkpoint: Checkpoint, *, positions: int, data: str):
        self.config, self.positions = checkpoint.config, positions
        self.stored: list[Stored] = []
        self.decoded: list[str] = []
        self._checkpoint, self._data = checkpoint, data
        self._names = nearest_family(self.config).names
        self._parts = by_layer(self.config)
        self._nodes: list[NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs, self._outputs = [], []
        self._results: set[str] = set()
        self._end = 0  # of the data file so far

    def model(self) -> ModelProto:
        """Return the finished graph."""
        graph = helper.make_graph(self._nodes, "llama", self._inputs, self._outputs, list(self._initializers.values()))
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="llamaspec",
        )

    def input(self, name: str, kind: int, shape: list[int | str]) -> None:
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))

    def output(self, name: str, shape: list[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def embedding(self) -> str:
        """Add the lookup of each token's vector."""
        [weight] = self._parts[None]["embedding"]
        steps: list[Step] = [("Gather", ["input_ids"], {})]
        if self._checkpoint.tensors[weight.name].dtype != np.float32:
            steps.append(TO_FLOAT32)
        if (factor := self.config.embedding_scale) != 1:
            steps.append(("Mul", [self._number("embedding_scale", factor)], {}))
        return self._chain(self._stored(weight), steps, self._module(weight))

    def block(self, x: str, i: int) -> str:
        """Add block `i`, which adds to the residual stream `x` twice."""
        config, at = self.config, self._block_name(i)
        n = self._norm(x, i, "attention_norm")
        h = self._attention(n, i)
        after = self._add(x, self._norm(self._linear(h, i, "o"), i, "attention_post_norm"), f"{at}.after_attention")
        if not config.parallel_residual:
            n = self._norm(after, i, "ffn_norm")
        hidden = self._hidden(n, i)
        return self._add(after, self._norm(self._linear(hidden, i, "down"), i, "ffn_post_norm"), at)

    def logits(self, x: str) -> None:
        """Add the last norm and the head."""
        config = self.config
        n = self._norm(x, None, "norm")
        steps: list[Step] = []
        if config.logit_divisor != 1:
            steps.append(("Div", [self._number("logit_divisor", config.logit_divisor)], {}))
        if config.logit_cap is not None:
            cap = self._number("logit_cap", config.logit_cap)
            steps += [("Div", [cap], {}), ("Tanh", [], {}), ("Mul", [cap], {})]
        self._linear(n, None, "embedding" if config.tied else "head", steps, name="logits")

    def _attention(self, n: str, i: int) -> str:
        """Add nodes for q, k and v of the normalized input `n`, for RoPE, and for attention to old and new tokens."""
        config, at = self.config, f"{self._block_name(i)}.self_attn"
        counts = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
        q, k, v = (self._linear(n, i, part) for part in counts)
        q, k = (self._head_norm(y, i, part, counts[part]) for y, part in ((q, "q"), (k, "k")))
        if config.uses_rope(i):
            tables, features = self._rope_tables(i), config.rotary_features
            some = {} if features == config.head_dim else {"rotary_embedding_dim": features}
            q, k = (
                self._op(
                    "RotaryEmbedding", [y, *tables, "position_ids"], f"{at}.{part}", num_heads=counts[part], **some
                )
                for y, part in ((q, "q"), (k, "k"))
            )
        for part in ("key", "value"):
            self.input(
                f"past_key_values.{i}.{part}", TensorProto.FLOAT, ["batch", config.kv_heads, "past", config.head_dim]
            )
            self.output(f"present.{i}.{part}", ["batch", config.kv_heads, "total", config.head_dim])
        window = config.window(i)
        mask = self._window_mask(window) if window is not None and window < self.positions else ""
        options: dict[str, Any] = {"q_num_heads": config.heads, "kv_num_heads": config.kv_heads}
        options |= {"is_causal": int(not mask)}
        options |= {} if config.attention_scale is None else {"scale": config.attention_scale}
        options |= {} if config.attention_cap is None else {"softcap": config.attention_cap}
        past = [f"past_key_values.{i}.{part}" for part in ("key", "value")]
        present = [f"present.{i}.{part}" for part in ("key", "value")]
        return self._op("Attention", [q, k, v, mask, *past], at, *present, **options)

    def _hidden(self, n: str, i: int) -> str:
        """Add nodes for the hidden features of a feed-forward layer: the activation of gate and up, or only of up."""
        config, at = self.config, f"{self._block_name(i)}.mlp"
        up = self._linear(n, i, "up")
        gate = self._linear(n, i, "gate") if config.gated else up
        match config.activation:
            case "silu":
                activated = self._op("Mul", [gate, self._op("Sigmoid", [gate], f"{at}.sigmoid")], f"{at}.silu")
            case "gelu_tanh":
                activated = self._op("Gelu", [gate], f"{at}.gelu", approximate="tanh")
            case _:  # relu2
                relu = self._op("Relu", [gate], f"{at}.relu")
                activated = self._op("Mul", [relu, relu], f"{at}.relu2")
        return self._op("Mul", [activated, up], f"{at}.hidden") if config.gated else activated

    def _add(self, x: str, added: str, name: str) -> str:
        """Add the output of half a block to the residual stream."""
        if (factor := self.config.residual_scale) != 1:
            added = self._op("Mul", [added, self._number("residual_scale", factor)], f"{name}.scaled")
        return self._op("Add", [x, added], name)

    def _norm(self, x: str, i: int | None, part: str) -> str:
        """Add nodes for a norm of the model's kind. If the model has no weight for it, return `x`."""
        if part not in self._parts[i]:
            return x
        [weight] = self._parts[i][part]
        options = {"axis": -1, "epsilon": self.config.eps}
        if self.config.layer_norm:
            bias = self._bias(weight)
            inputs = [x, self._weight(weight), *([bias] if bias else [])]
            return self._op("LayerNormalization", inputs, self._module(weight), **options)
        return self._op("RMSNormalization", [x, self._weight(weight)], self._module(weight), **options)

    def _head_norm(self, x: str, i: int, part: str, heads: int) -> str:
        """Add nodes for the norm of q or k ([batch, seq, heads * head_dim]), if the model has one."""
        config, eps = self.config, self.config.eps
        at = f"{self._block_name(i)}.self_attn.{part}"
        if config.head_qk_norm:
            weights = [self._weight(weight) for weight in self._parts[i][f"head_{part}_norm"]]
            joined = self._op("Concat", weights, f"{at}_layernorm.joined", axis=0)
            weight = self._op("Reshape", [joined, self._shape(heads, config.head_dim)], f"{at}_layernorm.weight")
            ones = self._constant("ones", np.ones(config.head_dim, np.float32))
            x = self._op("Reshape", [x, self._shape(0, 0, heads, config.head_dim)], f"{at}.heads")
            x = self._op("LayerNormalization", [x, ones], f"{at}_layernorm.centered", axis=-1, epsilon=eps)
            x = self._op("Mul", [x, weight], f"{at}_layernorm")
            return self._op("Reshape", [x, self._shape(0, 0, heads * config.head_dim)], f"{at}_layernorm.rows")
        if not config.qk_norm:
            return x
        [weight] = self._parts[i][f"{part}_norm"]
        if config.wide_qk_norm:
            return self._norm(x, i, f"{part}_norm")
        x = self._op("Reshape", [x, self._shape(0, 0, heads, config.head_dim)], f"{at}.heads")
        x = self._op("RMSNormalization", [x, self._weight(weight)], self._module(weight), axis=-1, epsilon=eps)
        return self._op("Reshape", [x, self._shape(0, 0, heads * config.head_dim)], f"{at}_norm.rows")

    def _linear(self, x: str, i: int | None, part: str, steps: Sequence[Step] = (), *, name: str = "") -> str:
        """Add nodes for W x + b, and then for `steps`. The result has the name `name`, by default the module's name."""
        [weight] = self._parts[i][part]
        layout = None if part == "embedding" else layout_of(self._checkpoint.tensors[weight.name])
        if layout:
            w = self._dequantized(weight, layout)
        else:
            transposed = f"{weight.named(self._names)}.transposed"
            w = self._op("Transpose", [self._weight(weight)], transposed, perm=[1, 0])
        bias = self._bias(weight)
        biases: list[Step] = [("Add", [bias], {})] if bias else []
        return self._chain(x, [("MatMul", [w], {}), *biases, *steps], name or self._module(weight))

    def _rope_tables(self, i: int) -> tuple[str, str]:
        """Store the cosines and sines of all positions ([positions, pairs]), multiplied by the rotation's magnitude."""
        rotation = self.config.rotation(i)
        prefix = "rope.local" if self.config.is_local(i) else "rope"
        names = f"{prefix}.cos", f"{prefix}.sin"
        for name, function in zip(names, (np.cos, np.sin), strict=True):
            if name not in self._initializers:
                offset = self._external(name, TensorProto.FLOAT, (self.positions, len(rotation.frequencies)))
                write = partial(_write_rope_table, offset=offset, function=function, rotation=rotation)
                self.stored.append(Stored(name, partial(write, positions=self.positions)))
        return names

    def _window_mask(self, window: int) -> str:
        """Add nodes for the mask of a window. Each query sees the last `window` positions, including its own.

        Row j of the cache belongs to position j.
        """
        name = f"window_{window}"
        if name in self._results:
            return name
        past = self._op("Shape", ["past_key_values.0.key"], "past", start=2, end=3)
        new = self._op("Shape", ["input_ids"], "seq", start=1, end=2)
        total = self._op("Squeeze", [self._op("Add", [past, new], "keys.shape")], "keys.count")
        start, step = (self._constant(f"number_{n}", np.array(n, np.int64)) for n in (0, 1))
        keys = self._op("Range", [start, total, step], "keys")
        axes = self._constant("axes_1_3", np.array([1, 3], np.int64))
        queries = self._op("Unsqueeze", ["position_ids", axes], "queries")  # [batch, 1, seq, 1]
        width = self._constant(f"{name}.width", np.array(window, np.int64))
        first = self._op("Sub", [queries, width], f"{name}.before")
        seen = self._op("LessOrEqual", [keys, queries], "causal")
        return self._op("And", [seen, self._op("Greater", [keys, first], f"{name}.near")], name)

    def _weight(self, weight: Weight) -> str:
        """Return the name of a weight in float32."""
        name = self._stored(weight)
        if self._initializers[name].data_type == TensorProto.FLOAT:
            return name
        return self._chain(name, [TO_FLOAT32], f"{name}.float32")

    def _bias(self, weight: Weight) -> str:
        """Return the name of a weight's bias in float32; "" if it has none."""
        name = weight.name.removesuffix("weight") + "bias"
        if name not in self._checkpoint.tensors:
            return ""
        return self._weight(weight._replace(name=name, role=Role.BIAS))

    def _stored(self, weight: Weight) -> str:
        """Store a weight as the checkpoint does; in float32 if it is quantized."""
        name, tensor = weight.named(self._names), self._checkpoint.tensors[weight.name]
        if name not in self._initializers:
            offset = self._external(name, TYPES[tensor.dtype.name], tensor.shape)
            self.stored.append(Stored(weight.name, lambda file: _write_at(file, offset, self._floats(weight.name))))
            self.decoded += [weight.name] if tensor.codes else []
        return name

    def _floats(self, name: str) -> Iterator[np.ndarray]:
        """Read a weight as floats: all at once if the file holds floats, else some rows at a time."""
        tensor, path = self._checkpoint.tensors[name], self._checkpoint.path
        if not tensor.codes:
            array = tensor.read()
            check_finite(name, array, path=path)
            yield array
            return
        start = 0
        for rows in exact_parts(tensor):
            array = rows.astype(np.float32)
            check_finite(f"{name} from row {start}", array, path=path)
            yield array
            start += len(rows)

    def _dequantized(self, weight: Weight, layout: Layout) -> str:
        """Store the codes of a matrix, and add the node that decodes them to the transposed matrix."""
        name, checkpoint = weight.named(self._names), self._checkpoint
        names = {end: f"{name}.{end}" for end in layout.tensors}
        if names["codes"] not in self._initializers:
            offsets = {end: self._external(names[end], *of_tensor) for end, of_tensor in layout.tensors.items()}
            self.stored.append(
                Stored(weight.name, lambda file: write_codes(file, checkpoint, weight.name, layout, offsets))
            )
        result = f"{name}.transposed"
        return self._op("DequantizeLinear", list(names.values()), result, axis=0, block_size=layout.group)

    def _external(self, name: str, kind: int, shape: tuple[int, ...]) -> int:
        """Add a tensor of the data file, and return its offset there."""
        size = -(-int(np.prod(shape, dtype=np.int64)) * BITS[kind] // 8)
        tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        offset = self._end
        for key, value in (("location", self._data), ("offset", offset), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        self._initializers[name] = tensor
        self._end += size + -size % ALIGNMENT
        return offset

    def _shape(self, *sizes: int) -> str:
        """Store a shape for Reshape, which keeps the input's size for each 0."""
        return self._constant("shape_" + "_".join(map(str, sizes)), np.array(sizes, np.int64))

    def _number(self, name: str, number: float) -> str:
        return self._constant(name, np.array(number, np.float32))

    def _constant(self, name: str, values: np.ndarray) -> str:
        """Store a small array in the graph's own file."""
        self._initializers.setdefault(name, numpy_helper.from_array(values, name))
        return name

    def _op(self, kind: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        """Add a node, unless a node with the same results exists. Returns the name of its first result."""
        if outputs[0] not in self._results:
            self._nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], **attributes))
            self._results.update(outputs)
        return outputs[0]

    def _chain(self, x: str, steps: Sequence[Step], name: str) -> str:
        """Add nodes, each with the result of the previous one as its first input. The last result has the name `name`.

        `x` is the first input of the first node.
        """
        for number, (kind, operands, attributes) in enumerate(steps, 1):
            result = name if number == len(steps) else f"{name}.step_{number}"
            x = self._op(kind, [x, *operands], result, **attributes)
        return x

    def _module(self, weight: Weight) -> str:
        return weight.named(self._names).rpartition(".")[0]

    def _block_name(self, i: int) -> str:
        return self._names["o"].format(layer=i).rsplit(".", 2)[0]


def _write_rope_table(
    file: BinaryIO, *, offset: int, function: Callable[[np.ndarray], np.ndarray], rotation: Rotation, positions: int
) -> int:
    """Write `function` (cosine or sine) of each position's angles, multiplied by the rotation's magnitude."""
    starts = range(0, positions, ROPE_POSITIONS)
    blocks = (np.arange(start, min(start + ROPE_POSITIONS, positions))[:, None] for start in starts)
    values = (rotation.magnitude * function(at * rotation.frequencies) for at in blocks)
    return _write_at(file, offset, (rows.astype(np.float32) for rows in values))


def _write_at(file: BinaryIO, offset: int, arrays: Iterator[np.ndarray]) -> int:
    """Write the bytes of `arrays` one after another, from `offset` on. Returns their number."""
    file.seek(offset)
    return sum(file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) for array in arrays)
