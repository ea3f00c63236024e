"""The cases of the kernel benchmarks: XLA's results are within the kernels' error bounds, and wrong results are not."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.benchmarks.common.kernel_cases import OPS, kernel_cases
from llamaspec.benchmarks.common.kernel_cases.attention import window_cases
from llamaspec.benchmarks.common.kernel_cases.case import FLOAT32, Case
from llamaspec.benchmarks.common.kernel_cases.products import bias_cases
from llamaspec.benchmarks.suites.gpu.drawing import draw
from llamaspec.benchmarks.suites.gpu.kernels import again_and_again
from llamaspec.benchmarks.suites.gpu.right import SPOILED, share_of_bound, spoiled
from llamaspec.benchmarks.suites.gpu.scale import TINY, TINY_WORK, once, tiny_cases, tiny_quantized_cases
from llamaspec.verify.bounds.running_error import Approx

BFLOAT16 = np.dtype(jnp.bfloat16)
# In bfloat16, XLA's form also rounds intermediate results, such as a norm before the product; the bounds are for
# kernels, which do not.
PLAIN = {case.name: case for op in (*OPS, bias_cases, window_cases) for case in op(TINY, FLOAT32, TINY_WORK)}
CODES = {case.name: case for case in tiny_quantized_cases()}


def worst(case: Case, results, arguments) -> float:
    expected = case.exact(*jax.tree.map(np.asarray, arguments))
    expected = (expected,) if isinstance(expected, Approx) else expected
    pairs = zip(jax.tree.leaves(results), expected, strict=True)
    return max(share_of_bound(np.asarray(result), exact) for result, exact in pairs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [*PLAIN.values(), *CODES.values()], ids=lambda case: case.name)
def test_the_plain_form_is_within_the_bound(case: Case):
    arguments = jax.tree.map(lambda a: a.astype(np.float32) if a.dtype == BFLOAT16 else a, draw(case, seed=1))
    results = jax.jit(case.plain)(*arguments)
    assert worst(case, results, arguments) <= 1


@pytest.mark.parametrize("name", [name for name, case in PLAIN.items() if case.op in ("gemv residual", "norm_qkv")])
def test_one_slightly_wrong_number_is_detected(name: str):
    case = PLAIN[name]
    arguments = draw(case, seed=1)
    first, *later = jax.tree.leaves(jax.jit(case.plain)(*arguments))
    first = np.array(first)
    first.flat[7] += 1e-3 * np.abs(first).max()
    assert worst(case, [first, *later], arguments) > 1


def test_nan_is_right_only_where_expected():
    exact = Approx(np.array([np.nan, 1.0]), np.array([0.0, 0.5]))
    assert share_of_bound(np.array([np.nan, 1.25]), exact) == 0.5
    assert share_of_bound(np.array([0.0, 1.0]), exact) == np.inf
    assert share_of_bound(np.array([np.nan, np.nan]), exact) == np.inf


@pytest.mark.sampled(12)  # 34 cases, 2 s
@pytest.mark.parametrize("case", once(tiny_cases()), ids=lambda case: case.name)
def test_a_kernel_and_xla_give_the_same_arrays(case: Case):
    kernel, plain = (jax.eval_shape(form, *case.arrays) for form in (case.function, case.plain))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), kernel) == jax.tree.map(lambda a: (a.shape, a.dtype), plain)


@pytest.mark.slow  # 9 s
def test_every_op_of_the_table_has_hard_inputs_or_needs_none():
    assert set(SPOILED) <= {case.op for case in kernel_cases().values()}
    for case in tiny_cases():
        drawn = jax.tree.map(np.array, draw(case, seed=1))
        hard = spoiled(case, jax.tree.map(np.copy, drawn))
        before, after = jax.tree.leaves(drawn), jax.tree.leaves(hard)
        assert [(a.shape, a.dtype) for a in after] == [(a.shape, a.dtype) for a in before]
        assert any((a != b).any() for a, b in zip(after, before, strict=True)) == (case.op.split()[0] in SPOILED)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("norm_gate_up 512x256 float32", 4 * (512 * 256 + 256 + 256 + 256)),
        ("rmsnorm 256 float32", 4 * 3 * 256),
        # The bytes of a full cache with two key heads, of the query and the result with four heads, and of the length.
        ("attention_decode 4/2x64 of 128 float32", 4 * (2 * 2 * 128 * 64 + 2 * 4 * 64 + 1)),
        # The bytes of weights, x, norm, q, angles and position. The cache is updated in place and does not count.
        ("norm_qkv 4+2x2x64x256 float32", 4 * (512 * 256 + 256 + 256 + 4 * 64 + 64 + 1)),
    ],
)
def test_bytes_are_those_that_must_be_moved(name: str, expected: int):
    assert PLAIN[name].bytes == expected


def test_arguments_are_random_codes_included():
    case = next(case for name, case in CODES.items() if " q4 " in name)
    words, other_words = (draw(case, seed)[0].codes for seed in (0, 1))
    assert words.dtype == jnp.int32 and len(np.unique(np.asarray(words))) > words.size / 2
    assert not np.array_equal(np.asarray(words), np.asarray(other_words))


def test_all_calls_that_are_timed_are_made():
    """The timed loop makes every call, although XLA could merge equal calls or drop calls without a used result."""
    case = PLAIN["rmsnorm 256 float32"]
    sets = [draw(case, seed) for seed in range(5)]
    compiled = jax.jit(partial(again_and_again, case, case.plain, 12)).lower(2, [[]] * 5, sets).compile()
    loop, entry = str(compiled.as_text()).split("\nENTRY ")
    assert [len(re.findall(r" rsqrt\(", part)) for part in (loop, entry)] == [12, 0]
    _, results = compiled(2, [[]] * 5, sets)
    assert len(results) == 12
    assert all(worst(case, result, sets[i % 5]) <= 1 for i, result in enumerate(results))
