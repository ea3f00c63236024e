"""int8 weights of optimum-quanto, with one scale per row, on a CPU. Docstrings name the called functions."""

import torch  # pyright: ignore[reportMissingImports]
from optimum.quanto import AbsmaxOptimizer, qint8, quantize_weight  # pyright: ignore[reportMissingImports]
from optimum.quanto.tensor.weights.qbytes import WeightQBytesTensor  # pyright: ignore[reportMissingImports]


def quantize(w, *, scheme):
    """Call `quantize_weight(qint8, axis=0)` with scales of `AbsmaxOptimizer`, for q8_row."""
    matrix = quantize_weight(w, qint8, 0, AbsmaxOptimizer()(w, qint8, 0))
    return matrix._data, matrix._scale.reshape(len(w), 1)  # one row has a scale without axes


def _weight(codes, scales):
    return WeightQBytesTensor.create(qint8, 0, codes.shape, codes.stride(), codes, scales, None)


def dequantize(codes, scales, *, scheme):
    """Call `WeightQBytesTensor.dequantize`, for q8_row."""
    return _weight(codes, scales).dequantize()


def gemv_quantized(x, codes, scales, *, scheme):
    """Call `torch.nn.functional.linear` with a `WeightQBytesTensor`, for q8_row."""
    return torch.nn.functional.linear(x[None], _weight(codes, scales))[0]
