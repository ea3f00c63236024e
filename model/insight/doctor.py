"""A report on this machine: the installed packages, and how models run on it."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.model.checkpoints.checkpoint import Tensor
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.device import HOPPER, Device, default_device, free_bytes
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.llama import choose_dtype
from llamaspec.model.ops.choice import OpsChoice, ops_for
from llamaspec.model.ops.table import Ops
from llamaspec.model.options import choose_context
from llamaspec.model.running.memory import gigabytes
from llamaspec.model.running.programs import prompt_chunk
from llamaspec.model.system import nvidia_driver, processor, usable_cpus
from llamaspec.model.weights.loading import Progress, abstract_params, no_progress
from llamaspec.reference.config import Config

PACKAGES = (
    "llamaspec", "jax", "jaxlib", "numpy", "ml_dtypes", "jaxtyping", "sentencepiece", "protobuf", "tokenizers",
    "tiktoken", "safetensors", "regex", "jinja2", "click", "rich", "prompt_toolkit", "hypothesis",
)  # fmt: skip
TYPICAL = "llama-3.1-8b"  # a published shape that represents most models
H200 = Device("gpu", "NVIDIA H200", HOPPER)
BFLOAT16 = np.dtype(jnp.bfloat16)


def examine(*, progress: Progress = no_progress) -> dict[str, dict[str, str]]:
    """Report on this machine: its hardware, versions of packages, caches, missing packages, and whether models run.

    The report also lists the ops that have kernels, on this machine and on an H200.
    """
    device = default_device()
    versions = {name: _version(name) for name in PACKAGES}
    missing = _missing(versions, device)
    on_h200 = {}
    for done, name in enumerate(SHAPES):
        progress(f"choosing ops of {name}", done / len(SHAPES))
        on_h200[name] = _choice(SHAPES[name], H200)
    return {
        "this machine": _machine(device),
        "ops here": _ops(_choice(SHAPES[TYPICAL], device)),
        **({"plain in the built-in model": plain} if (plain := plain_ops("stories")) else {}),
        "ops on an H200": _ops(on_h200[TYPICAL]),
        "plain there": {name: ", ".join(choice.plain) for name, choice in on_h200.items() if choice.plain},
        "versions": {"python": platform.python_version(), **versions},
        "caches": {"compiled": jax.config.jax_compilation_cache_dir or "none: the cache folder cannot be written"},
        "missing": missing,
        "verdict": {"ready": _verdict(device, missing)},
    }


def plain_ops(model: str) -> dict[str, str]:
    """Return the ops of a model that have no kernel on this GPU, with the reasons. Returns {} on a CPU."""
    device = default_device()
    if device.platform == "cpu":
        return {}
    checkpoint = open_checkpoint(model)
    dtype = choose_dtype(None, checkpoint, platform=device.platform)
    return dict(_choice(checkpoint.config, device, dtype=dtype, tensors=checkpoint.tensors).plain)


def _machine(device: Device) -> dict[str, str]:
    """Describe processor, devices, driver and memory, and the default dtype of models."""
    by_default = "float32" if device.platform == "cpu" else "bfloat16, or float32 for models stored in float32"
    return {
        "processor": f"{len(usable_cpus())} x {processor()}",
        **{
            f"device {device_found.id}": f"{device_found.platform} {device_found.device_kind}"
            for device_found in jax.devices()
        },
        **({"driver": driver} if (driver := nvidia_driver()) else {}),
        **({"kernels": device.kernels} if device.platform == "gpu" else {}),
        "free memory": gigabytes(free_bytes()),
        "dtype": by_default,
    }


def _choice(
    config: Config,
    device: Device,
    *,
    dtype: np.dtype = BFLOAT16,
    tensors: Mapping[str, Tensor] | None = None,
) -> OpsChoice:
    """Choose the ops for one sequence of a model. Without `tensors`, its weights have the dtype `dtype`."""
    rows = choose_context(None, config.context) + prompt_chunk(config, device.platform)
    params = abstract_params(config, dtype=dtype, positions=rows, tensors=tensors)
    return ops_for("auto", config, params, batch=1, capacity=rows, cache_dtype=dtype, device=device)


def _ops(choice: OpsChoice) -> dict[str, str]:
    """Return "pallas" or "xla" for each op.

    Only attention has kernels for prompts; all other kernels are for decoding.
    """
    if not choice.kernels:
        return {"all": choice.name}
    prompts = {"attend": "pallas"}
    return {op: prompts.get(op, "pallas; xla for a prompt") if op in choice.kernels else "xla" for op in Ops._fields}


def _missing(versions: dict[str, str], device: Device) -> dict[str, str]:
    missing = {name: "not installed" for name, version in versions.items() if version == "not installed"}
    if device.platform == "cpu":
        missing["gpu"] = "JAX finds no GPU; everything runs on the CPU, more slowly"
    elif not device.has_kernels:
        missing["kernels"] = (
            f"they need a GPU of compute capability {HOPPER}; on this GPU everything runs with XLA, more slowly"
        )
    return missing


def _verdict(device: Device, missing: dict[str, str]) -> str:
    """Say in one sentence whether models run on this machine, and whether they use our kernels."""
    if packages := [name for name, reason in missing.items() if reason == "not installed"]:
        return f"install {', '.join(packages)}: some commands need them"
    if device.platform == "cpu":
        return "models run here on the CPU"
    return f"models run here on {device}, with {'kernels' if device.has_kernels else 'XLA'}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
