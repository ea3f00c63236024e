import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import affine, gptq
from llamaspec.reference.quantizers.affine import Affine
from llamaspec.reference.quantizers.blocks import spread
from tests.goldens.quantizers.make_methods import inputs
from tests.goldens.quantizers.weights import Weights
from tests.support.goldens import read_golden
from tests.support.strategies import U, assert_within

GOLDENS = read_golden("quantizers/methods")

weights = st.builds(
    Weights,
    kind=st.sampled_from(["normal", "uniform", "student", "outliers"]),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-10, 10),
)
COLS = 16


def correlated(seed: int, tokens: int) -> np.ndarray:
    random = np.random.RandomState(seed)
    return random.standard_normal((tokens, COLS)) @ random.standard_normal((COLS, COLS))


def damped(x: np.ndarray, damp: float) -> np.ndarray:
    h = x.T @ x
    return h + damp * np.mean(np.diag(h)) * np.eye(len(h))


@pytest.mark.parametrize("case", GOLDENS["gptq"]["cases"], ids=lambda case: f"{case['bits']}-{case['group']}")
def test_the_output_is_that_of_llm_compressor(case):
    """Codes equal llm-compressor's, since no weight is near a tie.

    Output errors agree up to rounding of the weights.
    """
    golden = GOLDENS["gptq"]
    w, x = Weights("normal", seed=20)(golden["rows"], golden["cols"]), inputs(golden["tokens"], golden["cols"])
    q = gptq.quantize(w, x, bits=case["bits"], group=case["group"])
    steps = spread(q.scales.astype(np.float64), w.shape)
    golden_codes = np.rint(np.array(case["weights"]) / steps) + spread(q.zeros.astype(np.float64), w.shape)
    np.testing.assert_array_equal(golden_codes, q.codes)
    own_loss, golden_loss = (
        np.sum((linear(x, a) - linear(x, w)) ** 2) for a in (affine.dequantize(q), np.array(case["weights"]))
    )
    assert own_loss == pytest.approx(golden_loss, rel=1e-6)
    plain = affine.dequantize(affine.quantize(w, bits=case["bits"], block=(1, case["group"])))
    assert own_loss < np.sum((linear(x, plain) - linear(x, w)) ** 2)


@given(weights=weights, seed=st.integers(0, 2**32 - 1), bits=st.integers(2, 8), damp=st.sampled_from([0.01, 0.1]))
def test_the_errors_account_for_the_output(weights, seed, bits, damp):
    """GPTQ's errors E, one per weight, explain the output error: W - W^ = E U, and ||E||^2 is the damped output error.

    Quantizing column i changes a weight by |e_i| U_ii. This is at most half a step unless a code is clipped.
    """
    w, x = weights(3, COLS), correlated(seed, 64)
    q = gptq.quantize(w, x, bits=bits, group=8, damp=damp)
    u = gptq.factor(x.T @ x, damp=damp)
    h = damped(x, damp)
    condition = np.linalg.cond(h)
    # Cholesky and the inverse are backward stable: their error is n u times the condition number, relative to H.
    np.testing.assert_array_equal(np.tril(u, -1), 0)
    assert_within(u.T @ u @ h, np.eye(COLS), 64 * COLS * U * condition)

    moved = w - affine.dequantize(q)
    errors = np.linalg.solve(u.T, moved.T).T
    output = np.sum((x @ moved.T) ** 2) + damp * np.mean(np.diag(x.T @ x)) * np.sum(moved**2)
    assert_within(np.sum(errors**2), output, 64 * COLS * U * condition * output)

    steps = spread(q.scales.astype(np.float64), w.shape)
    inside = (q.codes > 0) & (q.codes < 2**bits - 1)
    slack = 64 * COLS * U * condition * (np.max(np.abs(w)) + np.max(steps) * 2**bits)
    assert np.all((np.abs(errors) * np.diag(u))[inside] <= steps[inside] / 2 + slack)
    most = np.sum(((steps / 2 + slack) / np.diag(u)) ** 2, axis=-1)
    unclipped = np.all(inside, axis=-1)
    assert np.all(np.sum(errors**2, axis=-1)[unclipped] <= most[unclipped] * (1 + 64 * COLS * U))


@given(weights=weights, bits=st.integers(2, 8), seed=st.integers(0, 2**32 - 1))
def test_without_correlation_it_rounds(weights, bits, seed):
    w = weights(3, COLS)
    x = np.diag(np.random.RandomState(seed).uniform(0.5, 2, COLS))
    q = gptq.quantize(w, x, bits=bits, group=8)
    for actual, plain in zip(q, affine.quantize(w, bits=bits, block=(1, 8)), strict=True):
        np.testing.assert_array_equal(actual, plain)


def test_it_nearly_always_gains():
    gains, sums = [], np.zeros(2)
    for seed in range(20):
        w, x = Weights("normal", seed)(4, COLS), correlated(seed, 64)
        q, plain = gptq.quantize(w, x, bits=3, group=COLS), affine.quantize(w, bits=3, block=(1, COLS))
        gptq_loss, plain_loss = (np.sum((linear(x, affine.dequantize(a)) - linear(x, w)) ** 2) for a in (q, plain))
        gains.append(gptq_loss < plain_loss)
        sums += [gptq_loss, plain_loss]
    assert np.mean(gains) >= 0.9 and sums[0] < sums[1]


def test_inactive_features_have_no_weight():
    w, x = Weights("normal", seed=31)(3, COLS), correlated(1, 64)
    x[:, [2, 9]] = 0
    read = affine.dequantize(gptq.quantize(w, x, bits=4, group=8))
    np.testing.assert_array_equal(read[:, [2, 9]], 0)
    assert np.all(np.any(np.delete(read, [2, 9], axis=1), axis=0))


@given(weights=weights, bits=st.sampled_from([2, 3, 4, 8]), version=st.sampled_from([1, 2]))
@example(weights=Weights("outliers", seed=0, exponent=10), bits=2, version=1)  # a scale beyond float16
def test_packing_keeps_everything_but_digits_of_the_scales(weights, bits, version):
    q = affine.quantize(weights(32, 64), bits=bits, block=(1, 32))
    if np.max(q.scales) >= 65520:  # rounds to 2^16 in float16
        with pytest.raises(ValueError, match="the largest float16 is 65504"):
            gptq.pack(q, bits=bits, version=version)
        return
    packed = gptq.pack(q, bits=bits, version=version)
    assert packed.qweight.shape == (64 * bits // 32, 32) and packed.qzeros.shape == (2, bits)
    again = gptq.unpack(packed, bits=bits, version=version)
    np.testing.assert_array_equal(again.codes, q.codes)
    np.testing.assert_array_equal(again.zeros, q.zeros)
    assert_within(again.scales, q.scales, np.maximum(2.0**-11 * q.scales, 2.0**-25))


@given(seed=st.integers(0, 2**32 - 1), bits=st.sampled_from([2, 3, 4, 8]), version=st.sampled_from([1, 2]))
def test_inputs_in_another_order_have_the_scales_of_their_groups(seed, bits, version):
    """Permuting the inputs and g_idx in the same way, as desc_act does, permutes the decoded weights."""
    random = np.random.RandomState(seed)
    order = random.permutation(64)
    q = affine.quantize(Weights("normal", seed)(32, 64), bits=bits, block=(1, 16))
    packed = gptq.pack(q, bits=bits, version=version)
    plain = affine.dequantize(gptq.unpack(packed, bits=bits, version=version))
    moved = gptq.pack(q._replace(codes=q.codes[:, order]), bits=bits, version=version)
    moved = moved._replace(g_idx=packed.g_idx[order])
    np.testing.assert_array_equal(affine.dequantize(gptq.unpack(moved, bits=bits, version=version)), plain[:, order])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_last_group_may_be_short(bits):
    """The last group may be short, as in AutoGPTQ: 96 inputs in groups of 64 leave a group of 32."""
    packed = gptq.pack(
        affine.quantize(Weights("normal", seed=3)(32, 96), bits=bits, block=(1, 48)), bits=bits, version=2
    )
    q = gptq.unpack(packed._replace(g_idx=np.arange(96, dtype=np.int32) // 64), bits=bits, version=2)
    group = np.arange(96) // 64
    scales, zeros = (
        packed.scales.T.astype(np.float64)[:, group],
        gptq.unpack(packed, bits=bits, version=2).zeros[:, group],
    )
    np.testing.assert_array_equal(affine.dequantize(q), scales * (q.codes - zeros.astype(np.float64)))


@pytest.mark.parametrize("case", GOLDENS["gptq_words"]["cases"], ids=lambda case: str(case["bits"]))
def test_packed_words_equal_auto_gptq(case):
    golden, bits = GOLDENS["gptq_words"], case["bits"]
    random = np.random.RandomState(bits)
    codes = random.randint(0, 2**bits, (golden["rows"], golden["cols"])).astype(np.uint8)
    zeros = random.randint(1, 2**bits, (golden["rows"], golden["cols"] // golden["group"])).astype(np.uint8)
    q = Affine(codes, np.array(case["scales"], np.float32).T, zeros)
    packed = gptq.pack(q, bits=bits, version=1)
    for name in ("qweight", "qzeros", "scales", "g_idx"):
        np.testing.assert_array_equal(getattr(packed, name), case[name])
    np.testing.assert_array_equal(gptq.unpack(packed, bits=bits, version=1).zeros, zeros)


def test_refusals():
    x = np.ones((2, 8))
    with pytest.raises(ValueError, match="inputs must be finite"):
        gptq.quantize(np.ones((2, 8)), x * np.nan, bits=4, group=8)
    with pytest.raises(ValueError, match="weights must be finite"):
        gptq.quantize(np.ones((2, 8)) * np.nan, x, bits=4, group=8)
    q = affine.quantize(np.ones((8, 4)), bits=4, block=(1, 4))
    with pytest.raises(ValueError, match=r"\b4 codes.*\b4 bits.*\b32\b"):
        gptq.pack(q, bits=4, version=1)
    packed = gptq.pack(affine.quantize(np.ones((8, 8)), bits=4, block=(1, 4)), bits=4, version=1)
    with pytest.raises(ValueError, match=r"g_idx.*\b0\b.*\b2\b.*\b2\b"):
        gptq.unpack(packed._replace(g_idx=packed.g_idx * 2), bits=4, version=1)
    with pytest.raises(ValueError, match=r"g_idx.*-1\b.*\b0\b.*\b2\b"):
        gptq.unpack(packed._replace(g_idx=-packed.g_idx), bits=4, version=1)
