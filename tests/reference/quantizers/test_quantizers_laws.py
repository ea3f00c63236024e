"""Laws of quantizers: one table says which laws each family obeys, and which laws it breaks.

Each law is about the dequantized weights Q(w) = dequantize(quantize(w)):

    powers    Q(2^k w) = 2^k Q(w), as long as no scale or minimum leaves the normal numbers of its format
    odd       Q(-w) = -Q(w)
    fixed     Q(Q(w)) = Q(w)

If the table says that a law does not hold, a test finds weights that break it.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import llamaspec.reference.quantizers
from llamaspec.reference.quantizers import (
    affine,
    awq,
    binary,
    bitnet,
    double_quantization,
    ggml,
    ggml_activations,
    gptq,
    hqq,
    kmeans,
    kv_cache,
    llama2c,
    llm_int8,
    minifloat,
    mlx,
    mx,
    nf4,
    nvfp4,
    pruning,
    smoothquant,
    symmetric,
    torchao_int4,
)
from llamaspec.reference.quantizers.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2
from llamaspec.reference.quantizers.schemes import SCHEMES
from tests.goldens.quantizers.weights import KINDS, Weights
from tests.support.strategies import roundoff

ROWS, COLS = 2, 64
FLOAT32, FLOAT16 = (-60, 60), (-4, 4)  # powers that keep the scales of `weights` normal


class Family(NamedTuple):
    """A function Q that quantizes and dequantizes, and the names of the laws that hold for it."""

    read: Callable[[np.ndarray], np.ndarray]
    powers: tuple[int, int] | None = FLOAT32
    odd: bool = True
    fixed: bool = True
    cols: int = COLS


def inputs(cols: int) -> np.ndarray:
    """Return correlated inputs [2 cols, cols] of a layer, the same in every call."""
    random = np.random.RandomState(6)
    return random.standard_normal((2 * cols, cols)) @ random.standard_normal((cols, cols))


def read_hqq(w: np.ndarray) -> np.ndarray:
    return hqq.dequantize(hqq.quantize(w, bits=3, group=32))


def read_double(w: np.ndarray) -> np.ndarray:
    return double_quantization.dequantize(double_quantization.quantize(np.asarray(w, np.float32)))


def integers(scheme: Any, **laws: Any) -> Iterator[tuple[str, Family]]:
    for bits in (2, 4, 8):

        def read(w: np.ndarray, bits: int = bits) -> np.ndarray:
            return scheme.dequantize(scheme.quantize(w, bits=bits, block=(1, 32)))

        yield f"{scheme.__name__.rpartition('.')[2]} {bits}", Family(read, **laws)


def codebooks(levels: kmeans.Levels, **laws: Any) -> Family:
    return Family(lambda w: kmeans.dequantize(kmeans.quantize(w, bits=3, levels=levels)), odd=False, **laws)


def gptqs(even: bool) -> Family:
    def read(w: np.ndarray) -> np.ndarray:
        return affine.dequantize(gptq.quantize(w, inputs(COLS), bits=4, group=32, even=even))

    return Family(read, odd=even, fixed=False)


def minifloats() -> Iterator[tuple[str, Family]]:
    for name, to in {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}.items():

        def read(w: np.ndarray, to: minifloat.Minifloat = to) -> np.ndarray:
            return minifloat.dequantize(minifloat.quantize(w, to=to, block=(1, 32)), to=to)

        yield name, Family(read)
        for kind, exponent in {"floor": mx.floor_exponent, "ceil": mx.ceil_exponent}.items():

            def read_mx(w: np.ndarray, to: minifloat.Minifloat = to, exponent: mx.Exponent = exponent) -> np.ndarray:
                return mx.dequantize(mx.quantize(w, to=to, exponent=exponent), to=to)

            yield f"mx {name} {kind}", Family(read_mx)


def ggml_types() -> Iterator[tuple[str, Family]]:
    laws: dict[str, dict[str, Any]] = {
        **{name: {"odd": False} for name in ("Q4_1", "Q5_1")},
        **{name: {"odd": False, "fixed": False} for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K")},
        **{name: {"fixed": False} for name in ("Q6_K", "IQ4_NL")},
    }
    for name, kind in ggml.TYPES.items():
        unit = 64 if name.endswith("_K") else 1  # the superblock's step is a 128th of a group's

        def read(w: np.ndarray, kind: ggml.Type = kind, unit: int = unit) -> np.ndarray:
            return kind.dequantize(kind.quantize(w * w.dtype.type(unit))) / unit

        yield name, Family(read, powers=FLOAT16, cols=256)._replace(**laws.get(name, {}))


FAMILIES: dict[str, Family] = {
    **dict(integers(symmetric)),
    **dict(integers(affine, odd=False, fixed=False)),
    **{name: Family(lambda w, s=s: s.dequantize(s.quantize(w)), odd=name != "nf4") for name, s in SCHEMES.items()},
    "llama2.c": Family(lambda w: llama2c.dequantize(llama2c.quantize(w, group=32))),
    "LLM.int8": Family(lambda w: llm_int8.dequantize(llm_int8.quantize(w))),
    "cache": Family(lambda w: kv_cache.dequantize(kv_cache.quantize(w))),
    "NF4": Family(lambda w: nf4.NF4.dequantize(nf4.NF4.quantize(w, group=32)), odd=False),
    "FP4": Family(lambda w: nf4.FP4.dequantize(nf4.FP4.quantize(w, group=32))),
    "scales of scales": Family(read_double, odd=False, fixed=False),
    **dict(minifloats()),
    "NVFP4": Family(lambda w: nvfp4.dequantize(nvfp4.quantize(w)), fixed=False),
    "k-means": codebooks(kmeans.optimal),
    "Lloyd": codebooks(kmeans.lloyd, fixed=False),
    "signs": Family(lambda w: binary.dequantize(binary.quantize(w)), odd=False),
    "BitNet": Family(lambda w: bitnet.dequantize(bitnet.quantize(w)), powers=(-6, 60), fixed=False),
    "BitNet tokens": Family(lambda w: bitnet.dequantize(bitnet.quantize_tokens(w)), powers=(-6, 60)),
    "SmoothQuant tokens": Family(smoothquant.activations),
    "AWQ": Family(lambda w: affine.dequantize(awq.quantize(w, group=32)), odd=False, fixed=False),
    "GPTQ": gptqs(even=False),
    "GPTQ, even": gptqs(even=True),
    "HQQ": Family(read_hqq, powers=None, odd=False, fixed=False),
    "torchao's int4": Family(
        lambda w: torchao_int4.dequantize(torchao_int4.quantize(w, group=32)), powers=None, odd=False, fixed=False
    ),
    "MLX": Family(
        lambda w: mlx.dequantize(mlx.quantize(w, bits=4, group=32)), powers=(-10, 60), odd=False, fixed=False
    ),
    "fine-grained": Family(lambda w: w * pruning.fine_grained(w, keep=50)),
    "channels": Family(lambda w: w * pruning.channels(w, keep=1)),
    "2 of 4": Family(lambda w: w * pruning.n_of_m(w, n=2, m=4)),
    **dict(ggml_types()),
    "q8_0 of a vector": Family(ggml_activations.q8_0, powers=FLOAT16, cols=256),
    "q8_k of a vector": Family(ggml_activations.q8_k, fixed=False, cols=256),
    "float16 of a vector": Family(ggml_activations.float16, powers=None, cols=256),
    "bfloat16 of a vector": Family(ggml_activations.bfloat16, cols=256),
}

few = settings(max_examples=settings().max_examples // 4)  # for each family
seeds = st.integers(0, 2**32 - 1)
NORMAL = [kind for kind in KINDS if kind not in ("denormal", "zero")]
kinds = st.sampled_from(NORMAL)


def draw(kind: str, seed: int, cols: int) -> np.ndarray:
    """Draw weights up to about 8 in magnitude, with a large weight in each block."""
    w = Weights(kind, seed)(ROWS, cols) * np.float32(2.0**-4)
    w[:, ::16] += np.copysign(np.float32(2.0**-2), w[:, ::16])
    return w


def tied(seed: int, cols: int) -> np.ndarray:
    """Draw weights at ties, in one of two ways.

    Either the weights have nine equally spaced values, one more than 3-bit codes have; or, in each block, zero lies
    halfway between two codes of 2, 4 or 8 bits.
    """
    last = (3, 15, 255)[seed % 3]
    w = np.tile(np.arange(cols) % 9 / 8, (ROWS, 1)).astype(np.float32)
    if seed % 4 == 0:
        return w
    w[:, ::16] = -(seed // 3 % 2 + 0.5)
    w[:, 1::16] = last + w[:, ::16]
    return w


def wide(seed: int, cols: int) -> np.ndarray:
    """Draw blocks of 16 weights: up to 1 in the first block, and from about 2^-20 to 2^-10 in the others.

    Such blocks need both very large and very small 8-bit scales.
    """
    random = np.random.RandomState(seed)
    w = random.uniform(0.5, 1, (ROWS, cols)) * np.copysign(1, random.standard_normal((ROWS, cols)))
    exponents = np.repeat(random.uniform(-20, -10, (ROWS, cols // 16)), 16, axis=1)
    exponents[:, :16] = 0
    return (w * np.exp2(exponents)).astype(np.float32)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.powers])
@few
@given(kind=kinds, seed=seeds, part=st.floats(0, 1))
@example(kind="lonely", seed=68, part=0.0)  # a minimum of Q4_1 that would not be normal
def test_powers_of_two_pass_through(name, kind, seed, part):
    family = FAMILIES[name]
    lowest, highest = family.powers or (0, 0)
    power = lowest + round(part * (highest - lowest))
    w = draw(kind, seed, family.cols)
    # Minima, or the scale that they share, may be small by chance.
    if name in ("Q2_K", "Q4_K", "Q5_K"):
        e = ggml.TYPES[name].quantize(w).e
        assume(not np.any((e > 0) & (e < 2.0**-9)))
    if name in ("Q4_1", "Q5_1"):
        m = np.abs(ggml.TYPES[name].quantize(w).minima)
        assume(not np.any((m > 0) & (m < np.finfo(np.float16).smallest_normal / 2.0 ** FLOAT16[0])))
    factor = np.float32(2.0**power)
    np.testing.assert_array_equal(family.read(w * factor), family.read(w) * 2.0**power)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.odd])
@few
@given(kind=st.sampled_from(KINDS), seed=seeds)
def test_quantizers_are_odd_where_stated(name, kind, seed):
    family = FAMILIES[name]
    w = Weights(kind, seed)(ROWS, family.cols)
    np.testing.assert_array_equal(family.read(-w), -family.read(w))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.fixed])
@few
@given(kind=kinds, seed=seeds)
def test_quantizing_twice_changes_nothing(name, kind, seed):
    family = FAMILIES[name]
    q = family.read(draw(kind, seed, family.cols))
    np.testing.assert_array_equal(family.read(q), q)


def test_the_table_denies_no_law_that_holds():
    """For each law that the table denies, a few draws find weights that break it."""
    for name, family in FAMILIES.items():
        missing = {"powers": family.powers is None, "odd": not family.odd, "fixed": not family.fixed}
        missing = {law for law, denied in missing.items() if denied}
        for seed in range(40):
            if not missing:
                break
            plain = Weights(NORMAL[(seed + 3) % len(NORMAL)], seed)(ROWS, family.cols)
            denormal = Weights("denormal", seed)(ROWS, family.cols) * np.float32(2.0**-4)
            for w in (plain, wide(seed, family.cols), tied(seed, family.cols)):
                missing -= broken(family.read, w)
            missing -= broken(family.read, denormal) - {"powers"}  # the scales are not normal numbers
        assert not missing, (name, missing)


def broken(read: Callable[[np.ndarray], np.ndarray], w: np.ndarray) -> set[str]:
    q = read(w)
    holds = {
        "powers": np.array_equal(read(w * np.float32(4)), 4 * q),
        "odd": np.array_equal(read(-w), -q),
        "fixed": np.array_equal(read(q), q),
    }
    return {law for law, holds_here in holds.items() if not holds_here}


@given(kind=kinds, seed=seeds)
def test_nvfp4_is_a_fixed_point_where_its_scales_are_normal(kind, seed):
    w = draw(kind, seed, COLS)
    q = nvfp4.quantize(w)
    assert np.all(E4M3.decode(q.scales) >= 2.0**-6)
    again = nvfp4.quantize(nvfp4.dequantize(q))
    for before, after in zip(q, again, strict=True):
        np.testing.assert_array_equal(after, before)


@given(kind=kinds, seed=seeds, bits=st.integers(2, 8))
def test_laws_of_affine_grids_but_for_ties(kind, seed, bits):
    """The laws hold for affine grids, unless the zero point is so near a tie that the scale's rounding decides it."""
    w = draw(kind, seed, COLS)

    def read(w: np.ndarray) -> np.ndarray:
        return affine.dequantize(affine.quantize(w, bits=bits, block=(1, COLS)))

    last = 2**bits - 1
    ends = np.minimum(np.min(w, axis=-1), 0), np.maximum(np.max(w, axis=-1), 0)
    lo, hi = (a.astype(np.float64) for a in ends)
    from_tie = np.abs((-lo / (hi - lo) * last) % 1 - 0.5)
    assume(np.all(from_tie > 4 * last * roundoff(np.float32)))
    np.testing.assert_array_equal(read(read(w)), read(w))
    np.testing.assert_array_equal(read(-w), -read(w))


MODULES = [module.name for module in pkgutil.iter_modules(llamaspec.reference.quantizers.__path__)]
# These modules have no scheme, or take a grid as an argument, or only read what other programs quantized.
WITHOUT = (
    "blocks",
    "fixed_point",
    "ggml",
    "ggml_grids",
    "ggml_lattices",
    "ggml_search",
    "ops",
    "packing",
    "qat",
    "schemes",
)
PHRASES = {
    "powers of two": r"[Pp]owers? of two|[Ss]cales? with w",
    "the sign": r"Q\(-[aWwx]\)|-W becomes\s+-W",
    "fixed points": r"[Ff]ixed point",
}


@pytest.mark.parametrize("law", PHRASES)
@pytest.mark.parametrize("name", sorted(set(MODULES) - set(WITHOUT)))
def test_every_docstring_says_which_laws_hold(name, law):
    text = importlib.import_module(f"llamaspec.reference.quantizers.{name}").__doc__
    assert text and re.search(PHRASES[law], text.replace("\n", " "))
