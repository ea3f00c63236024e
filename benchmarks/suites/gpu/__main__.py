"""Runs one part of the suite in this process, and prints each row immediately, as a line of JSON."""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

import click
import jax

from llamaspec.benchmarks.common.report import Row
from llamaspec.benchmarks.suites.gpu import scale as scales
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.kernels import time_clearing, time_kernels
from llamaspec.benchmarks.suites.gpu.launching import time_launches
from llamaspec.benchmarks.suites.gpu.models import time_models
from llamaspec.benchmarks.suites.gpu.prompts import time_attention
from llamaspec.benchmarks.suites.gpu.right import check
from llamaspec.benchmarks.suites.gpu.scale import Scale
from llamaspec.benchmarks.suites.gpu.starting import time_start
from llamaspec.benchmarks.suites.gpu.suite import CANNOT_RUN
from llamaspec.benchmarks.suites.gpu.tuning import tune
from llamaspec.model.insight.machine import about, measure_ceilings

DTYPES = ("float32", "bfloat16")
SCALES = {"full": scales.full, "dry": scales.dry}


def measure_memory(scale: Scale, _: Deadline) -> Iterator[Row]:
    """Measure the machine's rates in one row. The shares in all other rows are relative to these rates."""
    yield {"about": about(), "ceilings": measure_ceilings(DTYPES, scale.memory)._asdict()}


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "memory": measure_memory,
    "right": check,
    "models": time_models,
    "kernels": time_kernels,
    "clearing": time_clearing,
    "attention": time_attention,
    "launching": time_launches,
    "starting": time_start,
    "tuning": tune,
}


def wrong_device(scale: Scale) -> str | None:
    """Explain why the suite cannot run here; None if it can."""
    device = jax.devices()[0]
    if scale.device == "cpu" or getattr(device, "compute_capability", None) == "9.0":
        return None
    return (
        "the suites of a GPU need a GPU of compute capability 9.0 (H100, H200), but JAX has here "
        f"a {device.device_kind}: use --dry-run to test a suite on a CPU"
    )


@click.command()
@click.argument("part", type=click.Choice(sorted(PARTS)))
@click.option("--scale", "name", type=click.Choice(sorted(SCALES)), required=True)
@click.option("--seconds", type=float, required=True, help="Seconds after which the remaining cases are skipped.")
@click.option("--options", default="{}", help="As JSON.")
def main(part: str, name: str, seconds: float, options: str):
    """Run a part of the suite."""
    clock, scale = Deadline(seconds), SCALES[name]()
    if reason := wrong_device(scale):
        print(reason, file=sys.stderr)
        sys.exit(CANNOT_RUN)
    for row in partial(PARTS[part], **json.loads(options))(scale, clock):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
