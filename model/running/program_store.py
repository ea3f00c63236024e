"""Compiled programs on disk. They are found without tracing, so a second start does not trace or lower them.

JAX's own cache looks up a program by its lowered form. Tracing and lowering take a second on a CPU, and several seconds
with the kernels of a GPU. This store looks up a program by everything that its lowered form depends on: our source, the
versions of JAX and of the device's software, the settings of JAX and XLA, the shapes of the arguments, and the choice
of ops.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from llamaspec.model.system import instructions, usable_cpus

SOURCES = ("model", "pallas_kernels", "reference")  # packages that decide what a program computes
SERVING_SOURCES = (*SOURCES, "serving")  # packages that decide what a program of the server computes
ENVIRONMENT = ("XLA_", "MOSAIC_", "NVIDIA_", "CUDA_")  # prefixes of environment variables that may change a program
NO_EFFECT = re.compile("cache|_log|debug|transfer_guard|traceback")  # matches settings without an effect on programs
DIGEST = 32  # bytes of a SHA-256
MOST = 64  # largest number of files; beyond it we remove the least recently used file
SUFFIX = ".program"


class ProgramStore(NamedTuple):
    """The stored programs of one model in one layout. Programs of other models may be in the same folder."""

    folder: Path
    about: str  # everything that the programs depend on

    def load(self, name: str, arguments: Any, results: Any) -> Compiled | None:
        """Load the program `name`. Returns None if there is no file, or if the file cannot be used.

        `arguments` is a tuple of pytrees with the structure of the program's arguments. `results` has the structure of
        its results.
        """
        path = self._path(name)
        try:
            stored = path.read_bytes()
            digest, program = stored[:DIGEST], stored[DIGEST:]
            if hashlib.sha256(program).digest() != digest:
                raise ValueError("the stored program is damaged or incomplete")
            trees = jax.tree.structure((arguments, {})), jax.tree.structure(results)
            device = jax.devices()[0]
            loaded = serialize_executable.deserialize_and_load(
                program, *trees, backend=device.client, execution_devices=[device]
            )
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception:  # a file from another machine, or an incomplete file, may fail in any way
            _remove(path)
            return None
        return loaded

    def has(self, name: str) -> bool:
        """Return whether there is a file for the program `name`."""
        return self._path(name).exists()

    def compile(self, name: str, lower: Callable[[str], Lowered], options: dict[str, Any]) -> Callable[[], Compiled]:
        """Lower the program `name` now. The returned function compiles and stores it.

        `lower` gets a unique name, so that JAX's cache cannot contain the program: on a CPU, XLA cannot store a program
        that was loaded from a cache.
        """
        unique = f"{name}_{secrets.token_hex(8)}"
        lowered = lower(unique)

        def finish() -> Compiled:
            compiled = lowered.compile(options)
            self._store(name, compiled)
            _forget(unique)
            return compiled

        return finish

    def _store(self, name: str, compiled: Compiled) -> None:
        """Write a program to a file. Writes nothing if the device cannot store programs, or if the disk is full."""
        path = self._path(name)
        staged = path.with_suffix(f".{secrets.token_hex(4)}.partial")
        try:
            program = serialize_executable.serialize(compiled)[0]
            self.folder.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(hashlib.sha256(program).digest() + program)
            staged.replace(path)
            _remove_oldest(self.folder)
        except Exception:
            _remove(staged)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-{hashlib.sha256(f'{name} {self.about}'.encode()).hexdigest()}{SUFFIX}"


def facts(*about: object, sources: tuple[str, ...] = SOURCES) -> str:
    """Return a string with everything that a program depends on: our source, versions, settings, the device, and
    `about`.
    """
    device = jax.devices()[0]
    # We prefer attributes, because they have the values of this thread, but some settings of JAX have no attribute.
    values = [item for item in sorted(jax.config.values.items()) if not NO_EFFECT.search(item[0])]
    settings = {name: getattr(jax.config, name, value) for name, value in values}
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)}
    machine = (device.platform, device.device_kind, device.client.platform_version, len(jax.devices()))
    host = (len(usable_cpus()), instructions()) if device.platform == "cpu" else ()
    return repr((jax.__version__, version("jaxlib"), machine, host, settings, environment, _source(sources), about))


def _source(packages: tuple[str, ...]) -> str:
    """Compute a digest of the source of these packages, and of the tables with the kernels' tile sizes."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in packages:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".json"):
                text = path.read_bytes()
                digest.update(f"{path.relative_to(root)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _forget(name: str) -> None:
    """Remove a program with a unique name from JAX's cache, because no program will have this name again."""
    if folder := jax.config.jax_compilation_cache_dir:
        for entry in Path(folder).glob(f"jit_{name}-*"):
            _remove(entry)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _remove_oldest(folder: Path) -> None:
    # Another process may remove files at the same time.
    used = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            used.append((path.stat().st_mtime, path))
    files = [path for _, path in sorted(used, reverse=True)]
    for path in files[MOST:]:
        _remove(path)
