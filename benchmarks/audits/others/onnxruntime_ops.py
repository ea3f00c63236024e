"""Operators of onnxruntime on a CPU. Each call runs a model with a single node."""

from functools import cache

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]
from onnx import TensorProto, helper

FLOAT, INT32, INT64, UINT8 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8
MICROSOFT = "com.microsoft"


def _run(op, domain, inputs, outputs, attributes, *arrays):
    """Run `op` on arrays of the types `inputs`, and return its first output. `outputs` are the types of all outputs."""
    session = _session(op, domain, inputs, outputs, tuple(sorted(attributes.items())))
    return session.run(None, {f"i{n}": np.ascontiguousarray(array) for n, array in enumerate(arrays)})[0]


@cache
def _session(op, domain, inputs, outputs, attributes):
    ins = [helper.make_tensor_value_info(f"i{n}", kind, None) for n, kind in enumerate(inputs)]
    outs = [helper.make_tensor_value_info(f"o{n}", kind, None) for n, kind in enumerate(outputs)]
    node = helper.make_node(op, [i.name for i in ins], [o.name for o in outs], domain=domain, **dict(attributes))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(helper.make_graph([node], "g", ins, outs), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def softmax(x):
    return _run("Softmax", "", (FLOAT,), (FLOAT,), {"axis": -1}, x)


def argmax(x):
    return _run("ArgMax", "", (FLOAT,), (INT64,), {"axis": -1, "keepdims": 0}, x)


def add(x, y):
    return _run("Add", "", (FLOAT, FLOAT), (FLOAT,), {}, x, y)


def embedding(tokens, table):
    return _run("Gather", "", (FLOAT, INT32), (FLOAT,), {}, table, tokens)


def gemm(x, weight):
    return _run("MatMul", "", (FLOAT, FLOAT), (FLOAT,), {}, x, weight.T)


def gemv(x, weight):
    return _run("MatMul", "", (FLOAT, FLOAT), (FLOAT,), {}, weight, x)


def rmsnorm(x, weight, *, eps):
    attributes = {"axis": -1, "epsilon": float(eps)}
    return _run("SimplifiedLayerNormalization", "", (FLOAT, FLOAT), (FLOAT,), attributes, x, weight)


def rope_halves(x, positions, frequencies):
    return _rope(x, positions, frequencies, interleaved=0)


def rope_interleaved(x, positions, frequencies):
    return _rope(x, positions, frequencies, interleaved=1)


def _rope(x, positions, frequencies, *, interleaved):
    """Apply RotaryEmbedding. It fails unless its tables have more rows than the sequence has tokens."""
    angles = np.arange(int(positions.max()) + 257)[:, None] * frequencies.astype(np.float64)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    kinds = (FLOAT, INT64, FLOAT, FLOAT)
    arrays = x.transpose(0, 2, 1, 3), positions.astype(np.int64), *tables
    return _run("RotaryEmbedding", MICROSOFT, kinds, (FLOAT,), {"interleaved": interleaved}, *arrays).transpose(
        0, 2, 1, 3
    )


def attention_prefill(q, k, v, offsets, *, window):
    """Attend over a prompt, with one offset for the whole batch."""
    offset, queries = int(offsets[0]), q.shape[1]
    new_k, new_v = (a[:, offset : offset + queries] for a in (k, v))
    return _grouped(q, new_k, new_v, k[:, :offset], v[:, :offset], np.full(len(q), offset + queries), window=window)


def attention_decode(q, k, v, lengths, *, window):
    """Attend over a cache with lengths of 1 or more."""
    new_k, new_v = (
        np.stack([row[length - 1] for row, length in zip(a, lengths, strict=True)])[:, None] for a in (k, v)
    )
    past_k, past_v = (a[:, : max(lengths) - 1] for a in (k, v))
    return _grouped(q[:, None], new_k, new_v, past_k, past_v, lengths, window=window)[:, 0]


def _grouped(q, new_k, new_v, past_k, past_v, lengths, *, window):
    batch, queries, heads, _ = q.shape
    kv_heads = new_k.shape[2]
    new = (a.reshape(batch, queries, -1) for a in (new_k, new_v))
    past = (a.transpose(0, 2, 1, 3) for a in (past_k, past_v))
    last = (lengths - 1).astype(np.int32), np.array(max(lengths), np.int32)
    kinds = (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT32, INT32)
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "local_window_size": window or -1}
    arrays = q.reshape(batch, queries, -1), *new, *past, *last
    return _run("GroupQueryAttention", MICROSOFT, kinds, (FLOAT,) * 3, attributes, *arrays).reshape(q.shape)


def gemv_quantized(x, codes, scales, *, scheme):
    """Call MatMulNBits in blocks of 64, with unsigned codes. It computes in float32 (accuracy level 1)."""
    bits = 4 if scheme == "q4" else 8
    rows, cols = codes.shape
    zero, pad = 1 << bits - 1, -cols % 64
    shifted = np.pad(codes.astype(np.int16) + zero, ((0, 0), (0, pad)), constant_values=zero).astype(np.uint8)
    blocks = shifted.reshape(rows, -1, 64)
    packed = blocks[..., 0::2] | blocks[..., 1::2] << 4 if bits == 4 else blocks
    attributes = {"K": cols + pad, "N": rows, "bits": bits, "block_size": 64, "accuracy_level": 1}
    kinds, x = (FLOAT, UINT8, FLOAT), np.pad(x, (0, pad))[None]
    return _run("MatMulNBits", MICROSOFT, kinds, (FLOAT,), attributes, x, packed, scales)[0]
