"""Tests of `Card`, and of kernels for cards without TMA, which load weights and keys to registers.

The interpreter runs these kernels. `KERNEL_CARD=rtx-3060 pytest tests/kernels` tests all kernels as built for such a
card.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.benchmarks.common.kernel_cases import card_sampled, gated_cases, refusal
from llamaspec.pallas_kernels.attention_prefill import attention_prefill
from llamaspec.pallas_kernels.coded_gemm import coded_gemm
from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.parts.card import CARDS, H200, Card, card_of
from llamaspec.pallas_kernels.parts.compat import Target, current_target, interpreter, use_target
from llamaspec.pallas_kernels.parts.matrix import ScaledCodes, ScaledE4M3, product_of
from llamaspec.pallas_kernels.parts.tile import tile_for
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.verify.bounds.running_error import exactly, normalized, projected
from tests.kernels import test_attention_decode as decode
from tests.kernels import test_attention_paged as paged
from tests.kernels import test_gemv_quantized as codes
from tests.support.strategies import Noise, assert_within

RTX = Target(card=CARDS["rtx-3060"])


@pytest.fixture
def rtx() -> Iterator[None]:
    with use_target(RTX):
        yield


@pytest.mark.usefixtures("rtx")
@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "steps", "normed"), [(1, 1, False), (1, 2, True), (2, 9, True), (8, 6, False)])
def test_floats_in_registers(dtype, batch, steps, normed):
    """Products of floats are within their bounds for one to nine steps of columns.

    At most two steps are loaded ahead. So with few steps the main loop does not run, and with more steps some remain
    after it.
    """
    rng = np.random.default_rng(0)
    cols = steps * (128 if dtype == "float32" or batch > 4 else 256) * (2 if dtype == "bfloat16" and batch > 4 else 1)
    w, x, norm = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((24, cols), (batch, cols), (cols,)))
    with interpreter():
        y = np.asarray(gemv(w, x, norm=norm if normed else None, out=jnp.float32))
    n = normalized(exactly(x), exactly(norm).value, eps=1e-5) if normed else exactly(x)
    exact = projected(n, exactly(w).value, None)
    assert_within(y, exact.value, exact.error)


@pytest.mark.usefixtures("rtx")
def test_e4m3_in_registers():
    rng = np.random.default_rng(1)
    bits = rng.integers(-128, 128, (16, 1024)).astype(np.int8)
    bits[(bits & 0x7F) == 0x7F] = 0  # not NaN
    scales = rng.uniform(0.5, 2, 16).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((2, 1024)), jnp.float32)
    with interpreter():
        y = np.asarray(gemv(ScaledE4M3(jnp.asarray(bits), jnp.asarray(scales)), x))
    w = bits.view(jnp.float8_e4m3fn).astype(np.float64)
    exact = projected(exactly(x), w, None).map(lambda part: part * scales)
    assert_within(y, exact.value, exact.error + 2.0**-22 * np.abs(exact.value))


# Columns that 1024 or 512 divide, and others: the last step overlaps the one before by 128 to 384 columns.
@pytest.mark.usefixtures("rtx")
@pytest.mark.sampled(3)  # 1 s each
@pytest.mark.parametrize(
    ("form", "cols"),
    [
        ((8, 64, None), 1280),
        ((8, 64, None), 5 * 1024 + 256),
        ((4, 64, None), 1024),
        ((4, 64, None), 2048 + 256),
        ((4, 32, "minima"), 1280),
        ((4, 32, "minima"), 1536),
        ((8, None, None), 1024 + 128),
        ((6, 16, None), 1280),
        ((5, 32, "minima"), 2048 + 256),
        ((4, 64, "nf4"), 1280),
    ],
    ids=str,
)
def test_codes_in_registers(form, cols):
    bits, group, kind = form
    noise = Noise(seed=cols)
    w, x = codes.draw(noise, 32, cols, bits=bits, group=group, form=kind), noise(2, cols, dtype=np.dtype("float32"))
    norm = noise(cols, dtype=np.dtype("float32"))
    options: dict[str, Any] = {"norm": norm, "eps": 1e-5, "out": jnp.float32}
    exact = codes.exactly(w, x, norm=norm, eps=1e-5)
    assert_within(codes.multiply(w, x, **options), exact.value, exact.error)


@pytest.mark.usefixtures("rtx")
def test_a_step_that_overlaps_the_one_before_counts_no_column_twice():
    """If the last step overlaps the step before it, the product counts each column only once.

    Only one number of x is not 0. It is in the columns of one of these two steps, or of both.
    """
    cols = 1024 + 256
    w = ScaledCodes(jnp.ones((8, cols), jnp.int8), jnp.ones((8, cols // 64)))
    for column in (0, 767, 768, 1023, 1024, cols - 1):
        x = np.zeros((1, cols), np.float32)
        x[0, column] = 3.0
        with interpreter():
            np.testing.assert_array_equal(np.asarray(gemv(w, jnp.asarray(x))), np.full((1, 8), 3.0))


@pytest.mark.usefixtures("rtx")
@pytest.mark.sampled(3)  # 1 s each
@pytest.mark.parametrize(
    "shape",
    [
        decode.Shape(1, 4, 128, 136, splits=4),  # 64 does not divide the capacity
        decode.Shape(2, 3, 64, 192, window=65),
        decode.Shape(1, 16, 64, 128, splits=4),  # two thread blocks for a key head
        decode.Shape(2, 24, 64, 64),
        decode.Shape(1, 8, 64, 136, window=65, dtype=np.float32),
        decode.Shape(2, 2, 128, 200, splits=4, dtype=np.float32),
    ],
    ids=str,
)
def test_attention_in_registers(shape):
    for lengths in ([shape.capacity - 7, 0], [1, 65]):
        decode.attend(Noise(seed=0), shape, lengths)


@pytest.mark.usefixtures("rtx")
@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
def test_paged_attention_in_registers(page):
    shape = paged.Shape(page=page, max_pages=-(-200 // page), kv_heads=2, group=3, splits=4)
    paged.attend(Noise(seed=0), shape, [130, 1])


@pytest.mark.usefixtures("rtx")
def test_what_needs_another_card_is_refused_with_a_reason():
    bfloat16 = jnp.bfloat16
    q, k = jnp.zeros((1, 16, 2, 64), bfloat16), jnp.zeros((1, 1, 64, 64), bfloat16)
    words = r"needs a GPU with wgmma \(compute capability 9\.0\), got compute capability 8\.6"
    with pytest.raises(Unsupported, match=f"attention_prefill {words}"):
        attention_prefill(q, k, k, jnp.zeros(1, jnp.int32))
    w = ScaledCodes(jnp.zeros((64, 1024), jnp.int8), jnp.zeros((64, 16)))
    with pytest.raises(Unsupported, match=f"coded_gemm {words}"):
        coded_gemm(w, jnp.zeros((4, 1024), bfloat16))


@pytest.mark.parametrize(("name", "size"), [("a100", 164), ("rtx-4090", 100), ("h200", 228), ("rtx-5090", 100)])
def test_products_of_every_card_fit_in_its_shared_memory(name, size):
    card = CARDS[name]
    assert (card.shared, card.block_shared) == (size * 1024, (size - 1) * 1024)
    cases = card_sampled()
    with use_target(Target(card=card)):
        for case in cases.values():
            if case.op.startswith(("gemv", "norm_gate_up")):
                normed = "residual" not in case.op
                op, runs = case.op.split()[0], 2 if case.op.startswith("norm_gate_up") else 1
                product = product_of(op, *case.arrays[:2], normed=normed, runs=runs)
                assert product.ring == card.copy_engine
                assert product.scratch_bytes(normed=normed) < card.block_shared


def test_measured_tiles_are_for_the_card_on_which_they_were_measured():
    shape = ("gemv", 5120, 13824, np.dtype(jnp.bfloat16))
    assert [tile_for(*shape, card=CARDS[name]).rows for name in ("h200", "b200", "rtx-5090")] == [40, 16, 16]


def test_a_program_is_built_for_the_card_of_the_target():
    x = jnp.ones((8, 256), jnp.bfloat16)
    with use_target(Target(card=CARDS["rtx-3060"])):
        assert not current_target().overlaps
        kernels = str(jax.make_jaxpr(lambda w, x: gemv(w, x))(x, x[:1]))
    assert kernels.count("copy_gmem_to_smem") == 0
    with use_target(Target(card=H200)):
        assert current_target().overlaps
        kernels = str(jax.make_jaxpr(lambda w, x: gemv(w, x))(x, x[:1]))
    assert kernels.count("copy_gmem_to_smem") > 0


@pytest.mark.parametrize(
    ("device", "card"),
    [
        (SimpleNamespace(compute_capability="8.6", core_count=30), Card((8, 6), 30)),
        (SimpleNamespace(compute_capability="12.0", core_count=170), CARDS["rtx-5090"]),
        (SimpleNamespace(compute_capability="gfx942"), H200),  # no NVIDIA GPU
        (SimpleNamespace(), H200),  # a CPU
    ],
)
def test_the_card_of_a_device(device, card):
    assert card_of(device) == card


def test_the_sample_for_cards_names_cases_that_kernels_take():
    assert all(name in gated_cases() and refusal(name) is None for name in card_sampled())


def test_the_interpreter_keeps_the_card():
    with use_target(RTX), interpreter():
        assert current_target() == replace(RTX, interpret=True)
