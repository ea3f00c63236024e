"""Replay files: small readable files with a draw, which gives the same inputs on every machine."""

import hashlib
import json
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.worker import LAYOUTS
from llamaspec.verify.contract import Arguments, Contract
from llamaspec.verify.draws.domain import narrowed, parsed
from llamaspec.verify.draws.draw import AGAIN, LAW, LAYOUT, OF_THE_CALL, Draw, Values

FORMAT = 1  # increased when a draw gives different inputs than before
LARGEST = 2**20  # bytes of a file


@dataclass(frozen=True)
class Replay:
    """Everything needed to repeat a call of a candidate exactly."""

    op: str
    candidate: str
    arrays: str
    dtype: str
    draw: Draw
    inputs: str  # digest of all arrays and numbers
    finding: str

    @property
    def file_name(self) -> str:
        """A file name that depends on the candidate, its array library and the inputs."""
        how = " ".join([str(self.draw.get(LAW)), *([self.draw[LAYOUT]] if LAYOUT in self.draw else [])])
        called = f"{self.candidate} {self.arrays} {self.dtype} {how} {self.inputs}"
        return f"verify-{self.op}-{hashlib.sha256(called.encode()).hexdigest()[:8]}.json"


def digest(contract: Contract, dtype: str, draw: Draw) -> str:
    """Compute a digest of the inputs of a draw, bit for bit."""
    arguments = _arguments(contract, dtype, draw)
    sha = hashlib.sha256()
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            sha.update(f"{name} {value.dtype.name} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            sha.update(f"{name} {value!r}".encode())
    return sha.hexdigest()


def _arguments(contract: Contract, dtype: str, draw: Draw) -> Arguments:
    drawn = {name: value for name, value in draw.items() if name not in OF_THE_CALL}
    return contract.arguments(precision=precision(dtype), **drawn)


def save(replay: Replay, folder: Path) -> Path:
    """Write `replay` into `folder`, creating it if needed, and return the path. Raises OSError."""
    versions = {"python": platform.python_version()}
    for package in ("llamaspec", "numpy", "jax", "torch", "cupy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    fields = {**vars(replay), "draw": {name: _plain(value) for name, value in replay.draw.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / replay.file_name
    path.write_text(json.dumps({"format": FORMAT, **fields, "versions": versions}, indent=2) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> Replay:
    """Read a replay. Raises ValueError if the file is not a replay, or has a different format."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a replay file") from None
    if len(text) > LARGEST:
        raise ValueError(f"{path} is not a replay file: it has more than {LARGEST} characters")
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError(f"{path}: expected a replay of format {FORMAT}, got {fields['format']}")
        names = ("op", "candidate", "arrays", "dtype", "inputs", "finding")
        draw = {name: _parse_value(value) for name, value in fields["draw"].items()}
        return Replay(draw=draw, **{name: str(fields[name]) for name in names})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a replay file") from None


def check(replay: Replay, contract: Contract, path: Path) -> None:
    """Raise ValueError if the contract cannot make the draw of a replay, or makes different inputs from it."""
    law = replay.draw.get(LAW)
    drawn = {name: value for name, value in replay.draw.items() if name not in OF_THE_CALL}
    if not contract.makes(drawn) or not (
        (law in (None, AGAIN) or law in {known.name for known in contract.laws})
        and replay.draw.get(LAYOUT) in (None, *LAYOUTS)
    ):
        raise ValueError(
            f"{path}: {contract.name} cannot draw the inputs of this file; a different version of llamaspec wrote it"
        )
    try:
        narrowed(contract, {name: (value,) for name, value in drawn.items() if not _large(contract, name, value)})
        inputs = digest(contract, replay.dtype, replay.draw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if inputs != replay.inputs:
        raise ValueError(
            f"{path}: the draw now gives different inputs; a different version of llamaspec wrote the file"
        )


def _large(contract: Contract, name: str, value: Any) -> bool:
    """Return whether `value` is one of the contract's large draws, which may exceed the limits of `--set`."""
    large = contract.large
    if (name in large.empty and value == 0) or (name in large.widest and value == large.widest[name]):
        return True
    return any(value in parsed(part).get(name, ()) for part in (large.sizes, large.beside, *large.closer.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, Values):
        return {"values": str(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _parse_value(value: Any) -> Any:
    if isinstance(value, dict):
        return Values.parse(value["values"])
    return tuple(_parse_value(item) for item in value) if isinstance(value, list) else value
