"""Tensor parallelism: turns a table of ops into a table for devices that each compute with a share of the weights.

Inside `jax.shard_map`, the code of `model.forward` computes on each device's heads and columns. The configuration is
from `share`, and the weights are cut as `layouts` says. Two sums per block join the devices:

    norm_qkv, attend, norm_gate_up        each device has its own rows of q, k, v, gate and up, and its own heads; only
                                          a norm over all heads (OLMo 2) takes the mean square over all devices
    project_add, down_add, moe_add        partial sums are added over devices; then bias and residual; then one rounding
    norm_logits                           each device computes its part of the vocabulary, and the parts are gathered

Partial sums leave a device in float32 and are added in float32, so the bounds of `verify.bounds.running_error` hold
unchanged: the bound of a product allows any order of summation, and a sum over devices is one such order. An expert's
bias is weighted and added after the sum. That takes no more roundings than adding the bias before the expert's output
is weighted.
"""

from collections.abc import Callable
from functools import partial

from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

AXIS = "devices"


def tensor_parallel(ops: Ops) -> Ops:
    """Make the table of ops of one device from the table `ops`, which computes on the device's share."""
    return ops._replace(
        norm_qkv=partial(ops.norm_qkv, mean=mean),
        project_add=partial(ops.project_add, total=total),
        down_add=partial(ops.down_add, total=total),
        moe_add=partial(ops.moe_add, total=total),
        norm_logits=gathered_logits(ops.norm_logits),
    )


def total(partial_sum: Float[Array, "*batch rows"]) -> Float[Array, "*batch rows"]:
    """Add the partial sums of all devices."""
    return lax.psum(partial_sum, AXIS)


def mean(of_mine: Float[Array, "*batch 1"]) -> Float[Array, "*batch 1"]:
    """Average a value over all devices.

    If several devices hold the same kv head, the mean over all heads is still right, because each kv head is on the
    same number of devices.
    """
    return lax.pmean(of_mine, AXIS)


def gathered_logits(norm_logits: Callable[..., Array]) -> Callable[..., Array]:
    """Extend the op `norm_logits` from one device's part of the vocabulary to the complete vocabulary.

    The result gathers the logits of all devices.
    """

    def all_logits(x: Float[Array, "*batch dim"], params: Params, *, config: Config) -> Float[Array, "*batch vocab"]:
        logits = norm_logits(x, params, config=config)
        return lax.all_gather(logits, AXIS, axis=logits.ndim - 1, tiled=True)[..., : config.vocab]

    return all_logits
