"""Settings of the process. Only commands change them. The library does not change the process of its caller.

Importing this module imports neither NumPy nor JAX, so that a command can prepare its process first.
"""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamaspec.model.system import forget_code, return_blocks_when_freed, return_freed_memory

if TYPE_CHECKING:
    from llamaspec.reference.config import Config

AHEAD = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX refuses both; the second is deprecated
MEMORY = (AHEAD, *FRACTIONS)
ON_DEMAND = ("false", "False", "0")  # JAX treats any other value as true, even "no"
# The share of a GPU's memory that JAX may use. If JAX allocates memory on demand, its default is 0.75. CUDA's context,
# code and graphs need some of the rest.
MOST = "0.92"
SMALL = 1 << 28  # number of weights with which a CPU prefills a chunk in a quarter of a second
BROKEN = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'")


def prepare_process(*, debug: bool = False) -> None:
    """Make JAX allocate GPU memory on demand. Unless `debug` is set, hide XLA's messages and NumPy's warnings.

    NumPy warns about numbers that are not finite. We check such numbers ourselves, and report them in an error of one
    line.

    Importing JAX sets a log level, so a command must call this function before it imports JAX. Environment variables
    that the user has set take precedence; an empty variable for memory counts as not set. If the user has told JAX to
    allocate GPU memory at the start, JAX takes its default share of the memory.
    """
    os.environ[AHEAD] = os.environ.get(AHEAD) or ON_DEMAND[0]
    if os.environ[AHEAD] in ON_DEMAND and not any(map(os.environ.get, FRACTIONS)):
        os.environ[FRACTIONS[0]] = MOST
    if not debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # print fatal errors only
        os.environ.setdefault("TF_CPP_MAX_VLOG_LEVEL", "0")
        warnings.filterwarnings("ignore", category=RuntimeWarning)


def keep_compiled(folder: Path) -> None:
    """Make JAX keep compiled programs in `folder` between runs, and replace programs that it cannot read.

    If a process is killed or the disk is full, an incomplete file may remain. JAX would warn about the file at every
    start, and never write the program again.
    """
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.filterwarnings("always", message=BROKEN.pattern)
    warnings.showwarning = _drops_broken_entries(folder, warnings.showwarning)


def _drops_broken_entries(folder: Path, show: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `warnings.showwarning` so that JAX's warning about an unreadable program removes the program's files.

    JAX warns before it compiles the program again. Afterwards it writes the program if no such file exists.
    """

    def drop_or_show(message: Warning | str, *about: Any, **more: Any) -> None:
        if broken := BROKEN.match(str(message)):
            for entry in folder.glob(f"{glob.escape(broken[1])}-*"):
                entry.unlink(missing_ok=True)
        else:
            show(message, *about, **more)

    return drop_or_show


def is_large(config: Config) -> bool:
    """Return whether a model has more than `SMALL` weights, so that reading them takes most of the time of a step on a
    CPU.
    """
    from llamaspec.model.tensors import weight_count

    return weight_count(config) > SMALL


def keep_heaps_small(config: Config, *, platform: str) -> None:
    """Make the process return memory to the system when it frees a block, for a large model on a CPU.

    See `return_blocks_when_freed`.
    """
    if _counts_its_memory(config, platform):
        return_blocks_when_freed()


def give_back_compilers_memory(config: Config, *, platform: str) -> None:
    """Return the compiler's free memory to the system.

    For a large model on a CPU, also drop the compiler's code from memory.
    """
    return_freed_memory()
    if _counts_its_memory(config, platform):
        import jaxlib

        forget_code(Path(jaxlib.__file__).parent)


def _counts_its_memory(config: Config, platform: str) -> bool:
    """Return True for a large model on a CPU. There, we save memory at the cost of some milliseconds."""
    return platform == "cpu" and is_large(config)
