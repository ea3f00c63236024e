"""Compiles any function for an H200 on a machine without a GPU. Needs the CUDA plugin of jax, but no CUDA.

jax finds these tools in Python wheels: ptxas (nvidia-cuda-nvcc), libdevice (nvidia-nvvm) and nvdisasm. Works with jax
0.11.2 to 0.12.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# JAX reads these variables when it is imported. They tell it not to look for a device or for libraries such as cuDNN.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from llamaspec.benchmarks.common.kernel_cases import gated_cases
from llamaspec.benchmarks.gates.decode_steps import FEW_LAYERS, decode_step
from llamaspec.benchmarks.gates.h200 import TARGET
from llamaspec.benchmarks.gates.kernel import Kernel, read_kernels
from llamaspec.benchmarks.gates.program import ProgramFacts, issued, launches
from llamaspec.model.running.compile import LOOPS_IN_GRAPHS

# In this format XLA dumps snapshots of programs that run. For a program that is only compiled, it dumps the thunks.
DUMPED = {"xla_dump_hlo_snapshots": True}


@cache
def mesh() -> Mesh:
    """Make a mesh of one H200."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("device",))


def compile_for_h200(function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> ProgramFacts:
    """Lower and compile `function` for the shapes of `arguments`, which are pytrees of arrays or of shapes."""
    with TemporaryDirectory(prefix="gpu-compile-") as folder:
        start = sum(os.times()[:4])  # processor time of all threads, and of the assembler's processes
        compiled = _compiled(function, arguments, donate, LOOPS_IN_GRAPHS | {"xla_dump_to": folder, **DUMPED})
        seconds = sum(os.times()[:4]) - start
        outermost = tuple(issued(_thunks(Path(folder)).read_text()))
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory and hlo
    return ProgramFacts(
        launches=tuple(launches(hlo)),
        temp=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        seconds=seconds,
        issued=outermost,
    )


def _thunks(folder: Path) -> Path:
    """Find XLA's final list of thunks (units of work), in the dump of a compilation.

    If no thunk pass changed the list, XLA writes only the list from before these passes.
    """
    (first,), last = folder.glob("*.thunk_sequence.txt"), [*folder.glob("*.thunk_sequence_after_thunk_passes.txt")]
    return last[0] if last else first


def hlo_for_h200(
    function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = (), options: dict[str, Any]
) -> str:
    """Compile like `compile_for_h200`, with other `options` of XLA, and return the program's HLO."""
    hlo = _compiled(function, arguments, donate, options).as_text()
    assert hlo
    return hlo


def _compiled(
    function: Callable[..., Any], arguments: Any, donate: tuple[int, ...], options: dict[str, Any]
) -> Compiled:
    with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
        lowered = jax.jit(function, donate_argnums=donate).lower(*placed(arguments))
    return lowered.compile(options)


def placed(arguments: Any) -> Any:
    """Return the shapes of `arguments`, a pytree, with a sharding on the H200."""
    there = NamedSharding(mesh(), PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arguments)


def compile_case(name: str) -> tuple[ProgramFacts, list[Kernel]]:
    """Compile a case of the kernel table. Must run in a process that has compiled nothing before.

    A process compiles each kernel only once, and only then dumps the kernel's files.
    """
    case = gated_cases()[name]
    with TemporaryDirectory(prefix="gpu-compile-") as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        program = compile_for_h200(case.function, *case.arrays, donate=case.donated)
        return program, read_kernels(Path(folder))


def compile_step(name: str) -> tuple[ProgramFacts, ProgramFacts]:
    """Compile a decode step twice: with few of its layers, and with all."""

    def compile(layers: int | None) -> ProgramFacts:
        step = decode_step(name, layers=layers)
        return compile_for_h200(step.function, *step.arguments, donate=step.donated)

    return compile(FEW_LAYERS), compile(None)
