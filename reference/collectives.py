r"""Collectives: the arrays of n devices before and after an exchange, and the cost of the exchange.

A collective takes a list with one array per device, and returns such a list. a_d is the array of device d, and
a_d[0] ... a_d[n - 1] are its n equal parts:

    all-reduce        every device gets  sum_d a_d
    reduce-scatter    device i gets      sum_d a_d[i]
    all-gather        every device gets  a_0, a_1, ... in a row
    broadcast         every device gets  a_root
    all-to-all        device i gets      a_0[i], a_1[i], ... in a row

An all-reduce is a reduce-scatter followed by an all-gather. Data parallel training all-reduces gradients. FSDP gathers
weights and reduce-scatters their gradients. Tensor parallel layers all-reduce partial products. Experts on several
devices exchange tokens by an all-to-all.

The functions from `all_reduce` to `all_to_all` are these definitions, with sums in float64. The functions for a ring
and a tree model the messages of a real network: each device sends one message per step, in the dtype of the arrays.
They show the number of steps, the bytes, and the order of the sums. A message takes alpha seconds plus beta seconds per
byte (Hockney, 1994). For arrays of m bytes:

    ring all-reduce     2 (n - 1) steps, each m / n bytes       2 (n - 1) (alpha + beta m / n)
    tree all-reduce     2 ceil(log2 n) steps, each m bytes      2 ceil(log2 n) (alpha + beta m)
    one-shot            one step, each device reads all arrays  alpha + (n - 1) beta m

The ring sends the minimum number of bytes per device, 2 (n - 1) / n of m (Patarasuk & Yuan, 2009), so it wins for
large arrays. When a single token is decoded, the vectors are so small that alpha dominates, and fewer steps win.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Shaped

Arrays = Sequence[Shaped[np.ndarray, "..."]]  # one array per device


def all_reduce(arrays: Arrays) -> list[Float64[np.ndarray, "..."]]:
    """Give every device the sum of all arrays.

    >>> all_reduce([np.array([1.0]), np.array([2.0])])
    [array([3.]), array([3.])]
    """
    return [_sum(arrays) for _ in arrays]


def reduce_scatter(arrays: Arrays) -> list[Float64[np.ndarray, "..."]]:
    """Give device i part i of the sum of all arrays. The first axis is a multiple of the number of devices.

    >>> reduce_scatter([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    [array([11.]), array([22.])]
    """
    return np.split(_sum(arrays), len(arrays))


def all_gather(arrays: Arrays) -> list[Shaped[np.ndarray, "..."]]:
    """Give every device all arrays, concatenated in the order of the devices.

    >>> all_gather([np.array([1]), np.array([2])])
    [array([1, 2]), array([1, 2])]
    """
    return [np.concatenate(arrays) for _ in arrays]


def broadcast(arrays: Arrays, *, root: int) -> list[Shaped[np.ndarray, "..."]]:
    """Give every device the array of the device `root`.

    >>> broadcast([np.array([1]), np.array([2])], root=1)
    [array([2]), array([2])]
    """
    return [arrays[root].copy() for _ in arrays]


def all_to_all(arrays: Arrays) -> list[Shaped[np.ndarray, "..."]]:
    """Move part i of device d to device i, where it becomes part d: a transpose of devices and parts.

    >>> all_to_all([np.array([1, 2]), np.array([3, 4])])
    [array([1, 3]), array([2, 4])]
    """
    parts = [np.split(a, len(arrays)) for a in arrays]
    return [np.concatenate([split[i] for split in parts]) for i in range(len(arrays))]


class Exchange(NamedTuple):
    """The result of a collective: an array per device, the number of steps, and the most bytes that a device sent."""

    arrays: list[np.ndarray]
    steps: int  # sequential messages
    sent: int  # bytes from the device that sent the most


def ring_reduce_scatter(arrays: Arrays) -> Exchange:
    """Compute `reduce_scatter` in n - 1 steps.

    In each step, every device adds its part to the sum from its left neighbor, and sends the result to the right.

    Part i is summed in the order of devices i + 1, i + 2, ..., i. The order differs between parts, but it is the same
    in every run, so every run gives the same bits. Sums are rounded to the dtype of the arrays.

    >>> ring_reduce_scatter([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    Exchange(arrays=[array([11.]), array([22.])], steps=1, sent=8)
    """
    n, dtype = len(arrays), arrays[0].dtype
    parts = [list(np.split(a, n)) for a in arrays]
    sent = 0
    for step in range(n - 1):
        messages = [parts[device][(device - step - 1) % n] for device in range(n)]
        sent += messages[0].nbytes
        for device in range(n):
            part = (device - step - 2) % n  # the part that the left neighbor just sent
            parts[device][part] = (parts[device][part] + messages[device - 1]).astype(dtype)
    return Exchange([parts[device][device] for device in range(n)], n - 1, sent)


def ring_all_gather(arrays: Arrays) -> Exchange:
    """Compute `all_gather` in n - 1 steps: each device first sends its own array, then forwards what it receives.

    >>> ring_all_gather([np.array([1]), np.array([2])])
    Exchange(arrays=[array([1, 2]), array([1, 2])], steps=1, sent=8)
    """
    n = len(arrays)
    known = [{device: a} for device, a in enumerate(arrays)]
    sent = 0
    for step in range(n - 1):
        messages = [((device - step) % n, known[device][(device - step) % n]) for device in range(n)]
        sent += max(array.nbytes for _, array in messages)
        for device in range(n):
            origin, array = messages[device - 1]
            known[device][origin] = array
    return Exchange([np.concatenate([known[device][i] for i in range(n)]) for device in range(n)], n - 1, sent)


def ring_all_reduce(arrays: Arrays) -> Exchange:
    """Compute `all_reduce` by `ring_reduce_scatter` and then `ring_all_gather`. All devices get the same bits.

    >>> ring_all_reduce([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    Exchange(arrays=[array([11., 22.]), array([11., 22.])], steps=2, sent=16)
    """
    scattered = ring_reduce_scatter(arrays)
    gathered = ring_all_gather(scattered.arrays)
    return Exchange(gathered.arrays, scattered.steps + gathered.steps, scattered.sent + gathered.sent)


def tree_all_reduce(arrays: Arrays) -> Exchange:
    """Compute `all_reduce` along a binomial tree. Sums move to device 0 in ceil(log2 n) steps; the total moves back.

    In step s = 0, 1, ... on the way to device 0, the devices d = 2^s, 3 2^s, 5 2^s, ... send their sums to device
    d - 2^s. On the way back, device 0 sends the total in every step.

    >>> tree_all_reduce([np.array([1.0]), np.array([2.0]), np.array([3.0])])
    Exchange(arrays=[array([6.]), array([6.]), array([6.])], steps=4, sent=16)
    """
    n, dtype = len(arrays), arrays[0].dtype
    levels = math.ceil(math.log2(n))
    sums = [a.copy() for a in arrays]
    for level in range(levels):
        for device in range(0, n - (1 << level), 2 << level):
            sums[device] = (sums[device] + sums[device + (1 << level)]).astype(dtype)
    total = sums[0]
    return Exchange([total.copy() for _ in arrays], 2 * levels, levels * total.nbytes)


def ring_seconds(devices: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds for a ring all-reduce of `size` bytes, with `alpha` seconds per message and `beta` per byte.

    >>> round(ring_seconds(8, 32768.0, alpha=1e-6, beta=1 / 370e9) * 1e6, 1)  # microseconds; 14 of them are alpha
    14.2
    """
    return 2 * (devices - 1) * (alpha + size / devices * beta)


def tree_seconds(devices: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds of a tree all-reduce, with the arguments of `ring_seconds`.

    >>> round(tree_seconds(8, 32768.0, alpha=1e-6, beta=1 / 370e9) * 1e6, 1)
    6.5
    """
    return 2 * math.ceil(math.log2(devices)) * (alpha + size * beta)


def one_shot_seconds(devices: int, size: float, *, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce in which every device reads all arrays, with the arguments of `ring_seconds`.

    >>> round(one_shot_seconds(8, 32768.0, alpha=1e-6, beta=1 / 370e9) * 1e6, 1)
    1.6
    """
    return alpha + (devices - 1) * size * beta


def _sum(arrays: Arrays) -> np.ndarray:
    return np.sum([a.astype(np.float64) for a in arrays], axis=0)
