"""Triton's interpreter as a GPU would be: import this before a package of kernels.

It changes the machine and no kernel. `torch.cuda` names a device of no consequence; of several tuning configurations
the first is taken; a float argument is a float32 that a kernel may cast; libdevice's functions exist; `and` of tensors
goes element by element; and bfloat16 numbers are added, multiplied, compared and cast as numbers, rounded to the
nearest. Triton 3.8's interpreter does arithmetic on the bits of bfloat16 and cuts bits off where it casts to it;
docs/found.md shows both.
"""

import ast
import os
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]
from triton.runtime.interpreter import TensorHandle  # pyright: ignore[reportMissingImports]

BUILDER = interpreter.InterpreterBuilder
COMPARE = (np.less, np.greater, np.less_equal, np.greater_equal, np.equal, np.not_equal)


def widened(handle):
    """A handle of bfloat16 as float32; anything else as it is."""
    if not isinstance(handle, TensorHandle) or handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (np.asarray(handle.data).astype(np.uint32) << 16).view(np.float32)
    return TensorHandle(data, tl.float32)


def narrowed(handle):
    """A handle of float32 rounded to the nearest bfloat16."""
    bits = torch.from_numpy(np.array(handle.data, np.float32)).bfloat16().view(torch.uint16)
    return TensorHandle(bits.numpy(), tl.bfloat16)


def on_numbers(method):
    """A method of the interpreter that does arithmetic on bfloat16 numbers, not on their bits."""

    def call(self, *handles, **named):
        wide = [widened(handle) for handle in handles]
        out = method(self, *wide, **named)
        same = all(a is b for a, b in zip(wide, handles, strict=True))
        return out if same or out.dtype.scalar != tl.float32 or handles[-1] in COMPARE else narrowed(out)

    return call


def cast(method):
    def call(self, handle, kind, *rest):
        if kind.scalar != tl.bfloat16 or handle.dtype.scalar == tl.bfloat16:
            return method(self, widened(handle) if kind.scalar != tl.bfloat16 else handle, kind, *rest)
        return narrowed(handle)

    return call


def dot(method):
    return lambda self, a, b, *rest: method(self, widened(a), widened(b), *rest)


def one_configuration(configs, *positional, **named):
    """`triton.autotune` without a choice: the interpreter cannot time."""
    return tune(configs[:1], *positional, **named)


def argument(value):
    """The argument as a kernel on a GPU gets it."""
    if not isinstance(value, float):
        return wrap(value)
    return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


def logical(a, b, both):
    """`a and b` or `a or b` of a kernel, element by element where one of them is a tensor."""
    if isinstance(a, tl.tensor) or isinstance(b, tl.tensor):
        return a & b if both else a | b
    return (a and b) if both else (a or b)


def negated(a):
    return a == 0 if isinstance(a, tl.tensor) else not a


class Words(interpreter.ASTTransformer):
    """Makes `and`, `or` and `not` of tensors what the compiler makes of them; Python would take one of the two."""

    def visit_Assign(self, node):
        node.value = self.visit(node.value)
        return super().visit_Assign(node)

    def visit_BoolOp(self, node):
        first, *others = (self.visit(value) for value in node.values)
        for other in others:
            both = ast.Constant(value=isinstance(node.op, ast.And))
            first = ast.Call(ast.Name("logical", ast.Load()), [first, other, both], [])
        return first

    def visit_UnaryOp(self, node):
        node.operand = self.visit(node.operand)
        return ast.Call(ast.Name("negated", ast.Load()), [node.operand], []) if isinstance(node.op, ast.Not) else node


interpreter.logical, interpreter.negated = logical, negated
interpreter.FunctionRewriter.ast_transformer = Words()
for name in ("binary_op", "unary_op", "ternary_op"):
    setattr(BUILDER, name, on_numbers(getattr(BUILDER, name)))
for name in ("cast_impl", "create_fp_to_fp"):
    setattr(BUILDER, name, cast(getattr(BUILDER, name)))
BUILDER.get_bf16 = lambda self, value: narrowed(TensorHandle(np.array([value], np.float32), tl.float32))
BUILDER.create_dot = dot(BUILDER.create_dot)
for name in ("rsqrt", "exp", "log", "sqrt"):
    setattr(libdevice, name, partial(getattr(tl, name), _semantic=interpreter.interpreter_semantic))
tune, wrap = triton.autotune, interpreter._implicit_cvt
triton.autotune, interpreter._implicit_cvt = one_configuration, argument
H200 = SimpleNamespace(multi_processor_count=132, warp_size=32, name="H200", major=9, minor=0, total_memory=2**37)
for name, value in {
    "device": lambda _device: nullcontext(),
    "device_of": lambda _tensor: nullcontext(),
    "current_device": lambda: 0,
    "get_device_properties": lambda _device=None: H200,
    "get_device_capability": lambda _device=None: (9, 0),
}.items():
    setattr(torch.cuda, name, value)


def angles(positions, frequencies):
    """Cosines and sines of the pairs [..., seq, pairs], in float32 as models keep them."""
    turned = positions[..., None].float() * frequencies.float()
    return turned.cos(), turned.sin()


def package(name, **members):
    """Stand in for a package's `__init__`, which would look for a GPU; its modules are imported from where it lies."""
    parent = sys.modules.get(name.rpartition(".")[0])
    found = find_spec(name) if "." not in name or parent else None
    sys.modules[name] = module = ModuleType(name)
    if found is not None and found.submodule_search_locations:
        module.__path__ = list(found.submodule_search_locations)
    vars(module).update(members)
