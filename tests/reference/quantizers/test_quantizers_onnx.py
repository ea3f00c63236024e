"""Quantizers agree with the node tests of ONNX, which compute the expected outputs independently of us.

An adapter per operator calls `reference` with the inputs of a case. ONNX has one scale per tensor, per index of an
axis, or per block along an axis. `blocks.spread` expands all three. Codes must be equal unless ONNX's float32 quotient
may have hit a tie; a dequantized weight may be off by the roundings of its dtype, which we count.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import affine
from llamaspec.reference.quantizers.blocks import spread
from llamaspec.reference.quantizers.minifloat import E2M1, E4M3, E5M2
from tests.reference.onnx_cases import Case, node_cases
from tests.support.strategies import assert_within, roundoff

MINIFLOATS = {
    np.dtype(ml_dtypes.float8_e4m3fn): E4M3,
    np.dtype(ml_dtypes.float8_e5m2): E5M2,
    np.dtype(ml_dtypes.float4_e2m1fn): E2M1,
}


def array(value: Any) -> np.ndarray:
    """Convert an ONNX value to NumPy; ONNX passes dtypes that NumPy lacks as protocol buffers."""
    return np.asarray(onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)


def needed(case: Case, index: int) -> np.ndarray:
    value = case.input(index)
    assert value is not None
    return array(value)


def output(case: Case, index: int = 0) -> np.ndarray:
    value = case.outputs[index]
    assert value is not None
    return array(value)


def codes_of(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8)


def ends(dtype: np.dtype) -> tuple[int, int]:
    info = ml_dtypes.iinfo(dtype)
    return int(info.min), int(info.max)


def everywhere(case: Case, parameter: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Expand scales or zero points to one per element of the tensor."""
    if parameter.ndim < len(shape):
        grid = [1] * len(shape)
        if parameter.size > 1:
            grid[case.attributes.get("axis", 1)] = parameter.size
        parameter = parameter.reshape(grid)
    return spread(parameter, shape)


def zeros_of(case: Case, index: int, shape: tuple[int, ...]) -> np.ndarray:
    zeros = case.input(index)
    return np.zeros(shape) if zeros is None else everywhere(case, array(zeros).astype(np.float64), shape)


def quantize_linear(case: Case) -> None:
    x, expected = needed(case, 0), output(case)
    scales = everywhere(case, needed(case, 1), x.shape).astype(np.float64)
    if expected.dtype in MINIFLOATS:
        to = MINIFLOATS[expected.dtype]  # ONNX adds a zero point of 0, which turns -0 into 0
        np.testing.assert_array_equal(to.decode(to.encode(x / scales)), to.decode(codes_of(expected)))
        return
    lowest, highest = ends(expected.dtype)
    codes = affine.encode(x.astype(np.float64), scales, zeros_of(case, 2, x.shape), lowest=lowest, highest=highest)
    np.testing.assert_array_equal(codes, expected.astype(np.float64))


def dequantize_linear(case: Case) -> None:
    x, expected = needed(case, 0), output(case)
    scales = everywhere(case, needed(case, 1), x.shape).astype(np.float64)
    if x.dtype in MINIFLOATS:
        exact = MINIFLOATS[x.dtype].decode(codes_of(x)) * scales
    else:
        zeros = zeros_of(case, 2, x.shape)
        exact = affine.dequantize(affine.Affine(x.astype(np.int64), scales, zeros))  # codes wider than those of files
    assert_within(expected, exact, roundoff(expected.dtype) * np.abs(exact))


def dynamic_quantize_linear(case: Case) -> None:
    x = needed(case, 0)
    q = affine.quantize(x, bits=8, block=x.shape)
    np.testing.assert_array_equal(q.scales.ravel(), output(case, 1))
    np.testing.assert_array_equal(q.zeros.ravel(), output(case, 2))
    steps = x / q.scales.astype(np.float64).reshape(-1)
    tie = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) <= roundoff(np.float32) * np.abs(steps)
    difference = np.abs(q.codes.astype(int) - output(case, 0))
    assert np.all(difference <= tie)


def quantized_product(case: Case) -> None:
    (a, a_scale, a_zero, b, b_scale, b_zero, scale, zero) = (needed(case, i) for i in range(8))
    read = [
        (m.astype(np.float64) - z.astype(np.float64)) * s.astype(np.float64)
        for m, s, z in ((a, a_scale, a_zero), (b, b_scale, b_zero))
    ]
    b_rows = read[1].reshape(-1, *read[1].shape[-2:]).swapaxes(-1, -2)
    pages = [linear(x, w) for x, w in zip(read[0].reshape(-1, *a.shape[-2:]), b_rows, strict=True)]
    y = np.stack(pages).reshape(output(case).shape)
    lowest, highest = ends(output(case).dtype)
    parameters = (np.broadcast_to(p.astype(np.float64), y.shape) for p in (scale, zero))
    codes = affine.encode(y, *parameters, lowest=lowest, highest=highest)
    np.testing.assert_array_equal(codes, output(case).astype(np.float64))


def cast(case: Case) -> None:
    """Compare saturating casts for all numbers that are not NaN."""
    x, expected = needed(case, 0), output(case)
    if expected.dtype in MINIFLOATS:
        number = ~np.isnan(x)
        codes = MINIFLOATS[expected.dtype].encode(x[number].astype(np.float64))
        np.testing.assert_array_equal(codes, codes_of(expected)[number])
    else:
        np.testing.assert_array_equal(MINIFLOATS[x.dtype].decode(codes_of(x)), expected.astype(np.float64))


def casts() -> list[Case]:
    """List the saturating casts to or from a minifloat that `reference` defines."""
    cases = []
    for case in node_cases("Cast"):
        dtypes = {needed(case, 0).dtype, output(case).dtype}
        if dtypes & MINIFLOATS.keys() and case.attributes.get("saturate", 1):
            cases.append(case)
    return cases


ADAPTERS: dict[str, Callable[[Case], None]] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "QLinearMatMul": quantized_product,
}
CASES = [case for op in ADAPTERS for case in node_cases(op)]


def test_there_are_cases():
    assert len(CASES) >= 38 and len(casts()) >= 12


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_quantization(case):
    ADAPTERS[case.op](case)


@pytest.mark.parametrize("case", casts(), ids=lambda case: case.name)
def test_cast(case):
    cast(case)
