"""Contracts on code that nobody here wrote: it passes, or what is found is a difference that is known.

jax's own functions, and the Triton kernels that it ships, run here. torch, onnxruntime and gguf run in the Python that
LLAMASPEC_OTHER_PYTHON names, where it has them: they are no dependencies.
"""

import os
import subprocess
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from verify.candidate import Direct, Worker
from verify.catalogue import contract_for
from verify.precision import precision
from verify.report import counterexample
from verify.runner import verify

OTHER = os.environ.get("LLAMASPEC_OTHER_PYTHON")
SEEN = {"hidden": ["none", "every other", "all but the last"], "n": [2, 33]}  # no row of -inf alone
SEEING = {"mask": ["none", "causal", "window", "every other"], "queries": [2], "keys": [9, 17]}

jax_softmax = jax.jit(partial(jax.nn.softmax, axis=-1))


@jax.jit
def jax_attention(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=(mask == 0)[:, None])


def hold(op, candidate, *, dtype="float32", examples=12, shapes: int | None = 2, **only):
    return verify(
        contract_for(op),
        candidate,
        precision=precision(dtype),
        examples=examples,
        seed=3,
        shapes=shapes,
        only=only,
        shrink=False,
    )


def assert_accepted(op, candidate, **options):
    report = hold(op, candidate, **options)
    assert report.outcome == "within bounds", "\n".join(counterexample(report, contract_for(op)))


def test_functions_of_jax():
    assert_accepted("softmax", Direct(jax_softmax, arrays="jax"), **SEEN)
    for dtype in ("float32", "bfloat16"):
        assert_accepted("attention", Direct(jax_attention, arrays="jax"), dtype=dtype, **SEEING)


def test_softmax_of_jax_rounds_between_in_bfloat16():
    finding = hold("softmax", Direct(jax_softmax, arrays="jax"), dtype="bfloat16", **SEEN).worst.finding
    assert finding and finding.kind == "value"


def test_rows_that_see_nothing_differ_in_jax():
    """NaN, and the mean of the values; here they are zeros."""
    finding = hold("softmax", Direct(jax_softmax, arrays="jax"), hidden=["all"]).worst.finding
    assert finding and finding.kind == "not finite"
    finding = hold("attention", Direct(jax_attention, arrays="jax"), mask=["all"]).worst.finding
    assert finding and finding.kind == "value"


def test_a_triton_kernel_of_jax():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm

    def rmsnorm(x, weight, *, eps):
        return rms_norm(x[None], weight, jnp.zeros_like(weight), eps=eps, interpret=True)[0]

    assert_accepted("rmsnorm", Direct(rmsnorm, arrays="jax"), examples=4, shapes=1, eps=[1e-5])


TORCH = """
import torch
import torch.nn.functional as F

def rmsnorm(x, weight, *, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)

def attention(q, k, v, mask):
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    grouped = q.shape[1] > k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask[:, None].to(q.dtype), enable_gqa=grouped).transpose(1, 2)

def linear(x, weight, bias):
    return F.linear(x, weight, bias)

def swiglu(gate, up):
    return F.silu(gate) * up
"""
ONNXRUNTIME = """
from functools import lru_cache

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

FLOAT, INT32, INT64, UINT8 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8

def run(op, domain, inputs, outputs, attributes, *arrays):
    session = compiled(op, domain, inputs, outputs, tuple(sorted(attributes.items())))
    return session.run(None, {f"i{n}": np.ascontiguousarray(array) for n, array in enumerate(arrays)})[0]

@lru_cache(maxsize=None)
def compiled(op, domain, inputs, outputs, attributes):
    ins = [helper.make_tensor_value_info(f"i{n}", kind, None) for n, kind in enumerate(inputs)]
    outs = [helper.make_tensor_value_info(f"o{n}", FLOAT, None) for n in range(outputs)]
    node = helper.make_node(op, [i.name for i in ins], [o.name for o in outs], domain=domain, **dict(attributes))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", ins, outs), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

def rmsnorm(x, weight, *, eps):
    return run("SimplifiedLayerNormalization", "", (FLOAT, FLOAT), 1, {"axis": -1, "epsilon": float(eps)}, x, weight)

def rope_halves(x, positions, frequencies):
    angles = np.arange(int(positions.max()) + 257)[:, None] * frequencies.astype(np.float64)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    kinds = (FLOAT, INT64, FLOAT, FLOAT)
    arrays = x.transpose(0, 2, 1, 3), positions.astype(np.int64), *tables
    y = run("RotaryEmbedding", "com.microsoft", kinds, 1, {"interleaved": 0}, *arrays)
    return y.transpose(0, 2, 1, 3)

def attention_prefill(q, k, v, offsets, *, window):
    batch, queries, heads, head_dim = q.shape
    kv_heads, offset = k.shape[2], int(offsets[0])
    new = (a[:, offset : offset + queries].reshape(batch, queries, -1) for a in (k, v))
    past = (a[:, :offset].transpose(0, 2, 1, 3) for a in (k, v))
    used = offset + queries
    kinds = (FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, INT32, INT32)
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "local_window_size": window or -1}
    lengths = np.full(batch, used - 1, np.int32), np.array(used, np.int32).reshape(())
    arrays = q.reshape(batch, queries, -1), *new, *past, *lengths
    return run("GroupQueryAttention", "com.microsoft", kinds, 3, attributes, *arrays).reshape(q.shape)

def gemv_quantized(x, codes, scales, *, scheme):
    bits = 4 if scheme == "q4" else 8
    rows, cols = codes.shape
    zero, pad = 1 << bits - 1, -cols % 64
    shifted = np.pad(codes.astype(np.int16) + zero, ((0, 0), (0, pad)), constant_values=zero).astype(np.uint8)
    blocks = shifted.reshape(rows, -1, 64)
    packed = blocks[..., 0::2] | blocks[..., 1::2] << 4 if bits == 4 else blocks
    attributes = {"K": cols + pad, "N": rows, "bits": bits, "block_size": 64, "accuracy_level": 1}
    kinds = (FLOAT, UINT8, FLOAT)
    return run("MatMulNBits", "com.microsoft", kinds, 1, attributes, np.pad(x, (0, pad))[None], packed, scales)[0]
"""
GGUF = """
import gguf

def ggml_decode(data, *, name):
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])

def ggml_encode(w, *, name):
    return gguf.quants.quantize(w, gguf.GGMLQuantizationType[name])
"""
ONCE = {"offsets": [(0,), (0, 0), (7,), (16,)], "padding": [0.0]}  # one offset for all of a batch


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A candidate of a source text, in the other Python."""
    workers = []

    def start(library, source, function, arrays):
        if not OTHER:
            pytest.skip("needs another Python: set LLAMASPEC_OTHER_PYTHON")
        if subprocess.run([OTHER, "-c", f"import {library}"], capture_output=True).returncode:
            pytest.skip(f"LLAMASPEC_OTHER_PYTHON has no {library}")
        (tmp_path / "others.py").write_text(source)
        monkeypatch.chdir(tmp_path)
        workers.append(Worker(f"others:{function}", arrays=arrays, python=OTHER))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["rmsnorm", "attention", "linear"])
def test_torch(other, op, dtype):
    assert_accepted(op, other("torch", TORCH, op, "torch"), dtype=dtype, examples=60, shapes=None)


def test_torch_rounds_twice_where_ops_are_not_fused(other):
    worker = other("torch", TORCH, "swiglu", "torch")
    assert_accepted("swiglu", worker, examples=60, shapes=None)
    finding = hold("swiglu", worker, dtype="bfloat16", examples=60, shapes=None).worst.finding
    assert finding and finding.kind == "value"


@pytest.mark.parametrize(
    ("op", "only"),
    [
        ("rmsnorm", {}),
        ("rope_halves", {}),
        ("attention_prefill", {**ONCE, "head_dim": [8, 16, 64]}),
        ("gemv_quantized", {"scheme": ["q4", "q8"]}),
    ],
)
def test_onnxruntime(other, op, only):
    assert_accepted(op, other("onnxruntime", ONNXRUNTIME, op, "numpy"), examples=60, shapes=None, **only)


@pytest.mark.parametrize("op", ["ggml_decode", "ggml_encode"])
def test_gguf(other, op):
    assert_accepted(op, other("gguf", GGUF, op, "numpy"), examples=60, shapes=None)
