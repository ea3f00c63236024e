"""Settings of the whole process. Only commands change them; the library leaves its caller's process as it is.

Importing this module imports neither NumPy nor JAX, so that a command can prepare its process first.
"""

from __future__ import annotations

import glob
import math
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
# The share of a GPU's memory that JAX may take. By default that is 0.75 if JAX takes memory on demand. CUDA's
# context, code and graphs need some of the rest.
MOST = "0.92"
SMALL = 1 << 28  # number of weights; with this many, a CPU reads a chunk of a prompt in a quarter of a second
BROKEN = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'")


def prepare_process(*, debug: bool = False) -> None:
    """Have JAX take a GPU's memory on demand, and keep XLA's messages and NumPy's warnings off stderr unless `debug`.

    NumPy warns about numbers that are not finite. We check such numbers ourselves, and refuse them in one line.

    Importing JAX sets a log level, so a command must call this function before it imports JAX. Variables that the user
    has set win; an empty variable for memory counts as not set. If the user lets JAX take memory at the start, JAX
    takes its default share.
    """
    os.environ[AHEAD] = os.environ.get(AHEAD) or ON_DEMAND[0]
    if os.environ[AHEAD] in ON_DEMAND and not any(map(os.environ.get, FRACTIONS)):
        os.environ[FRACTIONS[0]] = MOST
    if not debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # fatal errors only
        os.environ.setdefault("TF_CPP_MAX_VLOG_LEVEL", "0")
        warnings.filterwarnings("ignore", category=RuntimeWarning)


def keep_compiled(folder: Path) -> None:
    """Have JAX keep compiled programs in `folder` between runs, and replace programs that cannot be read.

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

    JAX warns before it compiles the program again, and afterwards writes the program if no such file exists.
    """

    def drop_or_show(message: Warning | str, *about: Any, **more: Any) -> None:
        if broken := BROKEN.match(str(message)):
            for entry in folder.glob(f"{glob.escape(broken[1])}-*"):
                entry.unlink(missing_ok=True)
        else:
            show(message, *about, **more)

    return drop_or_show


def is_large(config: Config) -> bool:
    """Whether a model has more than `SMALL` weights, so that reading them takes a CPU most of a step's time."""
    from llamaspec.model.tensors import tensor_shapes

    return sum(math.prod(shape) for shape in tensor_shapes(config).values()) > SMALL


def keep_heaps_small(config: Config, *, platform: str) -> None:
    """Return blocks as they are freed, for a large model on a CPU: see `return_blocks_when_freed`."""
    if _counts_its_memory(config, platform):
        return_blocks_when_freed()


def give_back_compilers_memory(config: Config, *, platform: str) -> None:
    """Return the compiler's memory to the system; for a large model on a CPU, also the memory of its code."""
    return_freed_memory()
    if _counts_its_memory(config, platform):
        import jaxlib

        forget_code(Path(jaxlib.__file__).parent)


def _counts_its_memory(config: Config, platform: str) -> bool:
    """Whether to save memory at the price of some milliseconds: for a large model on a CPU."""
    return platform == "cpu" and is_large(config)
