r"""Collectives: what n devices hold before and after they exchange arrays, and what the exchange costs.

A collective takes a list, one array a device, and returns one. With a_d the array of device d, cut into n equal
parts a_d[0] ... a_d[n - 1] where parts are named:

    all-reduce        every device gets  sum_d a_d
    reduce-scatter    device i gets      sum_d a_d[i]
    all-gather        every device gets  a_0, a_1, ... in a row
    broadcast         every device gets  a_root
    all-to-all        device i gets      a_0[i], a_1[i], ... in a row

An all-reduce is a reduce-scatter followed by an all-gather. Data parallel training sums gradients by an all-reduce;
FSDP gathers weights and reduce-scatters their gradients; tensor parallel layers all-reduce partial products; experts
on several devices exchange tokens by an all-to-all.

The sums above are the definition, in float64. The ring and the tree below send what a network sends, one message a
device and step, in the dtype of the arrays: they show the number of steps, the bytes, and the order of the sums. With
alpha seconds a message and beta seconds a byte (Hockney, 1994), for arrays of m bytes:

    ring all-reduce     2 (n - 1) steps, each m / n bytes       2 (n - 1) (alpha + beta m / n)
    tree all-reduce     2 ceil(log2 n) steps, each m bytes      2 ceil(log2 n) (alpha + beta m)
    one-shot            one step, everyone reads everyone's     alpha + (n - 1) beta m

The ring moves the fewest bytes a device can, 2 (n - 1) / n of m (Patarasuk & Yuan, 2009), so it wins for large arrays.
The vector that decoding one token sums is so small that alpha is nearly all of its time, and fewer steps win.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Shaped

Held = Sequence[Shaped[np.ndarray, "..."]]  # one array a device


def all_reduce(held: Held) -> list[Float64[np.ndarray, "..."]]:
    """Give every device the sum of all arrays.

    >>> all_reduce([np.array([1.0]), np.array([2.0])])
    [array([3.]), array([3.])]
    """
    return [_sum(held) for _ in held]


def reduce_scatter(held: Held) -> list[Float64[np.ndarray, "..."]]:
    """Give device i part i of the sum of all arrays, whose first axis is a multiple of the number of devices.

    >>> reduce_scatter([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    [array([11.]), array([22.])]
    """
    return np.split(_sum(held), len(held))


def all_gather(held: Held) -> list[Shaped[np.ndarray, "..."]]:
    """Give every device all arrays, in the order of the devices, joined along the first axis.

    >>> all_gather([np.array([1]), np.array([2])])
    [array([1, 2]), array([1, 2])]
    """
    return [np.concatenate(held) for _ in held]


def broadcast(held: Held, *, root: int) -> list[Shaped[np.ndarray, "..."]]:
    """Give every device the array of `root`.

    >>> broadcast([np.array([1]), np.array([2])], root=1)
    [array([2]), array([2])]
    """
    return [held[root].copy() for _ in held]


def all_to_all(held: Held) -> list[Shaped[np.ndarray, "..."]]:
    """Give part i of device d's array to device i, as its part d: a transpose of devices and parts.

    >>> all_to_all([np.array([1, 2]), np.array([3, 4])])
    [array([1, 3]), array([2, 4])]
    """
    parts = [np.split(a, len(held)) for a in held]
    return [np.concatenate([mine[i] for mine in parts]) for i in range(len(held))]


class Exchange(NamedTuple):
    """Arrays after a collective, and what it took."""

    held: list[np.ndarray]
    steps: int  # messages one after the other
    sent: int  # bytes, by the device that sent the most


def ring_reduce_scatter(held: Held) -> Exchange:
    """`reduce_scatter` in n - 1 steps: each device adds what its left neighbor sent, and sends it on.

    Part i is summed in the order of devices i + 1, i + 2, ..., i: another order for each part, but the same order in
    every run, so the result has the same bits each time. Sums are rounded to the dtype of the arrays.

    >>> ring_reduce_scatter([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    Exchange(held=[array([11.]), array([22.])], steps=1, sent=8)
    """
    n, dtype = len(held), held[0].dtype
    parts = [list(np.split(a, n)) for a in held]
    sent = 0
    for step in range(n - 1):
        messages = [parts[device][(device - step - 1) % n] for device in range(n)]
        sent += messages[0].nbytes
        for device in range(n):
            part = (device - step - 2) % n  # the part that the left neighbor has just sent
            parts[device][part] = (parts[device][part] + messages[device - 1]).astype(dtype)
    return Exchange([parts[device][device] for device in range(n)], n - 1, sent)


def ring_all_gather(held: Held) -> Exchange:
    """`all_gather` in n - 1 steps: each device sends on what it got in the step before, at first its own array.

    >>> ring_all_gather([np.array([1]), np.array([2])])
    Exchange(held=[array([1, 2]), array([1, 2])], steps=1, sent=8)
    """
    n = len(held)
    known = [{device: a} for device, a in enumerate(held)]
    sent = 0
    for step in range(n - 1):
        messages = [((device - step) % n, known[device][(device - step) % n]) for device in range(n)]
        sent += max(array.nbytes for _, array in messages)
        for device in range(n):
            origin, array = messages[device - 1]
            known[device][origin] = array
    return Exchange([np.concatenate([known[device][i] for i in range(n)]) for device in range(n)], n - 1, sent)


def ring_all_reduce(held: Held) -> Exchange:
    """`all_reduce` as `ring_reduce_scatter`, then `ring_all_gather`. All devices end with the same bits.

    >>> ring_all_reduce([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    Exchange(held=[array([11., 22.]), array([11., 22.])], steps=2, sent=16)
    """
    scattered = ring_reduce_scatter(held)
    gathered = ring_all_gather(scattered.held)
    return Exchange(gathered.held, scattered.steps + gathered.steps, scattered.sent + gathered.sent)


def tree_all_reduce(held: Held) -> Exchange:
    """`all_reduce` along a binomial tree: sums go up to device 0 in ceil(log2 n) steps, and the total comes down again.

    In step s of the way up, each device whose number is an odd multiple of 2^s sends its sum to the one 2^s below.
    Device 0 sends the total in every step of the way down.

    >>> tree_all_reduce([np.array([1.0]), np.array([2.0]), np.array([3.0])])
    Exchange(held=[array([6.]), array([6.]), array([6.])], steps=4, sent=16)
    """
    n, dtype = len(held), held[0].dtype
    levels = math.ceil(math.log2(n))
    sums = [a.copy() for a in held]
    for level in range(levels):
        for device in range(0, n - (1 << level), 2 << level):
            sums[device] = (sums[device] + sums[device + (1 << level)]).astype(dtype)
    total = sums[0]
    return Exchange([total.copy() for _ in held], 2 * levels, levels * total.nbytes)


def ring_seconds(devices: int, size: float, *, alpha: float, beta: float) -> float:
    """The time of a ring's all-reduce of `size` bytes, at `alpha` seconds a message and `beta` seconds a byte.

    >>> round(ring_seconds(8, 32768.0, alpha=1e-6, beta=1 / 370e9) * 1e6, 1)  # microseconds; 14 of them are alpha
    14.2
    """
    return 2 * (devices - 1) * (alpha + size / devices * beta)


def tree_seconds(devices: int, size: float, *, alpha: float, beta: float) -> float:
    """The time of a tree's all-reduce, as `ring_seconds`.

    >>> round(tree_seconds(8, 32768.0, alpha=1e-6, beta=1 / 370e9) * 1e6, 1)
    6.5
    """
    return 2 * math.ceil(math.log2(devices)) * (alpha + size * beta)


def one_shot_seconds(devices: int, size: float, *, alpha: float, beta: float) -> float:
    """The time of an all-reduce in which every device reads the arrays of all others, as `ring_seconds`.

    >>> round(one_shot_seconds(8, 32768.0, alpha=1e-6, beta=1 / 370e9) * 1e6, 1)
    1.6
    """
    return alpha + (devices - 1) * size * beta


def _sum(held: Held) -> np.ndarray:
    return np.sum([a.astype(np.float64) for a in held], axis=0)
