"""XLA's options for programs of one sequence: matrix products are not autotuned, unless this would make them slower."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from llamaspec.benchmarks.common.model_speed import compile_programs as benchmarked
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running import programs
from llamaspec.model.running.compile import UNTUNED, compiler_options, model_options
from llamaspec.model.running.programs import Layout
from llamaspec.model.weights.params import Params
from tests.model.ops.test_ops_choice import BFLOAT16, CAPACITY, WIDE, in_codes, newer, shapes

SINGLE = np.dtype(np.float32)
CODED = in_codes(shapes(WIDE), "int8", 64)


@pytest.fixture(scope="module")
def by_kernels() -> Ops:
    return pallas_ops(WIDE, CODED, capacity=CAPACITY)[0]


def untuned(params: Params, ops: Ops, config: Any = WIDE, platform: str = "gpu", batch: int = 1) -> bool:
    options, usual = model_options(platform, params, config, ops=ops, batch=batch), compiler_options(platform)
    assert options in (usual, usual | UNTUNED)
    return options != usual


def test_unmeasured_programs_are_autotuned(by_kernels):
    assert untuned(CODED, by_kernels)
    assert not untuned(CODED, by_kernels, platform="cpu")
    assert not untuned(CODED, by_kernels, batch=2)
    assert not untuned(CODED, XLA)
    assert not untuned(in_codes(shapes(WIDE, SINGLE), "int8", 64), by_kernels)
    assert not untuned(CODED, by_kernels, replace(WIDE, experts=4, experts_per_token=2))


def test_an_op_that_a_kernel_refuses_is_tuned(by_kernels):
    config = newer(nonlinearity="gelu")
    refusing = pallas_ops(config, shapes(config), capacity=CAPACITY)[0]
    assert not untuned(CODED, refusing)
    for name in Ops._fields:
        expected = name == "moe_add"  # only models with experts call it
        assert untuned(CODED, by_kernels._replace(**{name: getattr(XLA, name)})) == expected, name


@pytest.mark.parametrize(("form", "group"), [("int4", 32), ("nf4", 64), (None, 0)])
def test_one_sequence_is_not_tuned_whatever_its_weights_are(by_kernels, form, group):
    params = shapes(WIDE)
    assert untuned(in_codes(params, form, group) if form else params, by_kernels)


@pytest.mark.parametrize("batch", [1, 2])
def test_programs_of_one_sequence_are_compiled_by_these_options(monkeypatch, by_kernels, batch):
    """On one GPU, `compile_programs` compiles a program of one sequence with the options `UNTUNED`.

    It compiles programs of several sequences, or for several devices, with the platform's options.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    passed: list[dict[str, Any]] = []
    real_jit, real_compile = jax.jit, jax.stages.Lowered.compile

    def jit(program: Callable[..., Any], **_: Any) -> Any:
        return real_jit(lambda *_: 0)  # the program does not matter, and a CPU cannot lower kernels

    def compile(self: jax.stages.Lowered, options: dict[str, Any]) -> jax.stages.Compiled:
        passed.append(options)
        return real_compile(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    params, expected = CODED, compiler_options("gpu") | (UNTUNED if batch == 1 else {})
    layout = Layout(batch, CAPACITY - 8, 8, 4, BFLOAT16, wide=(16,))
    arguments = {"ops": by_kernels, "layout": layout, "platform": "gpu", "greedy": True}
    programs.compile_programs(params, WIDE, **arguments, jit=jit)  # as for several devices
    assert passed == [compiler_options("gpu")] * 2
    passed.clear()
    monkeypatch.setattr(jax, "jit", jit)
    compiled = programs.compile_programs(params, WIDE, **arguments)
    compiled.prefill(16)
    compiled.decode(False)
    assert passed == [expected] * 4
    benchmarked(params, WIDE, ops=by_kernels, capacity=CAPACITY, chunk=8, burst=4, batch=batch)
    assert passed == [expected] * 6
