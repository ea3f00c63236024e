"""Replay files: a draw, small enough to read and to send, exact enough to find the same inputs anywhere."""

import hashlib
import json
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.contract import Arguments, Contract
from llamaspec.verify.draws.domain import narrowed, parsed
from llamaspec.verify.draws.draw import AGAIN, LAW, Draw, Values

FORMAT = 1  # raised when a draw stands for other inputs than before
LARGEST = 2**20  # bytes of a file


@dataclass(frozen=True)
class Replay:
    """Everything that is needed to call a candidate once more exactly as it was called."""

    op: str
    candidate: str
    arrays: str
    dtype: str
    draw: Draw
    inputs: str  # digest of all arrays and numbers
    finding: str

    @property
    def file_name(self) -> str:
        """A name that another candidate, or the same with other arrays, does not get for the same inputs."""
        called = f"{self.candidate} {self.arrays} {self.dtype} {self.draw.get(LAW)} {self.inputs}"
        return f"verify-{self.op}-{hashlib.sha256(called.encode()).hexdigest()[:8]}.json"


def digest(contract: Contract, dtype: str, draw: Draw) -> str:
    """A name for the inputs that a draw stands for, bit for bit."""
    arguments = _arguments(contract, dtype, draw)
    sha = hashlib.sha256()
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            sha.update(f"{name} {value.dtype.name} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            sha.update(f"{name} {value!r}".encode())
    return sha.hexdigest()


def _arguments(contract: Contract, dtype: str, draw: Draw) -> Arguments:
    drawn = {name: value for name, value in draw.items() if name != LAW}
    return contract.arguments(precision=precision(dtype), **drawn)


def save(replay: Replay, folder: Path) -> Path:
    """Write `replay` into `folder`, which is made if need be, and return its path there. Raises OSError."""
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
    """Read a replay. Raises ValueError for a file that is none, or of a format that stands for other inputs."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no replay file") from None
    if len(text) > LARGEST:
        raise ValueError(f"{path} is no replay file: it has more than {LARGEST} characters")
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError(f"{path}: a replay of format {fields['format']}, where this version has {FORMAT}")
        names = ("op", "candidate", "arrays", "dtype", "inputs", "finding")
        draw = {name: _drawn(value) for name, value in fields["draw"].items()}
        return Replay(draw=draw, **{name: str(fields[name]) for name in names})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is no replay file") from None


def check(replay: Replay, contract: Contract, path: Path) -> None:
    """Raise ValueError where the draw of a replay is none of its contract, or stands for other inputs than it did."""
    law = replay.draw.get(LAW)
    drawn = {name: value for name, value in replay.draw.items() if name != LAW}
    if set(drawn) != set(contract.draws) or not (
        law in (None, AGAIN) or law in {known.name for known in contract.laws}
    ):
        raise ValueError(f"{path}: its draw is none of {contract.name}; it was made by another version")
    try:
        narrowed(contract, {name: (value,) for name, value in drawn.items() if not _large(contract, name, value)})
        inputs = digest(contract, replay.dtype, replay.draw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if inputs != replay.inputs:
        raise ValueError(f"{path}: its draw no longer stands for the same inputs; it was made by another version")


def _large(contract: Contract, name: str, value: Any) -> bool:
    """Whether the large draws of a contract have `value`: a list of them may be longer than a person may type."""
    large = contract.large
    return any(value in parsed(part).get(name, ()) for part in (large.sizes, large.beside, *large.closer.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, Values):
        return {"values": str(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _drawn(value: Any) -> Any:
    if isinstance(value, dict):
        return Values.parse(value["values"])
    return tuple(_drawn(item) for item in value) if isinstance(value, list) else value
