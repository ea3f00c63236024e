r"""Sequence, pipeline and expert parallelism on n devices. Each gives the same result as one device.

Lists have one array per device. Between two exchanges, a device computes ordinary layers, which other modules define.
So this module only shows the exchanges, which are collectives of `reference.collectives`. |> means "then", and x_i is
the part of x on device i.

    sequence     x_i |> gather: x |> y_i = f_i(x) |> reduce-scatter: (sum_d y_d)_i       (Korthikanti et al., 2022)
    pipeline     x |> f_0 on device 0 |> f_1 on device 1 |> ..., one micro-batch per tick (GPipe, Huang et al., 2019)
    experts      x_i |> to the device of the chosen expert |> f_e |> back                (GShard, Lepikhin et al., 2021)
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from llamaspec.reference.collectives import all_gather, all_to_all, reduce_scatter

Part = Float[np.ndarray, "..."]
Compute = Callable[[Part], Part]


def sequence_parallel(x: Sequence[Part], partial: Sequence[Compute]) -> list[Part]:
    """Compute sum_d partial_d(x) for x [tokens, dim]. Device i has some tokens, and gets the sums of these tokens.

    `partial[d]` computes the partial sum of a tensor parallel layer on device d. An all-reduce, i.e. a reduce-scatter
    and an all-gather, would give every device the sums of all tokens. Here the all-gather happens only before the next
    layer. So the norm between the layers is computed on one device per token.

    >>> double = lambda x: 2 * x
    >>> sequence_parallel([np.ones((1, 1)), np.zeros((1, 1))], [double, double])
    [array([[4.]]), array([[0.]])]
    """
    return reduce_scatter([f(gathered) for f, gathered in zip(partial, all_gather(x), strict=True)])


def pipeline(micro_batches: Sequence[Part], stages: Sequence[Compute]) -> tuple[list[Part], int]:
    """Send micro-batches through the stages, one stage per device. Returns the results and the number of ticks.

    In each tick, every device that has a micro-batch computes its stage, and sends the result to the next device. With
    n stages, b micro-batches take b + n - 1 ticks. So a device is idle for (n - 1) / (b + n - 1) of the time.

    >>> pipeline([np.array([1.0]), np.array([2.0])], [lambda x: x + 1, lambda x: 10 * x])
    ([array([20.]), array([30.])], 3)
    """
    ticks = len(micro_batches) + len(stages) - 1
    arrived: list[Part | None] = [None] * len(stages)  # the input of each device at the beginning of a tick
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
    """Send each token to its chosen expert and back. Device e has expert e.

    All parts of an all-to-all have the same size. So each device sends one row per token to every expert: the token, or
    zeros if the token chose a different expert. Real programs send fewer rows, and drop tokens beyond a capacity.

    >>> one, ten = (lambda x: x), (lambda x: 10 * x)
    >>> expert_parallel([np.ones((1, 1)), np.ones((1, 1))], [np.array([1]), np.array([0])], [one, ten])
    [array([[10.]]), array([[1.]])]
    """
    count, n = len(x[0]), len(experts)
    routed = [
        np.concatenate([tokens * (expert_of == e)[:, None] for e in range(n)])
        for tokens, expert_of in zip(x, chosen, strict=True)
    ]
    answered = [f(rows) for f, rows in zip(experts, all_to_all(routed), strict=True)]
    back = [rows.reshape(n, count, -1) for rows in all_to_all(answered)]  # [expert, token, dim]
    return [rows[expert_of, np.arange(count)] for rows, expert_of in zip(back, chosen, strict=True)]
