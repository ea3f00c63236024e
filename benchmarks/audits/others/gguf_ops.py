"""Functions of `gguf.quants`, llama.cpp's Python package."""

import gguf  # pyright: ignore[reportMissingImports]


def ggml_decode(data, *, name):
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


def ggml_encode(w, *, name):
    return gguf.quants.quantize(w, gguf.GGMLQuantizationType[name])
