"""Chooses a table of ops for a model and a device before compilation, and explains why some ops run without kernels."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.cache import Pages
from llamaspec.model.device import HOPPER, Device, default_device
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config


class OpsChoice(NamedTuple):
    """A table of ops, and the reasons why some ops run without kernels."""

    name: str  # xla, cpu or pallas
    ops: Ops
    kernels: tuple[str, ...]  # names of the ops that run as kernels in at least one layer
    plain: Mapping[str, str]  # for each op that runs without a kernel in at least one layer: the reason


def ops_for(
    kernels: str,
    config: Config,
    params: Params,
    *,
    batch: int,
    capacity: int,
    cache_dtype: np.dtype,
    device: Device | None = None,
    pages: Pages | None = None,
) -> OpsChoice:
    """Choose the table of ops named `kernels`: xla, cpu, pallas, or auto for the best table on the device.

    `params` may come from `abstract_params`. `capacity` is the capacity of the cache's arrays, including the padding of
    a prompt's last chunk. `device` describes the device; None: the default device. `pages` has the sizes of a cache in
    pages; None: the cache has no pages. Raises ValueError for an unknown name. Raises ValueError for pallas if a kernel
    refuses the model.
    """
    device = device or default_device()
    check_kernels(kernels, device)
    if kernels == "pallas" or (kernels == "auto" and device.has_kernels):
        return _by_kernels(
            config,
            params,
            device,
            batch=batch,
            capacity=capacity,
            cache_dtype=cache_dtype,
            pages=pages,
            only=kernels != "auto",
        )
    if kernels == "auto":
        kernels = "cpu" if device.platform == "cpu" else "xla"
        reason = f"kernels need a GPU of compute capability {HOPPER}, but JAX found a {device.kind}"
    else:
        reason = f"{kernels} was requested"
    return OpsChoice(kernels, CPU if kernels == "cpu" else XLA, (), dict.fromkeys(Ops._fields, reason))


def check_kernels(kernels: str, device: Device) -> None:
    """Raise ValueError if `kernels` is not a name that `ops_for` accepts, or asks for kernels that cannot run.

    A process can compile kernels for one compute capability only.
    """
    if kernels not in ("auto", "xla", "cpu", "pallas"):
        raise ValueError(f"no kernels named {kernels}: choose auto, xla, cpu or pallas")
    if kernels == "pallas" and not device.has_kernels:
        raise ValueError(
            f"pallas kernels need a GPU of compute capability {HOPPER} (H100, H200), but JAX found a {device.kind}: "
            "choose auto, xla or cpu"
        )
    if kernels in ("auto", "pallas") and device.has_kernels and device.others:
        raise ValueError(
            f"this process has GPUs of compute capability {', '.join((str(device.capability), *device.others))}, and "
            "kernels can be compiled for one of these only: name GPUs of one kind in CUDA_VISIBLE_DEVICES"
        )


def _by_kernels(config: Config, params: Params, device: Device, *, only: bool, **sizes: Any) -> OpsChoice:
    from llamaspec.model.ops.gpu import KERNELS, PROMPT, pallas_ops  # here, since importing Pallas takes a second
    from llamaspec.pallas_kernels.parts.compat import Target, use_target

    with use_target(Target(card=device.card)):
        ops, reasons = pallas_ops(config, params, **sizes)
    refused = {name: reason for name, reason in reasons.items() if reason}
    choice = OpsChoice("pallas", ops, tuple(name for name in KERNELS if getattr(ops, name).accepted), refused)
    expected = (*KERNELS, PROMPT) if device.card.wgmma else KERNELS  # other ops never have a kernel
    if only and not refused.keys().isdisjoint(expected):
        raise ValueError(f"pallas kernels do not support this whole model ({describe(choice)}): choose auto or xla")
    return choice


def summarize(choice: OpsChoice) -> str:
    """Return a short phrase for the user that says how many ops run without a kernel.

    >>> summarize(OpsChoice("pallas", XLA, ("attend",), {"norm_qkv": "odd", "project_add": "odd"}))
    '2 of 3 ops run without a kernel: `llamaspec doctor` says why'
    >>> summarize(OpsChoice("pallas", XLA, ("attend",), {}))
    'all ops run as kernels'
    """
    ops = {*choice.kernels, *choice.plain}
    plain = f"{len(choice.plain)} of {len(ops)} ops run without a kernel: `llamaspec doctor` says why"
    return plain if choice.plain else "all ops run as kernels"


def describe(choice: OpsChoice) -> str:
    """Return a line for the user that says which ops run as kernels, and why the other ops run without a kernel.

    >>> describe(OpsChoice("cpu", CPU, (), dict.fromkeys(Ops._fields, "cpu was requested")))
    'kernels: none; without a kernel: all ops (cpu was requested)'
    >>> plain = {"norm_qkv": "odd", "project_add": "odd", "moe_add": "no kernel"}
    >>> describe(OpsChoice("pallas", XLA, ("attend",), plain))
    'kernels: attend; without a kernel: norm_qkv project_add (odd), moe_add (no kernel)'
    """
    names: dict[str, list[str]] = {}
    for name, reason in choice.plain.items():
        names.setdefault(reason, []).append(name)
    plain = [
        f"{'all ops' if len(group) == len(Ops._fields) else ' '.join(group)} ({reason})"
        for reason, group in names.items()
    ]
    line = f"kernels: {' '.join(choice.kernels) or 'none'}"
    return f"{line}; without a kernel: {', '.join(plain)}" if plain else line
