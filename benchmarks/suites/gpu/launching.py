"""Measures a decode step with CUDA graphs, with overlapping kernels (PDL), with both and with neither."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from llamaspec.benchmarks.common.report import Row, skipped
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.models import by_kernels, decoding, params_of, programs_of
from llamaspec.benchmarks.suites.gpu.scale import Scale
from llamaspec.model.running.compile import IN_GRAPHS, LOOPS_IN_GRAPHS, NO_GRAPHS
from llamaspec.pallas_kernels.parts.compat import Target, use_target

IN_A_GRAPH: dict[str, dict[str, Any]] = {  # options of the compiler, by their names in the report
    "everything": LOOPS_IN_GRAPHS,
    "a step": {"xla_gpu_enable_command_buffer": IN_GRAPHS},
    "nothing": NO_GRAPHS,
}


def time_launches(scale: Scale, clock: Deadline) -> Iterator[Row]:
    """Time a decode step for each CUDA graph setting, with and without PDL. The interpreter has no PDL."""
    model, context = scale.launched, scale.contexts[0]
    params = params_of(model, scale)
    for name, options in IN_A_GRAPH.items():
        for pdl in (True, False):
            case = {"case": name, "pdl": "on" if pdl else "off", "context": context}
            if clock.over:
                yield skipped(f"{name} in a graph, PDL {case['pdl']}")
                continue
            with scale.running(), nullcontext() if pdl or scale.device == "cpu" else use_target(Target(pdl=False)):
                programs = programs_of(model, params, by_kernels(model, params, scale), scale, options)
                row = decoding(model, params, programs, scale, context=context)
            yield {**case, **row}
