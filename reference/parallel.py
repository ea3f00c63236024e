r"""Sequence, pipeline and expert parallelism: who computes what on n devices, each equal to the computation of one.

A list holds one array a device. The functions between exchanges are those of one device, so each page shows only what
moves, by `reference.collectives`.

    sequence     x_i |> gather: x |> y_i = f_i(x) |> reduce-scatter: (sum_d y_d)_i       (Korthikanti et al., 2022)
    pipeline     x |> f_0 on device 0 |> f_1 on device 1 |> ..., a micro-batch a tick    (GPipe, Huang et al., 2019)
    experts      x_i |> to the device of the chosen expert |> f_e |> back                (GShard, Lepikhin et al., 2021)
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.collectives import all_gather, all_to_all, reduce_scatter

Part = Float[np.ndarray, "..."]
Compute = Callable[[Part], Part]


def sequence_parallel(x: Sequence[Part], partial: Sequence[Compute]) -> list[Part]:
    """Give each device its tokens of sum_d partial_d(x), where each holds its tokens of x [tokens, dim].

    `partial` are the partial sums of tensor parallel layers. An all-reduce would give every device all tokens; its
    second half, the all-gather, comes here before the next layer instead, and norms are computed once for each token.

    >>> double = lambda x: 2 * x
    >>> sequence_parallel([np.ones((1, 1)), np.zeros((1, 1))], [double, double])
    [array([[4.]]), array([[0.]])]
    """
    return reduce_scatter([f(whole) for f, whole in zip(partial, all_gather(x), strict=True)])


def pipeline(micro_batches: Sequence[Part], stages: Sequence[Compute]) -> tuple[list[Part], int]:
    """Send micro-batches through the stages, one on each device; returns results and ticks.

    In a tick every device that has a micro-batch computes, and sends the result to the next. The last of b leaves n
    stages after b + n - 1 ticks, so a share (n - 1) / (b + n - 1) of all devices' time is idle.

    >>> pipeline([np.array([1.0]), np.array([2.0])], [lambda x: x + 1, lambda x: 10 * x])
    ([array([20.]), array([30.])], 3)
    """
    ticks = len(micro_batches) + len(stages) - 1
    arrived: list[Part | None] = [None] * len(stages)  # at each device, at the beginning of a tick
    results: list[Part] = []
    for tick in range(ticks):
        arrived[0] = micro_batches[tick] if tick < len(micro_batches) else None
        sent = [None if x is None else stage(x) for stage, x in zip(stages, arrived, strict=True)]
        if sent[-1] is not None:
            results.append(sent[-1])
        arrived = [None, *sent[:-1]]
    return results, ticks


def expert_parallel(
    x: Sequence[Float[np.ndarray, "tokens dim"]],
    chosen: Sequence[Int[np.ndarray, " tokens"]],
    experts: Sequence[Compute],
) -> list[Float[np.ndarray, "tokens dim"]]:
    """Give each device's tokens what the expert says that each chose; device e holds expert e.

    An all-to-all has parts of one size, so each device sends as many rows to every expert as it has tokens: rows of
    others are zeros. Programs send fewer, and drop tokens beyond a capacity.

    >>> one, ten = (lambda x: x), (lambda x: 10 * x)
    >>> expert_parallel([np.ones((1, 1)), np.ones((1, 1))], [np.array([1]), np.array([0])], [one, ten])
    [array([[10.]]), array([[1.]])]
    """
    count, n = len(x[0]), len(experts)
    routed = [
        np.concatenate([tokens * (wanted == e)[:, None] for e in range(n)])
        for tokens, wanted in zip(x, chosen, strict=True)
    ]
    answered = [f(rows) for f, rows in zip(experts, all_to_all(routed), strict=True)]
    back = [rows.reshape(n, count, -1) for rows in all_to_all(answered)]  # [expert, token, dim]
    return [rows[wanted, np.arange(count)] for rows, wanted in zip(back, chosen, strict=True)]
