"""Quantizers of torchao, on a CPU. Docstrings name the called functions."""

import torch  # pyright: ignore[reportMissingImports]
from torchao.prototype.mx_formats import mx_tensor  # pyright: ignore[reportMissingImports]
from torchao.quantization import quant_primitives as affine  # pyright: ignore[reportMissingImports]


def quantize(w, *, scheme):
    """Call `to_mx` for mxfp4; `choose_qparams_affine(SYMMETRIC)` and `quantize_affine` for q8 and q8_row."""
    if scheme == "mxfp4":
        scales, packed = mx_tensor.to_mx(w, torch.float4_e2m1fn_x2, 32)
        packed = packed.view(torch.uint8)
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(w.shape)
        return codes, scales.view(torch.uint8)
    block = (1, 64 if scheme == "q8" else w.shape[1])
    scale, zero = affine.choose_qparams_affine(
        w, affine.MappingType.SYMMETRIC, block, torch.int8, -127, 127, eps=2**-126, scale_dtype=torch.float32
    )
    codes = affine.quantize_affine(w, block, scale, zero, torch.int8, -127, 127)
    return codes, scale.reshape(len(w), -1)
