"""Patches Triton's interpreter to behave like a GPU. Import this module before a package of kernels.

With TRITON_INTERPRET=0 in the environment, kernels are compiled for the GPU and this module changes nothing. Otherwise
it patches the interpreter; kernels stay unchanged. After the patch, `torch.cuda` describes a device that does not
exist, autotuning takes the first configuration, float arguments are float32 and can be cast, and libdevice's functions
exist. `and` of tensors works on each element. bfloat16 numbers are added, multiplied, compared and cast as numbers, and
rounded to nearest. Without the patch, Triton 3.8's interpreter computes with the bits of bfloat16 numbers, and cuts
bits off in a cast to bfloat16; docs/found.md shows both.
"""

import ast
import os
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import libdevice as cuda_libdevice  # pyright: ignore[reportMissingImports]
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]
from triton.runtime.interpreter import TensorHandle  # pyright: ignore[reportMissingImports]

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
BUILDER = interpreter.InterpreterBuilder
COMPARE = (np.less, np.greater, np.less_equal, np.greater_equal, np.equal, np.not_equal)


def widened(handle):
    """Convert a handle of bfloat16 to float32, and return any other value unchanged."""
    if not isinstance(handle, TensorHandle) or handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (np.asarray(handle.data).astype(np.uint32) << 16).view(np.float32)
    return TensorHandle(data, tl.float32)


def narrowed(handle):
    """Round a handle of float32 to the nearest bfloat16."""
    bits = torch.from_numpy(np.array(handle.data, np.float32)).bfloat16().view(torch.uint16)
    return TensorHandle(bits.numpy(), tl.bfloat16)


def on_numbers(method):
    """Wrap a method of the interpreter, so that it computes with bfloat16 numbers and not with their bits."""

    def call(self, *handles, **named):
        wide = [widened(handle) for handle in handles]
        out = method(self, *wide, **named)
        unchanged = all(a is b for a, b in zip(wide, handles, strict=True))
        return out if unchanged or out.dtype.scalar != tl.float32 or handles[-1] in COMPARE else narrowed(out)

    return call


def cast(method):
    def call(self, handle, kind, *arguments):
        if kind.scalar != tl.bfloat16 or handle.dtype.scalar == tl.bfloat16:
            return method(self, widened(handle) if kind.scalar != tl.bfloat16 else handle, kind, *arguments)
        return narrowed(handle)

    return call


def dot(method):
    return lambda self, a, b, *arguments: method(self, widened(a), widened(b), *arguments)


def total(method):
    """Wrap the interpreter's sum, so that bfloat16 numbers are added in float32 and rounded once.

    A GPU rounds more often.
    """

    def call(self, values):
        if values.dtype.scalar != tl.bfloat16:
            return method(self, values)
        wide = np.sum(widened(values.handle).data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(narrowed(TensorHandle(wide, tl.float32)).data, values.dtype)

    return call


def one_configuration(configs, *positional, **named):
    """Replace `triton.autotune`: use the first configuration, because the interpreter cannot time kernels."""
    return tune(configs[:1], *positional, **named)


def argument(value):
    """Convert an argument of a kernel as a GPU does: a Python float becomes a float32 tensor."""
    if not isinstance(value, float):
        return wrap(value)
    return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


def logical(a, b, conjunction):
    """Compute a kernel's `a and b` if `conjunction` is true, otherwise its `a or b`.

    If a or b is a tensor, the result is computed element by element.
    """
    if isinstance(a, tl.tensor) or isinstance(b, tl.tensor):
        return a & b if conjunction else a | b
    return (a and b) if conjunction else (a or b)


def by_numpy(function):
    """Turn a NumPy function into a function of one float32 tensor of the interpreter."""
    return lambda x: tl.tensor(TensorHandle(function(np.asarray(x.handle.data)), x.dtype.scalar), x.type)


def half_away(x):
    """Round to whole numbers, halves away from zero."""
    return np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)


def negated(a):
    return a == 0 if isinstance(a, tl.tensor) else not a


class BooleanRewriter(interpreter.ASTTransformer):
    """Replaces `and`, `or` and `not`, so that they work on tensors element by element, as in compiled kernels."""

    def visit_Assign(self, node):
        node.value = self.visit(node.value)
        return super().visit_Assign(node)

    def visit_BoolOp(self, node):
        first, *operands = (self.visit(value) for value in node.values)
        for operand in operands:
            conjunction = ast.Constant(value=isinstance(node.op, ast.And))
            first = ast.Call(ast.Name("logical", ast.Load()), [first, operand, conjunction], [])
        return first

    def visit_UnaryOp(self, node):
        node.operand = self.visit(node.operand)
        return ast.Call(ast.Name("negated", ast.Load()), [node.operand], []) if isinstance(node.op, ast.Not) else node


tune, wrap = triton.autotune, interpreter._implicit_cvt
# A description of the GPU with few multiprocessors, because the interpreter takes a millisecond for each program.
H200 = SimpleNamespace(multi_processor_count=8, warp_size=32, name="H200", major=9, minor=0, total_memory=2**37)


PATCHED: set[str] = set()  # modules with functions that see a patched `tl` in this launch


def device_call(self, *positional, **named):
    """Call a kernel function from inside a kernel.

    Triton would patch its language at every call, which takes 10 ms. We patch it once.
    """
    if self.fn.__module__ not in PATCHED:
        interpreter._patch_lang(self.fn)
        PATCHED.add(self.fn.__module__)
    return self.rewrite()(*positional, **named)


def launched(method):
    def call(self, *positional, **named):
        PATCHED.clear()
        return method(self, *positional, **named)

    return call


def mend():
    """Apply to Triton's interpreter all patches that this module's docstring describes."""
    vars(interpreter).update(logical=logical, negated=negated, _implicit_cvt=argument)
    interpreter.FunctionRewriter.ast_transformer = BooleanRewriter()
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(BUILDER, name, on_numbers(getattr(BUILDER, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(BUILDER, name, cast(getattr(BUILDER, name)))
    BUILDER.get_bf16 = lambda self, value: narrowed(TensorHandle(np.array([value], np.float32), tl.float32))
    BUILDER.create_dot = dot(BUILDER.create_dot)
    interpreter.ReduceOps.sum = total(interpreter.ReduceOps.sum)
    for name in ("rsqrt", "exp", "log", "sqrt"):
        setattr(libdevice, name, partial(getattr(tl, name), _semantic=interpreter.interpreter_semantic))
    libdevice.round = cuda_libdevice.round = by_numpy(half_away)
    libdevice.tanh = by_numpy(np.tanh)
    triton.autotune = one_configuration
    interpreter.InterpretedFunction.__call__ = device_call
    interpreter.GridExecutor.__call__ = launched(interpreter.GridExecutor.__call__)
    for name, value in {
        "device": lambda _device: nullcontext(),
        "device_of": lambda _tensor: nullcontext(),
        "current_device": lambda: 0,
        "get_device_properties": lambda _device=None: H200,
        "get_device_capability": lambda _device=None: (9, 0),
    }.items():
        setattr(torch.cuda, name, value)


if INTERPRETED:
    mend()
else:
    torch.set_default_device("cuda")


def angles(positions, frequencies):
    """Compute the cosines and sines of RoPE [..., seq, pairs], in float32 as models store them."""
    turned = positions[..., None].float() * frequencies.float()
    return turned.cos(), turned.sin()


def in_two_parts(q, k, v, lengths, *, merge):
    """Attend with one query per sequence to each half of the keys, and merge the two outputs [batch heads head_dim].

    torch computes each half's output and the log-sum-exp of its scores [batch heads], in float32. `merge` takes the
    first half's output and log-sum-exp, and then the second half's.
    """
    group, scale = q.shape[1] // k.shape[2], q.shape[-1] ** -0.5
    keys, values = (a.float().repeat_interleave(group, 2) for a in (k, v))
    scores = torch.einsum("bhd,bshd->bhs", q.float(), keys) * scale
    at = torch.arange(k.shape[1], device=q.device)
    parts = []
    for low, high in ((0 * lengths, lengths // 2), (lengths // 2, lengths)):
        hidden = (at < low[:, None]) | (at >= high[:, None])
        seen = scores.masked_fill(hidden[:, None], -torch.inf)
        lse = seen.logsumexp(-1)
        weights = torch.where(hidden[:, None], 0.0, (seen - lse[..., None]).exp())
        parts += [torch.einsum("bhs,bshd->bhd", weights, values), lse]
    return merge(*parts)


def package(name, **members):
    """Replace a package's `__init__`, because it would look for a GPU. Modules of the package can still be imported."""
    parent = sys.modules.get(name.rpartition(".")[0])
    spec = find_spec(name) if "." not in name or parent else None
    sys.modules[name] = module = ModuleType(name)
    if spec is not None and spec.submodule_search_locations:
        module.__path__ = list(spec.submodule_search_locations)
    vars(module).update(members)


def without_packages(name):
    """Import the module `name` without running the `__init__` of its parent packages."""
    *parents, _ = accumulate(name.split("."), "{}.{}".format)
    for parent in parents:
        if parent not in sys.modules:
            package(parent)
    return import_module(name)


def stand_ins(*names):
    """Replace the modules `names`, which a kernel imports but does not use, with mocks."""
    for name in names:
        sys.modules[name] = MagicMock(name=name)
