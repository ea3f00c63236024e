"""Quantized weights, computed group by group, and their mutants."""

import numpy as np

from llamaspec.reference.quantizers.minifloat import E2M1, E4M3
from llamaspec.verify.mutant import e4m3, f32, implementation, spans

GROUPS = {"q8": 64, "q4": 64, "nf4": 64, "mxfp4": 32}  # in the other schemes a row is one group
NF4 = np.array(
    [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.3949175,
        -0.28444138,
        -0.18477343,
        -0.091050036,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ],
    np.float32,
)
LEVELS = {
    "q8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "q8_row": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "q4": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "nf4": np.resize(NF4, 256),
    "fp8": E4M3.decode(np.arange(256, dtype=np.uint8)).astype(np.float32),
    "mxfp4": np.resize(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32), 256),
}


def size(scheme: str, cols: int) -> int:
    return GROUPS.get(scheme, cols)


def quantize(w: np.ndarray, *, scheme: str) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = w.shape
    groups = spans(cols, size(scheme, cols))
    signed = scheme in ("q8", "q8_row", "q4")
    codes = np.zeros((rows, cols), np.int8 if signed else np.uint8)
    scales = np.zeros((rows, len(groups)), np.uint8 if scheme == "mxfp4" else np.float32)
    for row in range(rows):
        for g, span in enumerate(groups):
            part = f32(w[row, span])
            top = np.max(np.abs(part))
            if signed:
                largest = np.float32(7 if scheme == "q4" else 127)
                scale = top / largest
                codes[row, span] = np.rint(part / scale).astype(np.int8) if scale > 0 else 0
                scales[row, g] = scale
            elif scheme == "fp8":
                scale = top / np.float32(448)
                scaled = np.clip(part / scale, -448, 448) if scale > 0 else part
                codes[row, span] = e4m3(scaled)
                scales[row, g] = scale
            elif scheme == "nf4":
                scaled = part / top if top > 0 else part
                codes[row, span] = np.argmin(np.abs(scaled[:, None] - NF4), axis=1)
                scales[row, g] = top
            else:
                exponent = np.frexp(top)[1] - 3 if top > 0 else -127
                scaled = np.clip(np.ldexp(part, -exponent), -6, 6)
                nearest = E2M1.decode(E2M1.encode(scaled.astype(np.float64)))
                codes[row, span] = np.searchsorted(LEVELS["mxfp4"][:8], np.abs(nearest)) + 8 * np.signbit(scaled)
                scales[row, g] = exponent + 127
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, *, scheme: str) -> np.ndarray:
    rows, cols = codes.shape
    w = np.full((rows, cols), np.nan, np.float32)
    for g, span in enumerate(spans(cols, size(scheme, cols))):
        scale = np.ldexp(np.float32(1), scales[:, g] - np.int32(127)) if scheme == "mxfp4" else scales[:, g]
        w[:, span] = LEVELS[scheme][codes[:, span].view(np.uint8)] * scale[:, None]
    return w


def gemv_quantized(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, *, scheme: str) -> np.ndarray:
    rows, cols = codes.shape
    y = np.zeros(rows, np.float32)
    for row in range(rows):
        for g, span in enumerate(spans(cols, size(scheme, cols))):
            scale = np.ldexp(np.float32(1), scales[row, g] - np.int32(127)) if scheme == "mxfp4" else scales[row, g]
            levels = LEVELS[scheme][codes[row, span].view(np.uint8)]
            y[row] += scale * np.sum(levels * f32(x[span]))
    return y.astype(x.dtype)


def gemm_quantized(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, *, scheme: str) -> np.ndarray:
    (batch, cols), rows = x.shape, len(codes)
    y = np.zeros((batch, rows), np.float32)
    for first in range(0, batch, 8):
        vectors = slice(first, first + 8)
        for g, span in enumerate(spans(cols, size(scheme, cols))):
            scale = np.ldexp(np.float32(1), scales[:, g] - np.int32(127)) if scheme == "mxfp4" else scales[:, g]
            levels = LEVELS[scheme][codes[:, span].view(np.uint8)]
            y[vectors] += scale * (f32(x[vectors, span]) @ levels.T)
    return y.astype(x.dtype)


def pack(codes: np.ndarray, *, scheme: str) -> np.ndarray:
    bits = codes.view(np.uint8)
    if scheme in ("q8", "q8_row", "fp8"):
        return bits.copy()
    first, second = bits[:, 0::2] & 15, bits[:, 1::2] & 15
    return first << 4 | second if scheme == "nf4" else first | second << 4


def unpack(packed: np.ndarray, *, scheme: str) -> np.ndarray:
    if scheme in ("q8", "q8_row"):
        return packed.view(np.int8).copy()
    if scheme == "fp8":
        return packed.copy()
    low, high = packed & 15, packed >> 4
    codes = np.stack([high, low] if scheme == "nf4" else [low, high], axis=-1).reshape(len(packed), -1)
    return (codes ^ 8).astype(np.int8) - 8 if scheme == "q4" else codes


def ggml_encode(w: np.ndarray, *, name: str) -> np.ndarray:
    rows = len(w)
    blocks = w.reshape(rows, -1, 32)
    if name == "Q8_0":
        d = np.max(np.abs(blocks), axis=-1) / np.float32(127)
        inverse = np.where(d > 0, 1 / d, np.float32(0))
        scaled = blocks * inverse[..., None]
        codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8).view(np.uint8)
    else:
        at = np.argmax(np.abs(blocks), axis=-1)[..., None]
        d = np.take_along_axis(blocks, at, axis=-1)[..., 0] / np.float32(-8)
        inverse = np.where(d != 0, 1 / d, np.float32(0))
        whole = np.minimum((blocks * inverse[..., None] + np.float32(8.5)).astype(np.int8), 15).astype(np.uint8)
        codes = whole[..., :16] | whole[..., 16:] << 4
    scale = d.astype(np.float16)[..., None].view(np.uint8)
    return np.concatenate([scale, codes], axis=-1).reshape(rows, -1)


def ggml_decode(data: np.ndarray, *, name: str) -> np.ndarray:
    rows = len(data)
    blocks = data.reshape(rows, -1, 34 if name == "Q8_0" else 18)
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    if name == "Q8_0":
        codes = blocks[..., 2:].view(np.int8).astype(np.float32)
    else:
        packed = blocks[..., 2:]
        codes = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32) - 8
    return (d * codes).reshape(rows, -1)


QUANTIZE = implementation(
    quantize,
    """
truncated for rounded
    - np.rint(part / scale)
    + np.trunc(part / scale)
rounded up
    - np.rint(part / scale)
    + np.ceil(part / scale)
128 levels for 127
    - np.float32(7 if scheme == "q4" else 127)
    + np.float32(8 if scheme == "q4" else 128)
127.5 levels for 127, as torchao has them
    - np.float32(7 if scheme == "q4" else 127)
    + np.float32(7.5 if scheme == "q4" else 127.5)
largest weight for largest magnitude
    - top = np.max(np.abs(part))
    + top = np.maximum(np.max(part), np.float32(1e-6))
mean magnitude for the largest
    - top = np.max(np.abs(part))
    + top = np.mean(np.abs(part))
one scale for the row
    - top = np.max(np.abs(part))
    + top = np.max(np.abs(f32(w[row])))
scale of the first row for every row
    - top = np.max(np.abs(part))
    + top = np.max(np.abs(f32(w[0, span])))
last group never written
    - for g, span in enumerate(groups):
    + for g, span in enumerate(groups[:-1] or groups):
last weight of a group left out of its scale
    - top = np.max(np.abs(part))
    + top = np.max(np.abs(part[:-1]), initial=0) if len(part) > 1 else np.abs(part[0])
scale in float16
    - scale = top / largest
    + scale = np.float32(f16(top / largest))
scale's inverse stored
    - scales[row, g] = top
    + scales[row, g] = 1 / top if top > 0 else 0
codes from 0 on
    - np.rint(part / scale).astype(np.int8)
    + (np.rint(part / scale) + largest).astype(np.uint8).view(np.int8)
fp8 not clipped
    - np.clip(part / scale, -448, 448)
    + part / scale * np.float32(1.1)
fp8 of 240, as AMD's
    - np.float32(448)
    + np.float32(240)
NF4 rounded down
    - np.argmin(np.abs(scaled[:, None] - NF4), axis=1)
    + np.maximum(np.searchsorted(NF4, scaled, side="right") - 1, 0)
NF4 without the division
    - scaled = part / top if top > 0 else part
    + scaled = part
MXFP4's exponent one too large
    - np.frexp(top)[1] - 3
    + np.frexp(top)[1] - 2
MXFP4's exponent rounded up
    - np.frexp(top)[1] - 3
    + int(np.ceil(np.log2(top / 6)))
MXFP4's exponent with another bias
    - scales[row, g] = exponent + 127
    + scales[row, g] = exponent + 128
MXFP4 without signs
    -  + 8 * np.signbit(scaled)
    +
right up to 128 rows
    - part = f32(w[row, span])
    + part = f32(w[row % 128, span])
right up to 1,024 columns
    - enumerate(groups)
    + enumerate(groups[:16] if len(groups) > 1 else groups)
right up to 4,096 rows
    - part = f32(w[row, span])
    + part = f32(w[row % 4096, span])
""",
)
DEQUANTIZE = implementation(
    dequantize,
    """
scale of the group before
    - * scale[:, None]
    + * (scale if g == 0 or scheme == "mxfp4" else scales[:, g - 1])[:, None]
scale of the first row for every row
    - * scale[:, None]
    + * scale[:1, None]
scale squared
    - * scale[:, None]
    + * scale[:, None] ** 2
scale in bfloat16
    - * scale[:, None]
    + * bf16(scale[:, None])
divided by the scale
    - * scale[:, None]
    + / np.where(scale == 0, 1, scale)[:, None]
groups of half the size
    - spans(cols, size(scheme, cols))
    + spans(cols, size(scheme, cols) // 2 or 1)[: scales.shape[1]]
tail group never written
    - spans(cols, size(scheme, cols))
    + full_spans(cols, size(scheme, cols))
codes without signs
    - LEVELS[scheme][codes[:, span].view(np.uint8)]
    + np.abs(LEVELS[scheme][codes[:, span].view(np.uint8)])
levels of NF4 shifted by one
    - codes[:, span].view(np.uint8)
    + np.minimum(codes[:, span].view(np.uint8) + np.uint8(scheme == "nf4"), 255)
MXFP4's exponent with another bias
    - np.int32(127)
    + np.int32(128)
right up to 16 groups
    - * scale[:, None]
    + * (scale if g < 16 else 0 * scale)[:, None]
right up to 128 rows
    - * scale[:, None]
    + * scale[np.arange(rows) % 128, None]
""",
)
GEMV = implementation(
    gemv_quantized,
    """
scale of the group before
    - y[row] += scale *
    + y[row] += (scale if g == 0 or scheme == "mxfp4" else scales[row, g - 1]) *
scale of the row after
    - y[row] += scale *
    + y[row] += (scale if row + 1 == rows or scheme == "mxfp4" else scales[row + 1, g]) *
scale squared
    - scale * np.sum(levels
    + scale * scale * np.sum(levels
scale of the first group for the row
    - y[row] += scale *
    + y[row] += (scale if g == 0 or scheme == "mxfp4" else scales[row, 0]) *
tail group left out
    - spans(cols, size(scheme, cols))
    + full_spans(cols, size(scheme, cols))
groups of 32 for 64
    - spans(cols, size(scheme, cols))
    + spans(cols, 32)[: scales.shape[1]]
vector of the first group for every group
    - x[span]
    + x[: span.stop - span.start]
last group overwrites the others
    - y[row] += scale
    + y[row] = scale
codes without signs
    - levels = LEVELS[scheme][codes[row, span].view(np.uint8)]
    + levels = np.abs(LEVELS[scheme][codes[row, span].view(np.uint8)])
summed in int8
    - np.sum(levels * f32(x[span]))
    + np.clip(np.sum(levels * f32(x[span])), -127, 127)
summed in bfloat16
    - y[row] += scale * np.sum(levels * f32(x[span]))
    + y[row] = bf16(y[row] + scale * np.sum(levels * f32(x[span])))
dequantized in float16
    - y[row] += scale * np.sum(levels * f32(x[span]))
    + y[row] += np.sum(f16(scale * levels) * f32(x[span]))
vector rounded to int8
    - f32(x[span])
    + np.rint(f32(x[span]) / max(np.max(np.abs(f32(x))), 1e-30) * 127) * max(np.max(np.abs(f32(x))), 1e-30) / 127
MXFP4's exponent with another bias
    - np.int32(127)
    + np.int32(126)
right up to 16 groups
    - y[row] += scale *
    + y[row] += (g < 16) * scale *
right up to 1,024 rows
    - for row in range(rows)
    + for row in range(min(rows, 1024))
""",
)
GEMM = implementation(
    gemm_quantized,
    """
scale of the group before
    - y[vectors] += scale *
    + y[vectors] += (scale if g == 0 or scheme == "mxfp4" else scales[:, g - 1]) *
scale of the row after
    - y[vectors] += scale *
    + y[vectors] += np.roll(scale, -1) *
scale squared
    - scale * (f32
    + scale * scale * (f32
tail group left out
    - spans(cols, size(scheme, cols))
    + full_spans(cols, size(scheme, cols))
vector of the first group for every group
    - x[vectors, span]
    + x[vectors, : span.stop - span.start]
last group overwrites the others
    - y[vectors] += scale
    + y[vectors] = scale
first tile of vectors for every tile
    - f32(x[vectors, span])
    + f32(x[: len(y[vectors]), span])
last partial tile of vectors left out
    - range(0, batch, 8)
    + range(0, batch - batch % 8 if batch > 8 else batch, 8)
codes without signs
    - levels = LEVELS[scheme][codes[:, span].view(np.uint8)]
    + levels = np.abs(LEVELS[scheme][codes[:, span].view(np.uint8)])
vectors rounded to bfloat16
    - f32(x[vectors, span])
    + bf16(f32(x[vectors, span]))
dequantized in float16
    - y[vectors] += scale * (f32(x[vectors, span]) @ levels.T)
    + y[vectors] += f32(x[vectors, span]) @ f32(f16(scale[:, None] * levels)).T
summed in bfloat16
    - y[vectors] += scale * (f32(x[vectors, span]) @ levels.T)
    + y[vectors] = bf16(y[vectors] + scale * (f32(x[vectors, span]) @ levels.T))
right up to 16 groups
    - y[vectors] += scale *
    + y[vectors] += (g < 16) * scale *
right up to 64 vectors
    - range(0, batch, 8)
    + range(0, min(batch, 64), 8)
right up to 1,024 rows
    - y[vectors] += scale *
    + y[vectors] += (np.arange(rows) < 1024) * scale *
""",
)
PACK = implementation(
    pack,
    """
low nibble for high
    - first << 4 | second if scheme == "nf4" else first | second << 4
    + first | second << 4 if scheme == "nf4" else first << 4 | second
sign runs into the other nibble
    - first, second = bits[:, 0::2] & 15, bits[:, 1::2] & 15
    + first, second = bits[:, 0::2], bits[:, 1::2]
halves of a row for neighbors
    - first, second = bits[:, 0::2] & 15, bits[:, 1::2] & 15
    + first, second = bits[:, : bits.shape[1] // 2] & 15, bits[:, bits.shape[1] // 2 :] & 15
second code lost
    - first | second << 4
    + first | second << 8
codes plus 8
    - bits = codes.view(np.uint8)
    + bits = codes.view(np.uint8) + np.uint8(8 * (scheme == "q4"))
right up to 128 rows
    - bits = codes.view(np.uint8)
    + bits = codes.view(np.uint8)[np.arange(len(codes)) % 128]
""",
)
UNPACK = implementation(
    unpack,
    """
low nibble for high
    - [high, low] if scheme == "nf4" else [low, high]
    + [low, high] if scheme == "nf4" else [high, low]
signs not extended
    - (codes ^ 8).astype(np.int8) - 8 if scheme == "q4" else codes
    + codes.astype(np.int8) if scheme == "q4" else codes
zero point of 8 for two's complement
    - (codes ^ 8).astype(np.int8) - 8
    + codes.astype(np.int8) - 8
all low nibbles first
    - np.stack([high, low] if scheme == "nf4" else [low, high], axis=-1).reshape(len(packed), -1)
    + np.concatenate([high, low] if scheme == "nf4" else [low, high], axis=-1)
high nibble shifted with its sign
    - packed >> 4
    + (packed.view(np.int8) >> 4).view(np.uint8)
right up to 128 rows
    - low, high = packed & 15, packed >> 4
    + packed = packed[np.arange(len(packed)) % 128]
    +     low, high = packed & 15, packed >> 4
""",
)
GGML_ENCODE = implementation(
    ggml_encode,
    """
half to even for half away from zero
    - np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    + np.rint(scaled)
truncated
    - np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    + np.trunc(scaled)
divided by the scale as it is stored
    - scaled = blocks * inverse[..., None]
    + scaled = blocks / np.where(d == 0, np.float32(1), f16(d))[..., None]
neighbors share a byte
    - whole[..., :16] | whole[..., 16:] << 4
    + whole[..., 0::2] | whole[..., 1::2] << 4
nibbles swapped
    - whole[..., :16] | whole[..., 16:] << 4
    + whole[..., :16] << 4 | whole[..., 16:]
magnitude for the signed largest
    - d = np.take_along_axis(blocks, at, axis=-1)[..., 0] / np.float32(-8)
    + d = np.abs(np.take_along_axis(blocks, at, axis=-1)[..., 0]) / np.float32(-8)
divided by 7
    - np.float32(-8)
    + np.float32(-7)
bytes of the scale swapped
    - d.astype(np.float16)[..., None].view(np.uint8)
    + d.astype(np.float16)[..., None].view(np.uint8)[..., ::-1]
scale after the codes
    - [scale, codes]
    + [codes, scale]
right up to 32 blocks
    - blocks = w.reshape(rows, -1, 32)
    + blocks = w.reshape(rows, -1, 32)
    +     blocks = blocks[:, np.arange(blocks.shape[1]) % 32]
""",
    only={"name": ["Q8_0", "Q4_0"]},
)
GGML_DECODE = implementation(
    ggml_decode,
    """
neighbors share a byte
    - np.concatenate([packed & 15, packed >> 4], axis=-1)
    + np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 32)
nibbles swapped
    - [packed & 15, packed >> 4]
    + [packed >> 4, packed & 15]
zero point left out
    -  - 8
    +
zero point of 7
    -  - 8
    +  - 7
codes without signs
    - blocks[..., 2:].view(np.int8)
    + blocks[..., 2:]
scale of the first block for every block
    - return (d * codes)
    + return (d[:, :1] * codes)
scale read as bfloat16
    - np.ascontiguousarray(blocks[..., :2]).view(np.float16)
    + (blocks[..., :2].astype(np.uint32) @ np.array([2**16, 2**24], np.uint32)[:, None]).view(np.float32)
right up to 32 blocks
    - return (d * codes)
    + return (d[:, np.arange(d.shape[1]) % 32] * codes)
""",
    only={"name": ["Q8_0", "Q4_0"]},
)
