"""What is installed on this machine, and what would run on it."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from model.jax_backend import choose_ops
from model.memory import device_bytes, gigabytes
from model.ops import CPU, XLA

PACKAGES = (
    "llamaspec", "jax", "jaxlib", "numpy", "ml_dtypes", "jaxtyping", "sentencepiece", "protobuf", "tokenizers",
    "tiktoken", "safetensors", "regex", "jinja2", "click", "rich", "prompt_toolkit", "hypothesis",
)  # fmt: skip


def examine() -> dict[str, dict[str, Any]]:
    """Versions, devices, the table of ops that would run, caches, and what is missing."""
    tables = {CPU: "cpu", XLA: "xla"}
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "devices": {str(device.id): f"{device.platform} {device.device_kind}" for device in jax.devices()},
        "memory": {"free": gigabytes(device_bytes())},
        "ops": dict.fromkeys(CPU._fields, tables[choose_ops("auto")]),
        "caches": {"compiled": jax.config.jax_compilation_cache_dir or "none: nothing can be written"},
        "missing": _missing(versions),
    }


def _missing(versions: dict[str, str]) -> dict[str, str]:
    missing = {name: "not installed" for name, found in versions.items() if found == "not installed"}
    if jax.default_backend() == "cpu":
        missing["gpu"] = "none that JAX can use; a CPU runs everything, slower"
    return missing


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
