"""What the compiler's settings and overlapping kernels (PDL) are worth: a decode step under one of each.

A setting holds for a whole process, so each has one of its own.
"""

from collections.abc import Iterator
from contextlib import nullcontext

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.models import TABLES, decoding, params_of, programs_of
from benchmarks.gpu.scale import Scale
from benchmarks.report import Row
from pallas_kernels.compat import Target, use_target


def time_setting(scale: Scale, _: Clock, *, setting: str, pdl: bool) -> Iterator[Row]:
    """One row; the setting is in XLA_FLAGS already. The interpreter has no PDL to be switched off."""
    model = scale.launched
    params = params_of(model, scale)
    with scale.running(), nullcontext() if pdl or scale.device == "cpu" else use_target(Target(pdl=False)):
        programs = programs_of(model, params, TABLES["kernels"], scale)
        row = decoding(model, params, programs, scale, context=scale.contexts[0])
    yield {"case": setting, "pdl": "on" if pdl else "off", "context": scale.contexts[0], **row}
