"""Contracts as pytest tests, and adapters for kernels with other signatures."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.reference.softmax import softmax
from llamaspec.verify.adapt import adapt
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import contract_for, in_file
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.pytest import contract
from tests.support.processes import REPOSITORY


@contract("softmax", examples=30, shapes=4)
def test_softmax_of_jax(x):
    """jax's softmax meets the contract if we set rows of only -inf to 0. jax returns NaN for them."""
    seen = jnp.any(jnp.isfinite(x), axis=-1, keepdims=True)
    return jnp.where(seen, jax.nn.softmax(x, axis=-1), 0)


@contract("rmsnorm", arrays="numpy", dtype="bfloat16", examples=30, dim=[64])
def test_narrowed(x, weight, *, eps):
    assert x.shape[1] == 64
    x = x.astype(np.float32)
    return (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight).astype(weight.dtype)


BLOCKS = []


@pytest.fixture
def scale():
    return np.float32(2)


@pytest.mark.parametrize("block", [4, 16])
@contract("add", arrays="numpy", examples=5)
def test_a_parameter_of_pytest(x, y, block):
    BLOCKS.append(block)
    return x + y


@contract("rmsnorm", arrays="numpy", examples=5)
@pytest.mark.parametrize("block", [4, 16])
def test_parameters_and_fixtures(x, weight, scale, block, unused=None, *, eps):
    assert block in (4, 16) and unused is None
    return norm(x, weight, eps) * scale / scale


class TestMethods:
    factor = np.float32(1)

    @contract("add", arrays="numpy", examples=5)
    def test_a_method(self, x, y):
        return (x + y) * self.factor

    @pytest.mark.parametrize("block", [4, 16])
    @contract("add", arrays="numpy", examples=5)
    def test_a_method_with_a_parameter(self, x, y, *, block, scale):
        return (x + y) * self.factor * scale / scale


LAYERNORM = str(REPOSITORY / "docs" / "contracts" / "layernorm.py")


@contract("layernorm", file=LAYERNORM, arrays="numpy", dtype=["float32", "bfloat16", "float16"], examples=10)
def test_a_contract_of_ones_own_in_several_dtypes(x, weight, bias, *, eps):
    wide = x.astype(np.float32)
    centered = wide - np.mean(wide, axis=-1, keepdims=True)
    scale = np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + np.float32(eps))
    return (centered / scale * weight.astype(np.float32) + bias.astype(np.float32)).astype(x.dtype)


def test_every_dtype_that_is_violated_is_shown():
    contracts_of_file, _ = in_file(LAYERNORM)
    test = contract(contracts_of_file["layernorm"], arrays="numpy", dtype=["float32", "float16"], examples=20, seed=0)(
        lambda x, weight, bias, *, eps: x * weight + bias
    )
    with pytest.raises(AssertionError, match=r"violated      layernorm float32[\s\S]*violated      layernorm float16"):
        test()
    with pytest.raises(ValueError, match="expected at least one dtype"):
        contract("softmax", dtype=[])
    with pytest.raises(ValueError, match=r"float32, bfloat16, float16.*float8"):
        contract("softmax", dtype=["float32", "float8"])
    with pytest.raises(ValueError, match=r"softmax.*layernorm"):
        contract("softmax", file=LAYERNORM)


def test_all_parameters_were_used():
    assert set(BLOCKS) == {4, 16}


def test_a_misspelt_draw_is_refused_where_it_is_written():
    for only, message in [({"hidden": ["nnoe"]}, "got nnoe: did you mean none?"), ({"n": [0]}, "got 0")]:
        with pytest.raises(ValueError, match=re.escape(message)):
            contract("softmax", **only)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0.0}, "expected a number of seconds above 0"),  # one example would prove little
        ({"seconds": float("nan")}, "expected a number of seconds above 0"),
        ({"examples": 0}, "expected examples of at least 1, got 0"),
        ({"shapes": 0}, "expected shapes of at least 1, got 0"),
        ({"loose": ""}, "expected u=bfloat16"),
    ],
)
def test_an_option_that_means_nothing_is_refused_where_it_is_written(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        contract("softmax", **options)


def test_a_candidate_cannot_change_what_it_is_judged_by(monkeypatch):
    def patches(x):
        monkeypatch.setattr("llamaspec.reference.softmax.softmax", lambda x: np.zeros(x.shape))
        monkeypatch.setattr(
            "llamaspec.verify.contracts.softmax.softmaxed", lambda *a, **n: (np.zeros(x.shape), np.ones(x.shape))
        )
        return np.zeros_like(x)

    with pytest.raises(
        AssertionError,
        match=r"definition: llamaspec.reference.softmax.softmax, llamaspec.verify.contracts.softmax.soft",
    ):
        contract("softmax", arrays="numpy", seed=0, examples=20)(patches)()
    assert softmax(np.zeros((1, 2))).tolist() == [[0.5, 0.5]]


def test_a_definition_that_was_changed_before_the_test_is_seen(monkeypatch):
    test = contract("add", arrays="numpy", seed=0, examples=20)(lambda x, y: x + y)
    monkeypatch.setattr("llamaspec.verify.contracts.add.add", lambda x, y: x - y)
    with pytest.raises(AssertionError, match=r"definition: llamaspec\.verify\.contracts\.add\.add"):
        test()
    test()


def test_a_convention_is_named_with_what_leaves_it_out():
    def nan_for_a_row_of_minus_infinity(x):
        with np.errstate(invalid="ignore"):
            e = np.exp(x - x.max(axis=-1, keepdims=True))
            return e / e.sum(axis=-1, keepdims=True)

    with pytest.raises(AssertionError, match=r"-inf.*--set hidden=none"):
        contract("softmax", arrays="numpy", seed=0, examples=50)(nan_for_a_row_of_minus_infinity)()


def test_a_violation_fails_with_its_counterexample():
    @contract("add", arrays="numpy", seed=1)
    def subtracts(x, y):
        return x - y

    assert subtracts.__name__ == "subtracts"
    with pytest.raises(AssertionError) as failure:
        subtracts()
    lines = str(failure.value).splitlines()
    assert lines[1].startswith("violated      add float32") and "seed 1" in lines[1]
    assert any(line.startswith("  value: at [0, 0]") for line in lines)


def test_suspicious_results_fail_with_strict():
    """With `strict`, a suspicious result fails the test.

    The error is 200 u |W| |x|. It is within the proven bound, gamma_513 |W| |x|, but above the limit for suspicion.
    """

    def sums_badly(x, weight):
        off = 200 * 2.0**-24 * np.abs(weight) @ np.abs(x) * (np.count_nonzero(x) > 1)
        return (weight.astype(np.float64) @ x + off).astype(np.float32)

    contract("gemv", arrays="numpy", seed=0, examples=20, rows=[1], cols=[513])(sums_badly)()
    with pytest.raises(AssertionError, match="suspicious"):
        contract("gemv", arrays="numpy", seed=0, examples=20, strict=True, rows=[1], cols=[513])(sums_badly)()


def test_an_op_without_a_contract():
    with pytest.raises(ValueError, match=r"\bconv\b"):
        contract("conv")


def outcome(op, candidate, **options):
    options = {"precision": precision("float32"), "examples": 60, "seed": 0, **options}
    return verify(contract_for(op), Direct(candidate), **options).worst.finding


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def test_arguments_in_another_order_and_by_other_names():
    @adapt("rmsnorm", "weight", "x", "epsilon=eps")
    def kernel(weight, x, *, epsilon):
        return norm(x, weight, epsilon)

    assert outcome("rmsnorm", kernel) is None


def test_a_kernel_that_writes_to_an_output():
    @adapt("rmsnorm", "out: x", "x", "weight", "eps")
    def kernel(out, x, weight, eps):
        out[...] = norm(x, weight, eps)

    @adapt("rmsnorm", "out: x", "x", "weight", "eps")
    def forgets(out, x, weight, eps):
        out[:, :-1] = norm(x, weight, eps)[:, :-1]

    assert outcome("rmsnorm", kernel) is None
    finding = outcome("rmsnorm", forgets)
    assert finding and finding.kind == "not finite"


def test_a_kernel_that_overwrites_its_input():
    @adapt("rmsnorm", "over: x", "weight", "eps")
    def kernel(x, weight, eps):
        x[...] = norm(x, weight, eps)

    assert outcome("rmsnorm", kernel) is None


def test_another_layout():
    @adapt(
        "rope_halves",
        "x: batch seq heads dim -> batch heads seq dim",
        "positions",
        "frequencies",
        returns="batch heads seq dim -> batch seq heads dim",
    )
    def kernel(x, positions, frequencies):
        assert x.flags.c_contiguous
        angles = positions[:, None, :, None].astype(np.float32) * frequencies
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    assert outcome("rope_halves", kernel) is None


def test_an_argument_that_the_reference_has_not():
    with pytest.raises(ValueError, match=r"rmsnorm.*gamma.*x, weight, eps"):
        adapt("rmsnorm", "x", "gamma")
