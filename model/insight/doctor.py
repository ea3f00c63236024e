"""What is installed on this machine, and what would run on it."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.checkpoints.codes import form_of
from model.insight.shapes import SHAPES
from model.ops.block import CPU, XLA, Ops
from model.ops.gpu import KERNELS, PALLAS, QUANTIZED, refusals
from model.options import choose_context
from model.running.device import free_bytes
from model.running.jax_backend import choose_ops
from model.running.memory import gigabytes
from model.running.programs import prompt_chunk
from model.weights.params import abstract_params
from reference.quantizers.schemes import SCHEMES

PACKAGES = (
    "llamaspec", "jax", "jaxlib", "numpy", "ml_dtypes", "jaxtyping", "sentencepiece", "protobuf", "tokenizers",
    "tiktoken", "safetensors", "regex", "jinja2", "click", "rich", "prompt_toolkit", "hypothesis",
)  # fmt: skip


def examine() -> dict[str, dict[str, Any]]:
    """Versions, devices, the table of ops that would run, caches, and what is missing."""
    tables = {CPU: "cpu", XLA: "xla", PALLAS: "pallas"}
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "devices": {str(device.id): f"{device.platform} {device.device_kind}" for device in jax.devices()},
        "memory": {"free": gigabytes(free_bytes())},
        "ops": _table(tables[choose_ops("auto")]),
        "ops on an H200": _table("pallas"),
        "weights there": {name: "pallas" if form_of(name) in QUANTIZED else "xla" for name in SCHEMES},
        "plain there": _plain_shapes(),
        "caches": {"compiled": jax.config.jax_compilation_cache_dir or "none: nothing can be written"},
        "missing": _missing(versions),
    }


def _table(name: str) -> dict[str, str]:
    """Which form of each op runs. The kernels of `pallas` are for decoding, but for attention's, which is for both."""
    if name != "pallas":
        return dict.fromkeys(Ops._fields, name)
    forms = {op: "pallas" if op == "attend" else "pallas; xla for a prompt" for op in KERNELS}
    return {op: forms.get(op, "xla") for op in Ops._fields}


def _plain_shapes() -> dict[str, str]:
    """Of the published shapes in bfloat16, those for which some kernel is not made, and the ops that XLA runs."""
    found = {}
    for name, config in SHAPES.items():
        rows = choose_context(None, config.context) + prompt_chunk(config, "gpu")
        params = abstract_params(config, dtype=np.dtype(jnp.bfloat16), positions=rows)
        reasons = refusals(config, params, capacity=rows)
        if plain := [op for op, reason in reasons.items() if reason]:
            found[name] = ", ".join(plain)
    return found


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
