"""Cases of `coded_gemm`, the product of a quantized matrix with many vectors, for the five matrices of a model."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llamaspec.benchmarks.common.kernel_cases import exact, plain
from llamaspec.benchmarks.common.kernel_cases.case import (
    BFLOAT16,
    Case,
    KernelLimits,
    KernelWork,
    Meeting,
    Variant,
    array,
    times,
)
from llamaspec.benchmarks.common.kernel_cases.products import EVERY_FORM, coded_matrix
from llamaspec.pallas_kernels.coded_gemm import GROUPS, Geometry, coded_gemm, geometry_of
from llamaspec.reference.config import Config

FORMS = tuple(
    name
    for name, form in EVERY_FORM.items()
    if not (form.levels or form.e4m3) and form.group in (GROUPS[1:] if form.bits == 4 else (*GROUPS, None))
)
MOST_REGISTERS = {8: 168, 16: 168, 32: 255, 64: 255}  # with 168, three blocks share an SM, with 255, two


@partial(
    Variant,
    meetings=(
        Meeting("tinyllama-1.1b", BFLOAT16, {"batch": 16}),
        *(Meeting("llama-3.1-8b", BFLOAT16, {"batch": batch}) for batch in (8, 16, 32, 64)),
    ),
)
def coded_gemm_cases(config: Config, dtype: np.dtype, work: KernelWork, *, batch: int) -> Iterator[Case]:
    """Yield cases of the products of a layer and of the LM head, with `batch` vectors.

    Up to eight vectors, we yield all quantized forms; above, only q8 and q4. From 64 vectors on, we leave out matrices
    that the kernel cuts along their columns: XLA adds up the parts, and in a model it fuses this sum with the next op.
    """
    del dtype, work
    for scheme in FORMS if batch <= 8 else ("q8", "q4"):
        for rows, cols in shapes(config):
            built = case(rows, cols, batch=batch, scheme=scheme)
            if batch < 64 or geometry_of(*built.arrays).cut.parts == 1:
                yield built


def shapes(config: Config) -> dict[tuple[int, int], str]:
    """Return the shapes of a model's matrices, with a name for each."""
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        (width + 2 * kv_width, config.dim): "qkv",
        (config.dim, width): "o",
        (2 * config.ffn, config.dim): "gate_up",
        (config.dim, config.ffn): "down",
        (config.vocab, config.dim): "head",
    }


def case(rows: int, cols: int, *, batch: int, scheme: str) -> Case:
    """Make a case of one shape and form for `batch` vectors."""
    w, x = coded_matrix(rows, cols, BFLOAT16, scheme), array(batch, cols, dtype=BFLOAT16)
    return Case(
        op=f"coded_gemm {scheme}",
        shape=f"{rows}x{cols}{times(batch)}",
        dtype=BFLOAT16.name,
        function=coded_gemm,
        plain=plain.coded_gemm,
        exact=exact.coded_gemm,
        arrays=(w, x),
        kernels={"coded_gemm": _limits(geometry_of(w, x))},
        bits=EVERY_FORM[scheme].bits,
    )


def _limits(geometry: Geometry) -> KernelLimits:
    """Return the limits on a kernel. We count the instructions of a thread per weight, for 64 rows and one group:

    1.75                for codes of eight bits: two masks and an addition per two codes, and a shift per four
    1.4                 for codes of four bits: a mask and an addition per two codes, and three shifts per eight
    2.5                 for codes of 5 and 6 bits: as for 4 bits, with a shift and a mask for the low bits of two codes
    width / group       to scale the sums and add them up, and the same again for minima
    48 / group          for products and their addresses, loads, and waits
    160 per step        to wait, to request the next copies, and for the loop itself
    """
    columns = geometry.group or geometry.cut.turn
    decoding = 1.75 if geometry.bits == 8 else 1.4 if geometry.bits == 4 else 2.5
    weights = geometry.tile_rows * geometry.columns / 128
    per_weight = decoding + (1 + geometry.minima) * geometry.width / columns + 48 / columns + 160 / weights
    return KernelLimits(MOST_REGISTERS[geometry.width], round(per_weight + 0.05, 1), wgmma=True)
