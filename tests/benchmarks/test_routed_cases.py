"""Every kernel launch that `pallas_ops` can choose is among the cases that we compile without a GPU."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import jax
import pytest

from llamaspec.benchmarks.common.kernel_cases import gated_cases, kernel_cases, refusal
from llamaspec.benchmarks.common.kernel_cases.case import Case, KernelWork
from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.benchmarks.gates.decode_steps import CAPACITY, DTYPES
from llamaspec.model.checkpoints.checkpoint import Codes
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import PROMPT
from llamaspec.model.ops.gpu import calls as model_calls
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.forms.table import CLASS_OF_FORM
from llamaspec.model.weights.gpu_codes import Stacked, arranged
from llamaspec.model.weights.params import Params
from llamaspec.pallas_kernels.parts.matrix import MAX_BATCH
from llamaspec.pallas_kernels.unsupported import Unsupported
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.schemes import SCHEMES

# Each module calls this function if it refuses nothing; the function's arguments decide the compiled kernel.
LAUNCHES = {
    f"llamaspec.pallas_kernels.{name}": f"_{name}"
    for name in ("gemv", "norm_gate_up", "norm_qkv", "attention_decode", "attention_prefill")
}
GROUPS = (16, 32, 64, 96, 128, 256)  # sizes that checkpoints may have; kernels refuse some
WORK = KernelWork()


class Call(NamedTuple):
    """A recorded kernel launch: the kernel's name, its arrays, and its static arguments."""

    kernel: str
    arrays: tuple[Any, ...]
    fixed: dict[str, Any]

    @property
    def exactly(self) -> tuple[Any, ...]:
        """Everything that determines the compiled kernel. A window counts only as present or absent."""
        fixed = {**self.fixed, "window": self.fixed.get("window") is not None}
        shapes = tuple((a.shape, a.dtype.name) for a in jax.tree.leaves(self.arrays))
        return self.kernel, jax.tree.structure(self.arrays), shapes, tuple(sorted(fixed.items()))

    @property
    def features(self) -> dict[str, Any]:
        if "window" in self.fixed:
            q, _, _, _ = self.arrays
            return {"dtype": q.dtype, "head": q.shape[-1], "window": self.fixed["window"] is not None}
        _, x, norm, bias, *extra = self.arrays
        loops = (
            [self.fixed["product"]] if "product" in self.fixed else [part.product for part in self.fixed["parts"][0]]
        )
        loop = loops[0]
        return {
            "dtype": x.dtype,
            "loop": tuple(
                (type(loop).__name__, *(getattr(loop, name, None) for name in ("group", "bits", "minima", "levels")))
                for loop in loops
            ),
            "norm": norm is not None,
            "bias": bias is not None,
            "several": loop.batch > 1,
            "head": extra[0].shape[-1] if self.kernel == "_norm_qkv" else None,
        }

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        """All pairs of features that this launch combines."""
        return {(self.kernel, *pair) for pair in combinations(self.features.items(), 2)}


Record = Callable[[Callable[[], Any]], list[Call]]


@pytest.fixture(scope="module")
def calls() -> Iterator[Record]:
    """Yield a function that calls its argument and returns the attempted kernel launches; no kernel runs."""
    recorded_calls: list[Call] = []

    def recorded(kernel: str, *arrays: Any, **fixed: Any):
        recorded_calls.append(Call(kernel, arrays, fixed))
        raise Unsupported("this far, and no further")  # looks like a kernel's refusal, so the caller goes on

    def record(function: Callable[[], Any]) -> list[Call]:
        recorded_calls.clear()
        function()
        return list(recorded_calls)

    with pytest.MonkeyPatch.context() as patched:
        for module, kernel in LAUNCHES.items():
            patched.setattr(importlib.import_module(module), kernel, partial(recorded, kernel))
        yield record


@pytest.fixture(scope="module")
def known(calls: Record) -> set[tuple[Any, ...]]:
    """Collect the launches of the benchmark table's cases."""
    return {call.exactly for call in calls(lambda: launch(kernel_cases()))}


def launch(cases: dict[str, Case]) -> None:
    """Launch each case if its kernel is recorded and supports the case's shapes."""
    for name, case in cases.items():
        if f"_{case.op.split()[0]}" in LAUNCHES.values() and refusal(name) is None:
            with pytest.raises(Unsupported, match="no further"):
                jax.eval_shape(case.function, *case.arrays)


def decode_and_prompt(config: Config, params: Params, *, batch: int = 1) -> None:
    """Attempt all kernel launches of a decode step, and of prefill attention if `batch` is 1."""
    for call in model_calls(config, params, capacity=CAPACITY, batch=batch):
        if call.name != PROMPT or batch == 1:
            call.refusal(config)


def shapes(config: Config, dtype: str, scheme: str | None) -> Params:
    config = replace(config, layers=1)
    return jax.eval_shape(arranged, random_shapes(config, dtype=DTYPES[dtype], positions=CAPACITY, quantize=scheme))


@pytest.mark.sampled(1)  # 1 s each
@pytest.mark.parametrize("model", SHAPES)
def test_every_kernel_of_a_published_llama_is_a_case(model: str, calls: Record, known: set[tuple[Any, ...]]):
    """The table has a case for every launch in both dtypes, and in bfloat16 for every quantization scheme."""
    config = SHAPES[model]
    for dtype, scheme in (("float32", None), *product(["bfloat16"], (None, *SCHEMES))):
        params = shapes(config, dtype, scheme)
        for call in calls(lambda params=params: decode_and_prompt(config, params)):
            assert call.exactly in known, (dtype, scheme, call)


def forms(config: Config, dtype: str) -> Iterator[Params]:
    """Yield parameters with float weights, then with each quantized form in every group size."""
    yield shapes(config, dtype, None)
    coded = random_shapes(replace(config, layers=1), dtype=DTYPES[dtype], positions=CAPACITY, quantize="q8")
    for kind, group in product(CLASS_OF_FORM.values(), (*GROUPS, None)):

        def regrouped(leaf: Any, kind=kind, group=group):
            if not isinstance(leaf, QuantizedMatrix):
                return leaf
            codes = Codes(kind.form, group or leaf.cols, zeros=False, bytes=0, parts=lambda: iter(()))
            return kind.shapes(len(leaf.codes), leaf.cols, codes)

        changed = jax.tree.map(regrouped, coded, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))
        yield jax.eval_shape(arranged, changed)
    for form in ("int4_min", "int5_min"):
        yield with_v_apart(coded, config, form)


def with_v_apart(coded: Params, config: Config, form: str) -> Params:
    """Store v in a different quantized form than q and k, as GGUF files with mixed types do."""
    (layer,) = coded.layers
    rows = config.kv_heads * config.head_dim

    def part(form: Any, group: int, count: int) -> Any:
        codes = Codes(form, group, zeros=False, bytes=0, parts=lambda: iter(()))
        return CLASS_OF_FORM[form].shapes(count, config.dim, codes)

    parts = part(form, 32, config.heads * config.head_dim + rows), part("int6", 16, rows)
    layer = layer._replace(qkv=layer.qkv._replace(weight=Stacked(parts)))
    return jax.eval_shape(arranged, coded._replace(layers=[layer]))


# Every pair of a model, biases and a dtype occurs. Attention of a prompt has a kernel in bfloat16 only, so in bfloat16
# each model occurs with and without biases, which come with a window.
PAIRED = (
    *product(("tinyllama-1.1b", "llama-3.1-8b"), (False, True), ("bfloat16",)),
    ("tinyllama-1.1b", False, "float32"),
    ("llama-3.1-8b", True, "float32"),
)


def route() -> None:
    """Attempt launches with every pair of features of the kernels, for the shapes of two models."""
    for model, biased, dtype in PAIRED:
        config = replace(SHAPES[model], layers=1, qkv_bias=biased, o_bias=biased, ffn_bias=biased)
        config = replace(config, windows=(1024,) if biased else None)
        for params, batch in product(forms(config, dtype), (1, 2, MAX_BATCH)):
            decode_and_prompt(config, params, batch=batch)


@pytest.mark.slow  # 45 s
def test_every_pair_of_kernel_features_has_a_case(calls: Record):
    required = set().union(*(call.pairs for call in calls(route)))
    assert {kernel for kernel, *_ in required} == set(LAUNCHES.values())
    groups = {loop[1] for _, *pair in required for name, value in pair if name == "loop" for loop in value}
    assert groups == {None, 16, 32, 64, 128}  # the sizes above that kernels support

    met = {
        name: set().union(*(call.pairs for call in calls(partial(launch, {name: case}))))
        for name, case in gated_cases().items()
    }
    assert not required - set().union(*met.values())
    for word in (
        "q8_32",
        "q4_128",
        "q4_32_min",
        "q6_16",
        "iq4_nl",
        "bias",
        "window",
        "float32",
        "x2",
    ):  # one kind less is seen
        assert required - set().union(*(pairs for name, pairs in met.items() if word not in name.split())), word
