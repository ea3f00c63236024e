"""The share of a model that one device holds: its heads and its columns of the feed-forward layers.

Tensor parallelism (Megatron-LM, https://arxiv.org/abs/1909.08053) cuts matrices in pairs, such as v and o, or up and
down. It cuts the first matrix of a pair by rows and the second by columns, so that devices exchange nothing between the
two products. The logical axes of a weight in `model.tensors` decide which axis is cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from llamaspec.model.tensors import NAMES, Role, Weight, weights
from llamaspec.reference.config import Config

MOST = 64  # the largest number of devices that an error message suggests


class Cut(NamedTuple):
    """The part of a weight that a device holds: the indices from `start` to `stop` of `axis`, padded to `size`."""

    axis: int
    start: int
    stop: int
    size: int


def share(config: Config, devices: int) -> Config:
    """Make the configuration with which each of `devices` devices computes.

    If there are fewer kv heads than devices, several devices hold the same kv head. The output head is cut, so it is a
    separate array even if the model ties it to the embedding. Raises ValueError if `devices` cannot share the model.
    The message lists the numbers of devices that can share it.

    >>> config = Config(8, 1, 4, 2, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4)
    >>> share(config, 4).heads, share(config, 4).kv_heads, share(config, 4).ffn
    (1, 1, 2)
    >>> share(config, 3)
    Traceback (most recent call last):
    ValueError: 4 heads cannot be cut into 3 equal parts: this model runs on 1, 2 or 4 devices
    """
    if refusal := _refusal(config, devices):
        raise ValueError(f"{refusal}: this model runs on {_in_words(possible(config))}")
    if devices == 1:
        return config
    return replace(
        config,
        heads=config.heads // devices,
        kv_heads=max(1, config.kv_heads // devices),
        ffn=config.ffn // devices,
        shared_ffn=config.shared_ffn // devices,
        tied=False,
    )


def possible(config: Config) -> list[int]:
    """Return the numbers of devices up to 64 that can share a model."""
    return [devices for devices in range(1, MOST + 1) if not _refusal(config, devices)]


def _refusal(config: Config, devices: int) -> str | None:
    if devices < 1:
        return f"expected at least 1 device, got {devices}"
    for what, size in (
        ("heads", config.heads),
        ("columns of the feed-forward layers", config.ffn),
        ("columns of the shared expert", config.shared_ffn),
    ):
        if size % devices:
            return f"{size} {what} cannot be cut into {devices} equal parts"
    if config.kv_heads % devices and devices % config.kv_heads:
        return f"{config.kv_heads} kv heads cannot be shared evenly by {devices} devices"
    return None


def _in_words(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last} devices" if most else "one device only"


def cut_axis(weight: Weight) -> int | None:
    """Return the axis along which devices share a weight, or None if every device holds the complete weight."""
    shared = ("heads", "kv_heads", "each_head", "ffn", "shared", *(("vocab",) if weight.role is Role.HEAD else ()))
    return next((i for i, axis in enumerate(weight.axes) if axis in shared), None)


def weights_on(config: Config, *, device: int, devices: int) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of the complete model that device number `device` holds, completely or in part.

    A pair is the weight's name on the device, and the weight. Only norms of single heads have a different name on the
    device, because every device counts its heads from 0.
    """
    for weight in weights(config):
        if weight.head is None:
            yield weight.name, weight
            continue
        heads = config.kv_heads if weight.part == "head_k_norm" else config.heads
        number = weight.head - device * heads // devices
        if 0 <= number < max(1, heads // devices):
            yield weight._replace(head=number).named(NAMES), weight


def cut(weight: Weight, config: Config, *, device: int, devices: int) -> Cut | None:
    """Return the part of a weight that device number `device` holds, or None if it holds the complete weight.

    `config` describes the complete model. If the vocabulary cannot be cut into equal parts, the last part is padded.
    """
    axis = cut_axis(weight)
    if axis is None:
        return None
    length = weight.shape[axis]
    if weight.axes[axis] == "kv_heads":
        size = max(1, config.kv_heads // devices) * config.head_dim
        start = device * config.kv_heads // devices * config.head_dim
    else:
        size = -(-length // devices)
        start = device * size
    return Cut(axis, min(start, length), min(start + size, length), size)
