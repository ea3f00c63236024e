"""Quantizers of bitsandbytes, on a CPU. Docstrings name the called functions."""

import bitsandbytes.functional as bnb  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]


def quantize(w, *, scheme):
    """Call `quantize_4bit(quant_type="nf4", blocksize=64)` for nf4, `int8_vectorwise_quant` for q8_row."""
    if scheme == "q8_row":
        codes, largest, _ = bnb.int8_vectorwise_quant(w)
        return codes, largest[:, None] / 127
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4")
    codes = torch.stack([packed >> 4, packed & 15], -1)
    return codes.reshape(w.shape).to(torch.int8), state.absmax.reshape(len(w), -1)


def dequantize(codes, scales, *, scheme):
    """Call `dequantize_4bit(quant_type="nf4", blocksize=64)`."""
    packed = (codes[:, 0::2].to(torch.uint8) << 4 | codes[:, 1::2].to(torch.uint8)).reshape(-1, 1)
    state = bnb.QuantState(
        absmax=scales.flatten(),
        shape=codes.shape,
        code=bnb.get_4bit_type("nf4", device="cpu"),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.float32,
    )
    return bnb.dequantize_4bit(packed, state)
