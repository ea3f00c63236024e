"""XLA compiles a decode step for a CPU to fast code, because `model.ops` writes matrix products in a special form."""

import re
from functools import partial
from math import prod

import jax
import numpy as np
import pytest

from llamaspec.benchmarks.audits.schemes import Stored, shapes
from llamaspec.benchmarks.common.model_speed import GREEDY, _decoding
from llamaspec.benchmarks.common.random_model import random_cache, random_params, random_shapes
from llamaspec.model.cache import LayerCache, empty_cache
from llamaspec.model.checkpoints.gguf.blocks import FORMS
from llamaspec.model.forward import decode
from llamaspec.model.insight.profile import named, parts_of
from llamaspec.model.ops.attention import SPANS
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.running.compile import compiler_options
from llamaspec.reference.config import Config

CONFIG = Config(dim=512, layers=1, heads=8, kv_heads=8, head_dim=64, ffn=1408, vocab=4096, context=512,
                eps=1e-5, theta=1e4)  # fmt: skip
SMALLEST = CONFIG.dim**2  # numbers in the smallest matrix
CAPACITY = 256  # small enough that the keys of a layer have fewer numbers than `SMALLEST`
OPTIONS = compiler_options("cpu")
QUANTIZED_AS = (
    None,
    "q8",
    "q8_row",
    "q4",
    "nf4",
    "fp8",
    "mxfp4",
    "Q5_K",
    "Q4_K",
    "Q6_K",
    "Q2_K",
    "IQ4_NL",
)  # our own schemes, and GGUF's types
FORMATS = [("bfloat16", None, True), *(("float32", scheme, True) for scheme in QUANTIZED_AS), ("float32", None, False)]
# These instructions only rename numbers that are already in memory.
PASSED_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier"}


def lowered(dtype: str, scheme: str | None, *, greedy: bool, burst: int = 4):
    if scheme in FORMS:
        params = shapes(CONFIG, Stored(dtype, *FORMS[scheme]), positions=CAPACITY)
    else:
        params = random_shapes(CONFIG, dtype=np.dtype(dtype), positions=CAPACITY, quantize=scheme)
    cache = jax.eval_shape(partial(empty_cache, CONFIG, batch=1, capacity=CAPACITY, dtype=np.dtype(dtype)))
    program = jax.jit(partial(decode, config=CONFIG, ops=named(CPU), greedy=greedy, burst=burst), donate_argnums=2)
    return program.lower(params, *_decoding(CONFIG, cache, 1, burst, GREEDY))


def written(hlo: str) -> list[tuple[str, str, int]]:
    """List the name, kind and size of each instruction that writes memory.

    Instructions inside a fusion are left out, because only the fusion's result is written.
    """
    fused = set(re.findall(r"fusion\(.*?calls=%([\w.\-]+)", hlo))
    writes, inside = [], ""
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            inside = header[1]
        elif inside not in fused and (
            instruction := re.match(r" +(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        ):
            name, type, kind = instruction.groups()
            numbers = max((prod(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", type)), default=1)
            writes.append((name, kind, numbers))
    return writes


@pytest.mark.sampled(1)  # 4 to 9 s each
@pytest.mark.parametrize(("dtype", "scheme", "greedy"), FORMATS)
def test_products_run_on_all_cores_and_copy_no_weight(dtype: str, scheme: str | None, greedy: bool):
    hlo = lowered(dtype, scheme, greedy=greedy).compile(compiler_options=OPTIONS).as_text()
    assert hlo
    parts = parts_of(hlo)
    loops = re.finditer(r"^ +(?:ROOT )?%(\S+) = f32\[\d+,\d+,16\]\S* fusion\(.*$", hlo, re.MULTILINE)
    products = {loop[1]: loop[0] for loop in loops if parts[loop[1]].endswith("product")}
    assert len(products) == 4 * CONFIG.layers + 1  # qkv, o, gate and up, down; the head
    for line in products.values():
        assert "kind=kLoop" in line  # one vectorized loop, not a kernel of YNNPACK
        (cores,) = re.findall(r'"outer_dimension_partitions":\["(\d+)"\]', line)
        assert int(cores) > 1
    # Partial sums also go through memory: 512 columns make one block, 1408 make two; NF4 has blocks of 64.
    blocks = [int(n) for line in products.values() for n in re.findall(r"f32\[\d+,(\d+),16\]\S* fusion", line)]
    assert sorted(blocks) == ([8] * 4 + [22] if scheme == "nf4" else [1] * 4 + [2])
    # A weight that is converted, decoded or copied, inside or before the loop, would be as large as a matrix.
    large = [(name, kind) for name, kind, numbers in written(hlo) if numbers >= SMALLEST and kind not in PASSED_ON]
    assert [entry for entry in large if entry[0] not in products] == []


@pytest.mark.parametrize("greedy", [True, False])
def test_no_branch_asks_for_the_temperature(greedy: bool):
    """The program of a decode step has no branch on the temperature.

    Its only branch picks how many rows of the cache attention reads. Sampling adds one loop, for top-k and top-p.
    """
    hlo = lowered("float32", None, greedy=greedy).compile(compiler_options=OPTIONS).as_text()
    assert hlo
    branches = re.findall(r" conditional\(.*op_name=\"[^\"]*/(\w+)/cond\"", hlo)
    assert branches == ["attend"] and hlo.count(" conditional(") == 1
    filters = re.findall(r" while\(.*op_name=\"[^\"]*/sample/while\"", hlo)
    assert len(filters) == (not greedy)


def test_weights_widened_before_a_loop_are_detected():
    """`written` lists weights that XLA widens to float32 before a loop.

    In `model.forward`, an optimization barrier prevents this widening.
    """
    shape = jax.ShapeDtypeStruct((CONFIG.dim, CONFIG.dim), np.dtype("bfloat16"))

    def hoisted(w, x):
        return jax.lax.fori_loop(0, 9, lambda _, x: w.astype(np.float32) @ x, x)

    hlo = jax.jit(hoisted).lower(shape, jax.ShapeDtypeStruct((CONFIG.dim,), np.float32)).compile().as_text()
    assert hlo
    assert any(numbers >= SMALLEST and kind not in PASSED_ON for _, kind, numbers in written(hlo))


def test_attention_reads_the_used_part_of_the_cache_alone():
    """Attention reads no cache rows after the rows in use, because they may be NaN, and 0 times NaN is NaN."""
    params = random_params(random_shapes(CONFIG, dtype=np.dtype("float32"), positions=CAPACITY), CONFIG)
    program = lowered("float32", None, greedy=True).compile(compiler_options=OPTIONS)
    drawn, span = [], 2 * SPANS.smallest
    for past in (0.0, np.nan):
        cache = random_cache(CONFIG, dtype=np.dtype("float32"), capacity=CAPACITY)
        layers = [LayerCache(*(rows.at[:, :, span:].set(past) for rows in layer)) for layer in cache.layers]
        cache = cache._replace(layers=layers, lengths=cache.lengths + 10)
        ids, count, _, _ = program(params, *_decoding(CONFIG, cache, 1, 4, GREEDY))
        assert int(count) == 4
        drawn.append(np.asarray(ids).tolist())
    assert drawn[0] == drawn[1]
    assert max(map(max, drawn[1])) < CONFIG.vocab  # NaN logits draw the token `vocab`
