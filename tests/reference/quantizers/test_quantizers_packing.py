"""Unpacking and packing give back the same bytes, for every byte value at every place."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.reference.quantizers import (
    affine,
    awq,
    binary,
    bitnet,
    ggml,
    gptq,
    hqq,
    kmeans,
    kv_cache,
    llama2c,
    minifloat,
    mx,
    nf4,
    nvfp4,
    pruning,
    symmetric,
)
from llamaspec.reference.quantizers.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2
from llamaspec.reference.quantizers.schemes import SCHEMES


class Layout(NamedTuple):
    """Functions that unpack uint8 [..., bytes] to codes and pack codes to bytes, for a fixed number of bytes."""

    unpack: Callable[[np.ndarray], Any]
    pack: Callable[..., np.ndarray]
    bytes: int


def of_words(words: np.ndarray) -> np.ndarray:
    """Convert int32 [rows, words] to bytes."""
    return np.ascontiguousarray(words).view(np.uint8)


def awq_words(raw: np.ndarray) -> awq.Affine:
    """Unpack AWQ tensors. The same bytes are the codes and the zero points, each row is a group, and scales are 1."""
    words = raw.view("<i4").astype(np.int32)
    return awq.unpack(awq.PackedTensors(words, words, np.ones((len(words), 8 * words.shape[1]), np.float16)))


def gptq_words(raw: np.ndarray, *, bits: int, version: int, part: str) -> gptq.Affine:
    """Unpack `raw` [rows, 4 * bits] as GPTQ tensors: each row of bytes has 32 numbers of `bits` bits.

    If `part` is "codes", a row is the codes of one weight row, in one group. Otherwise it is the zero points of one
    group, for 32 weight rows.
    """
    words = raw.view("<i4").astype(np.int32)
    rows = len(words)
    if part == "codes":
        zeros, scales = np.zeros((1, bits), np.int32), np.ones((1, rows), np.float16)
        packed = gptq.PackedTensors(words.T.copy(), zeros, scales, np.zeros(32, np.int32))
    else:
        codes, scales = np.zeros((rows * bits, 32), np.int32), np.ones((rows, 32), np.float16)
        packed = gptq.PackedTensors(codes, words, scales, np.repeat(np.arange(rows, dtype=np.int32), 32))
    return gptq.unpack(packed, bits=bits, version=version)


def of_every_width() -> Iterator[tuple[str, Layout]]:
    for bits in range(1, 9):
        for module in (affine, hqq, kmeans, *([symmetric] if bits > 1 else [])):
            unpack, pack = (partial(function, bits=bits) for function in (module.unpack, module.pack))
            yield f"{module.__name__.rpartition('.')[2]} {bits}", Layout(unpack, pack, bits)
    for to in (E2M1, E2M3, E3M2, E4M3, E5M2):
        for module in (minifloat, mx):
            unpack, pack = (partial(function, to=to) for function in (module.unpack, module.pack))
            name = f"{module.__name__.rpartition('.')[2]} e{to.exponent_bits}m{to.mantissa_bits}"
            yield name, Layout(unpack, pack, to.bits)


LAYOUTS: dict[str, Layout] = {
    **dict(of_every_width()),
    **{name: Layout(scheme.unpack, scheme.pack, 1) for name, scheme in SCHEMES.items()},
    **{
        name: Layout(
            lambda raw, kind=kind: kind.unpack(raw[:, None]), lambda q, kind=kind: kind.pack(q)[:, 0], kind.bytes
        )
        for name, kind in ggml.TYPES.items()
        if name != "TQ1_0"  # 13 of 256 byte values are not five trits: `test_quantizers_ggml` checks the other 243
    },
    "signs": Layout(binary.unpack, binary.pack, 1),
    "BitNet": Layout(bitnet.unpack, bitnet.pack, 1),
    "NF4": Layout(nf4.unpack, nf4.pack, 1),
    "NVFP4": Layout(nvfp4.unpack, nvfp4.pack, 1),
    "places of 2:4": Layout(pruning.unpack, pruning.pack, 1),
    "cache": Layout(lambda raw: kv_cache.unpack(raw.view(np.int8)), lambda q: kv_cache.pack(q).view(np.uint8), 20),
    "llama2.c": Layout(
        lambda raw: llama2c.unpack(raw.ravel(), shape=(len(raw), 16), group=16),
        lambda q: llama2c.pack(q).reshape(len(q.codes), 20),
        20,
    ),
    "AWQ, codes": Layout(awq_words, lambda q: of_words(awq.pack(q).qweight), 4),
    "AWQ, zeros": Layout(awq_words, lambda q: of_words(awq.pack(q).qzeros), 4),
    **{
        f"GPTQ {bits}, version {version}, {part}": Layout(
            partial(gptq_words, bits=bits, version=version, part=part),
            lambda q, bits=bits, version=version, read=read: of_words(read(gptq.pack(q, bits=bits, version=version))),
            4 * bits,
        )
        for bits in (2, 3, 4, 8)
        for version in (1, 2)
        for part, read in {"codes": lambda p: p.qweight.T, "zeros": lambda p: p.qzeros}.items()
    },
}


def every_byte(count: int) -> np.ndarray:
    """Return bytes [256, count] with every value in every column, and different neighbors in every row."""
    return (np.arange(256)[:, None] + np.arange(count) * 37).astype(np.uint8)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_comes_back(name):
    unpack, pack, count = LAYOUTS[name]
    raw = every_byte(count)
    np.testing.assert_array_equal(pack(unpack(raw)), raw)


@pytest.mark.parametrize("name", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1))
def test_codes_come_back(name, seed):
    """Codes survive packing and unpacking; values are compared as bits, because some scales are NaN."""
    unpack, pack, count = LAYOUTS[name]
    codes = unpack(np.random.RandomState(seed).randint(0, 256, (32, count)).astype(np.uint8))
    again = unpack(pack(codes))
    parts = zip(codes, again, strict=True) if isinstance(codes, tuple) else [(codes, again)]
    for before, after in parts:
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert before.tobytes() == after.tobytes()
