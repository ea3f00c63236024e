"""Deliberate mistakes in sharding a model over devices.

`verify.judging.walk` runs the ops of a model one after the other and checks each against its bound; it must detect
every mistake. A mutant changes the table of ops, or the weights (so that the correct cut gives what a wrong cut would),
or replaces a function of `model.parallel`. `python -m tests.model.parallel.device_mutants` runs all mutants in a
process with eight devices (`tests.model.parallel.on_devices.results`) and prints one JSON line per mutant.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
from jax import lax

from llamaspec.model.parallel import context, gathered, reading, sharding, share
from llamaspec.model.parallel.tensor import AXIS, tensor_parallel, total
from llamaspec.model.tensors import NAMES, row_order
from llamaspec.reference.quantizers.schemes import scheme
from tests.model.parallel.on_devices import GPT_OSS, STABLELM_2, Walk, walked

BIASES = Walk("biases, scaled RoPE", 2)
DEALT = Walk("broad", 4, way="context")


class Mutant(NamedTuple):
    """A case of `Walk`, with the mistake that is made in it."""

    walk: Walk
    least: float = 1000  # smallest error of the first wrong op, as a multiple of its bound
    ops: Callable[[Any], Any] | None = None  # makes a wrong table from a device's table
    arrays: Callable[..., dict[str, np.ndarray]] | None = None  # makes wrong weights
    replaced: tuple[Any, str, Any] | None = None  # module or class, attribute, and its replacement


def with_total(wrong_total: Callable) -> Callable:
    """Return a function that changes a table of ops: `wrong_total` replaces the sum over devices."""

    def make(ops: Any) -> Any:
        added = {op: partial(getattr(ops, op), total=wrong_total) for op in ("project_add", "down_add", "moe_add")}
        return tensor_parallel(ops)._replace(**added)

    return make


def bias_inside(ops: Any) -> Any:
    def project_add(h, layer, x):
        product = ops.project_add(h, layer, jnp.zeros(x.shape, jnp.float32))  # the bias is added on every device
        return (x.astype(jnp.float32) + total(product)).astype(x.dtype)

    return tensor_parallel(ops)._replace(project_add=project_add)


def residual_inside(ops: Any) -> Any:
    def down_add(g, layer, x):
        bare = layer._replace(ffn=layer.ffn._replace(down=layer.ffn.down._replace(bias=None)))
        return total(ops.down_add(g, bare, x)) + layer.ffn.down.bias

    return tensor_parallel(ops)._replace(down_add=down_add)


def residual_of_experts(ops: Any) -> Any:
    return tensor_parallel(ops)._replace(
        moe_add=lambda x, layer, *, config: total(ops.moe_add(x, layer, config=config))
    )


def bias_of_experts_inside(ops: Any) -> Any:
    def moe_add(x, layer, *, config):
        return x + total(ops.moe_add(x, layer, config=config, total=lambda y: y) - x)

    return tensor_parallel(ops)._replace(moe_add=moe_add)


def sink_of_each_device(ops: Any) -> Any:
    """Count the attention sink once per device, by adding the log of the number of devices to the sink's score."""

    def attend(*arguments, sinks, **static):
        return context.attend_across(*arguments, sinks=sinks + jnp.log(lax.axis_size(AXIS)), **static)

    return context.context_parallel(ops)._replace(attend=attend)


def backwards(ops: Any) -> Any:
    def norm_logits(x, params, *, config):
        logits = lax.all_gather(ops.norm_logits(x, params, config=config), AXIS)[::-1]
        return jnp.moveaxis(logits, 0, -2).reshape(*x.shape[:-1], -1)[..., : config.vocab]

    return tensor_parallel(ops)._replace(norm_logits=norm_logits)


def even_cut(arrays: Any, config: Any, devices: int) -> Any:
    """Reorder weights so that the correct cut gives the parts that an equal cut of the stacked [q; k; v] would give."""
    return _stacks_cut_evenly(arrays, config, devices, "qkv", "qkv")


def even_cut_of_gate_and_up(arrays: Any, config: Any, devices: int) -> Any:
    return _stacks_cut_evenly(arrays, config, devices, ("gate", "up"), "gate_up")


def _stacks_cut_evenly(arrays: Any, config: Any, devices: int, parts: Any, field: str) -> Any:
    changed = dict(arrays)
    for layer in range(config.layers):
        names = [NAMES[part].format(layer=layer) + ".weight" for part in parts]
        stack = np.concatenate([arrays[n] for n in names])[np.argsort(row_order(config, devices)[field])]
        ends = np.cumsum([len(arrays[n]) for n in names])[:-1]
        changed |= dict(zip(names, np.split(stack, ends), strict=True))
    return changed


def other_head(arrays: Any, config: Any, devices: int) -> Any:
    """Put each key head on the device of a different key head."""
    names = [NAMES["k"].format(layer=i) + ".weight" for i in range(config.layers)]
    return arrays | {name: np.roll(arrays[name], len(arrays[name]) // 2, axis=0) for name in names}


def dealt_heads(weight: Any, config: Any, *, device: int, devices: int) -> Any:
    """Deal key heads to devices in turn; the correct cut gives each device neighboring heads."""
    part = share.cut(weight, config, device=device, devices=devices)
    if part is None or weight.axes[part.axis] != "kv_heads":
        return part
    start = device % config.kv_heads * config.head_dim
    return part._replace(start=start, stop=start + part.size)


def first_sinks(weight: Any, config: Any, *, device: int, devices: int) -> Any:
    """Give every device the attention sinks of the first heads."""
    return share.cut(weight, config, device=0 if weight.part == "sinks" else device, devices=devices)


def first_norms(config: Any, *, device: int, devices: int) -> Any:
    """Give every device the norm weights of the first heads."""
    at = {
        name: weight for name, weight in share.weights_on(config, device=0, devices=devices) if weight.head is not None
    }
    for name, weight in share.weights_on(config, device=device, devices=devices):
        yield name, at.get(name, weight)


def vocabulary_of_whole_parts(weight: Any, config: Any, *, device: int, devices: int) -> Any:
    """Drop the rows of the head that are left over after every device gets an equal part."""
    part = share.cut(weight, config, device=device, devices=devices)
    if part is None or weight.axes[part.axis] != "vocab":
        return part
    size = config.vocab // devices
    return part._replace(start=device * size, stop=(device + 1) * size)


def first_scales(codes: Any, cols: int, part: Any, fraction: float) -> Any:
    """Cut codes by columns, but give every device the scales of the first columns."""
    right = reading_codes_part(codes, cols, part, fraction)
    if not part.axis:
        return right

    def parts() -> Iterator[Any]:
        for full, own in zip(codes.parts(), right.parts(), strict=True):
            yield own._replace(scales=full.scales[:, : own.scales.shape[1]])

    return right._replace(parts=parts)


reading_codes_part = reading._codes_part


def everyone_writes(rows: Any, new: Any, at: Any) -> Any:
    index, sequence = at // lax.axis_size(AXIS), jnp.arange(len(rows))[:, None]
    return rows.at[sequence, :, index].set(new.astype(rows.dtype).swapaxes(1, 2), mode="drop")


def attending(name: str, replacement: Callable) -> Callable:
    """Return a function that changes a table of ops: `replacement` is called instead of the collective `lax.NAME`."""

    def make(ops: Any) -> Any:
        def attend(*arguments, **static):
            with patch.object(lax, name, replacement):
                return context.attend_across(*arguments, **static)

        return context.context_parallel(ops)._replace(attend=attend)

    return make


def rows_as_positions(ops: Any) -> Any:
    """Treat the cache rows of every device as the first positions of the sequence."""

    def attend(*arguments, **static):
        with patch.object(lax, "axis_index", lambda _: 0):
            return context.attend_across(*arguments, **static)

    return context.context_parallel(ops)._replace(attend=attend)


def in_order(part: Any, rows: Any) -> Any:
    return part if len(part) == sum(rows) else lax.all_gather(part, AXIS, tiled=True)


def narrow(y: Any) -> Any:
    return total(y.astype(jnp.bfloat16)).astype(jnp.float32)


EIGHT_FOR_TWO = Walk("broad", 8)  # eight devices, two kv heads
SCALED = Walk("wide", 2, quantize="q4", stored=True)
MUTANTS = {
    "a bias added on every device": Mutant(BIASES, ops=bias_inside),
    "a residual added on every device": Mutant(BIASES, ops=residual_inside),
    "one device's sum instead of all": Mutant(BIASES, ops=with_total(lambda y: y * lax.axis_size(AXIS))),
    "no sum at all": Mutant(BIASES, ops=with_total(lambda y: y)),
    "a mean instead of a sum": Mutant(BIASES, ops=with_total(lambda y: lax.pmean(y, AXIS))),
    "a sum of bfloat16 in float32": Mutant(BIASES, 10, ops=with_total(narrow)),
    "a sum of bfloat16 in bfloat16": Mutant(BIASES._replace(dtype="bfloat16"), 2, ops=with_total(narrow)),
    "an even cut through q, k and v": Mutant(BIASES, arrays=even_cut),
    "an even cut through gate and up": Mutant(BIASES, arrays=even_cut_of_gate_and_up),
    "a residual of experts added on every device": Mutant(Walk("experts", 2), ops=residual_of_experts),
    "logits gathered backwards": Mutant(BIASES, ops=backwards),
    "a kv head of another device": Mutant(BIASES, arrays=other_head),
    "kv heads dealt one by one": Mutant(EIGHT_FOR_TWO, replaced=(reading, "cut", dealt_heads)),
    "a bias of experts added on every device": Mutant(Walk(GPT_OSS, 2), ops=bias_of_experts_inside),
    "a sink on every device": Mutant(Walk(GPT_OSS, 4, way="context"), ops=sink_of_each_device),
    "sinks of other heads": Mutant(Walk(GPT_OSS, 2), replaced=(reading, "cut", first_sinks)),
    "norms of other heads": Mutant(Walk(STABLELM_2, 2), replaced=(reading, "weights_on", first_norms)),
    "the rest of the vocabulary left out": Mutant(
        Walk("broad", 2), replaced=(reading, "cut", vocabulary_of_whole_parts)
    ),
    "scales that do not go with their codes": Mutant(SCALED, 100, replaced=(reading, "_codes_part", first_scales)),
    "a scale of a row made from a part of it": Mutant(
        Walk("wide", 2, quantize="q8_row"), 10, replaced=(sharding, "scheme", lambda _: scheme("q8"))
    ),
    "keys and values written by every device": Mutant(DEALT, replaced=(context, "_own_rows", everyone_writes)),
    "each device's own largest score": Mutant(DEALT, ops=attending("pmax", lambda x, _: x)),
    "each device's own sum": Mutant(DEALT, ops=attending("psum", lambda x, _: x)),
    "rows taken for positions": Mutant(DEALT, ops=rows_as_positions),
    "a stack gathered in the order of the devices": Mutant(
        Walk("even", 4, way="FSDP"), replaced=(gathered, "gathered_rows", in_order)
    ),
}


@contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """Apply a mutant's replacement inside a with block."""
    if not mutant.replaced:
        yield
        return
    with patch.object(*mutant.replaced):
        yield


def walk_mutant(name: str) -> dict[str, Any]:
    """Check a model's ops one after the other with the mutant `name` applied; return the errors that are detected."""
    mutant = MUTANTS[name]
    with broken(mutant):
        return walked(mutant.walk, mutant.ops, mutant.arrays)


if __name__ == "__main__":
    for name in MUTANTS:
        print(json.dumps(walk_mutant(name)), flush=True)
