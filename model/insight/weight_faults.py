"""Faults of a checkpoint's weights that show without running it: not finite, overflowed, scales of 0, odd norms."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from model.checkpoints.checkpoint import Checkpoint, Tensor
from model.checkpoints.codes import exact_parts
from model.tensors import EMBEDDING, HEAD, Role, weights
from model.weights.params import Progress, no_progress

LARGEST_FLOAT16 = 65504.0
SUPERBLOCK = 256  # weights of ggml's K types whose scales are stored in 4 or 6 bits, as shares of one in float16


class Fault(NamedTuple):
    """Something that is likely wrong with a checkpoint."""

    fault: str  # its kind
    what: str
    measured: str  # what shows it
    mend: str  # the switch that would mend it, or what else to do


class _Seen(NamedTuple):
    """Numbers counted in a tensor."""

    nan: int
    infinite: int
    largest: int  # of float16: as large as it can hold
    dead: int  # groups with a scale of 0, although their codes differ


def weight_faults(checkpoint: Checkpoint, *, progress: Progress = no_progress) -> list[Fault]:
    """Read every weight once, and list the faults, the tensors of each kind together."""
    counted: dict[str, _Seen] = {}
    for i, (name, tensor) in enumerate(checkpoint.tensors.items()):
        progress("reading weights", i / len(checkpoint.tensors))
        counted[name] = _count(tensor)
        checkpoint.release()
    again = "take the file anew, or convert again from the original"
    wider = "convert again from the original, to bfloat16 or float32"
    kinds = (
        ("nan", "nan", "weights are not numbers", "NaN", again),
        ("overflow", "infinite", "weights are infinite: they overflowed the dtype", "infinities", wider),
        ("overflow", "largest", f"weights are ±{LARGEST_FLOAT16:g}, float16's largest number", "of these", wider),
        ("scales", "dead", "scales are 0, which makes their groups of codes 0", "groups whose codes differ", again),
    )
    found = [
        Fault(fault, what, _listed({name: getattr(seen, field) for name, seen in counted.items()}, unit), mend)
        for fault, field, what, unit, mend in kinds
        if any(getattr(seen, field) for seen in counted.values())
    ]
    return found


def norm_faults(checkpoint: Checkpoint) -> list[Fault]:
    """List a fault where the norms' median weight is not positive: a norm scales features, and turns few around."""
    norms = [weight.name for weight in weights(checkpoint.config) if weight.role is Role.NORM]
    medians = {name: float(np.median(checkpoint.tensors[name].read().astype(np.float32))) for name in norms}
    odd = [name for name, median in medians.items() if median <= 0]
    if 2 * len(odd) <= len(norms):  # also where there are none
        return []
    what = "the weights of norms are stored less 1, as Gemma's are, or as 0"
    worst = min(odd, key=lambda name: medians[name])
    measured = f"the median weight is not above 0 in {len(odd)} of {len(norms)} norms; {worst}: {medians[worst]:.3g}"
    return [Fault("norms", what, measured, "add 1 to the weights of every norm")]


def same_head_and_embedding(checkpoint: Checkpoint) -> bool:
    """Tell whether a head of its own is the embedding, number for number."""
    if HEAD not in checkpoint.tensors:
        return False
    head, embedding = checkpoint.tensors[HEAD], checkpoint.tensors[EMBEDDING]
    pairs = zip(exact_parts(head), exact_parts(embedding), strict=False)
    return head.dtype == embedding.dtype and not head.codes and all(np.array_equal(a, b) for a, b in pairs)


def _count(tensor: Tensor) -> _Seen:
    nan = infinite = largest = dead = 0
    with np.errstate(invalid="ignore", over="ignore"):
        if tensor.codes:
            for scales, groups_dead in _scales(tensor):
                nan, infinite = nan + int(np.isnan(scales).sum()), infinite + int(np.isinf(scales).sum())
                dead += groups_dead
        else:
            for part in exact_parts(tensor):
                values = part.astype(np.float32)
                nan, infinite = nan + int(np.isnan(values).sum()), infinite + int(np.isinf(values).sum())
                if tensor.dtype == np.float16:
                    largest += int((np.abs(values) == LARGEST_FLOAT16).sum())
    return _Seen(nan, infinite, largest, dead)


def _scales(tensor: Tensor) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the scales of consecutive rows, and how many groups of different codes are made 0 by theirs.

    A group that was 0 has one code throughout. A scale of a K type may be rounded to 0 beside larger ones; those of a
    whole superblock are not.
    """
    codes = tensor.codes
    assert codes
    together = SUPERBLOCK // codes.group if (tensor.type or "").endswith("_K") else 1
    for part in codes.parts():
        if part.scales.dtype == np.uint8:  # exponents, which cannot be 0
            continue
        scales = part.scales
        edges = np.arange(0, part.codes.shape[1], codes.group * together)
        same = np.maximum.reduceat(part.codes, edges, axis=1) == np.minimum.reduceat(part.codes, edges, axis=1)
        zero = np.logical_and.reduceat(scales == 0, np.arange(0, scales.shape[1], together), axis=1)
        yield scales, int((zero & ~same).sum())


def _listed(counts: dict[str, int], unit: str) -> str:
    """List the tensors in which something was counted, three at most."""
    found = {name: count for name, count in counts.items() if count}
    first = ", ".join(f"{name} ({count:,})" for name, count in list(found.items())[:3])
    rest = f" and {len(found) - 3} more tensors" if len(found) > 3 else ""
    return f"{sum(found.values()):,} {unit}, in {first}{rest}"
