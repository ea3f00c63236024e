"""Compiles any function for an H200 or another card, without a GPU. Needs the CUDA plugin of jax, but no CUDA.

jax finds these tools in Python wheels: ptxas (nvidia-cuda-nvcc), libdevice (nvidia-nvvm) and nvdisasm. Works with jax
0.11.2 to 0.12.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# JAX reads these variables when it is imported. They tell it not to look for a device or for libraries such as cuDNN.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from llamaspec.benchmarks.common.kernel_cases import gated_cases
from llamaspec.benchmarks.gates.cards import SHEETS
from llamaspec.benchmarks.gates.decode_steps import FEW_LAYERS, decode_step
from llamaspec.benchmarks.gates.kernel import Kernel, read_kernels
from llamaspec.benchmarks.gates.program import ProgramFacts, issued, launches
from llamaspec.model.running.compile import LOOPS_IN_GRAPHS
from llamaspec.pallas_kernels.parts.compat import Target, use_target

# In this format XLA dumps snapshots of programs that run. For a program that is only compiled, it dumps the thunks.
DUMPED = {"xla_dump_hlo_snapshots": True}


@cache
def mesh(card: str = "h200", *, devices: int = 1, axis: str = "device") -> Mesh:
    """Make a mesh of one or several cards, with one axis."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=SHEETS[card].target, topology=f"1x1x{devices}"
    )
    return topologies.make_mesh(topology, (devices,), (axis,))


@contextmanager
def kernels_for(card: str) -> Iterator[None]:
    """Build kernels for a card in this context. A process may compile for cards of one compute capability only.

    Mosaic asks JAX's default device for its capability, and assumes 9.0 for a CPU. Its passes keep the first answer.
    """
    answer = utils._infer_arch
    utils._infer_arch = lambda: SHEETS[card].card.capability
    try:
        with use_target(Target(card=SHEETS[card].card)):
            yield
    finally:
        utils._infer_arch = answer


def compile_for(card: str, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> ProgramFacts:
    """Lower and compile `function` for a card and the shapes of `arguments`.

    `arguments` are pytrees of arrays or of shapes.
    """
    with TemporaryDirectory(prefix="gpu-compile-") as folder:
        start = sum(os.times()[:4])  # processor time of all threads, and of the assembler's processes
        options = LOOPS_IN_GRAPHS | {"xla_dump_to": folder, **DUMPED}
        compiled = _compiled(function, arguments, donate, options, card=card)
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
    """Compile for an H200 as `compile_for` does, but with XLA's options `options`; return the program's HLO."""
    hlo = _compiled(function, arguments, donate, options).as_text()
    assert hlo
    return hlo


def _compiled(
    function: Callable[..., Any],
    arguments: Any,
    donate: tuple[int, ...],
    options: dict[str, Any],
    *,
    card: str = "h200",
) -> Compiled:
    with jax.sharding.use_abstract_mesh(mesh(card).abstract_mesh), kernels_for(card):
        lowered = jax.jit(function, donate_argnums=donate).lower(*placed(arguments, card))
    return lowered.compile(options)


def placed(arguments: Any, card: str = "h200") -> Any:
    """Return the shapes of the pytree `arguments`, with a sharding on the card."""
    there = NamedSharding(mesh(card), PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arguments)


def compile_case(name: str, card: str = "h200") -> tuple[ProgramFacts, list[Kernel]]:
    """Compile a case of the kernel table for a card. Must run in a process that has compiled nothing before.

    A process compiles each kernel once, and dumps the kernel's files only during this compilation.
    """
    case = gated_cases()[name]
    with TemporaryDirectory(prefix="gpu-compile-") as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        program = compile_for(card, case.function, *case.arrays, donate=case.donated)
        return program, read_kernels(Path(folder))


def compile_step(name: str) -> tuple[ProgramFacts, ProgramFacts]:
    """Compile a decode step twice: once with a few of the model's layers, and once with all."""

    def compile(layers: int | None) -> ProgramFacts:
        step = decode_step(name, layers=layers)
        return compile_for("h200", step.function, *step.arguments, donate=step.donated)

    return compile(FEW_LAYERS), compile(None)
