"""Finds faults of weights without running the model: NaN, infinite or huge numbers, scales of 0, odd norm weights."""

from typing import NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CodesWithMinima, Part, Tensor
from llamaspec.model.checkpoints.codes import exact_parts
from llamaspec.model.tensors import EMBEDDING, HEAD, Role, weights
from llamaspec.model.weights.loading import Progress, no_progress

LARGEST_FLOAT16 = 65504.0
HUGE = 2.0**64  # the product of two such numbers is beyond float32
NAN_OF_E8M0, NAN_OF_E4M3 = 0xFF, 0x7F  # codes that mean NaN, of e4m3 without the sign
SUPERBLOCK = (
    256  # in ggml's K types, 256 weights share a float16 scale, and each group in them has a factor of 4 or 6 bits
)


class Fault(NamedTuple):
    """A likely fault of a checkpoint."""

    fault: str  # the kind of fault
    what: str  # the fault in words
    measured: str  # the measurement that shows the fault
    mend: str  # how to repair the fault


class _Counts(NamedTuple):
    """The numbers of suspicious weights in a tensor."""

    nan: int
    infinite: int
    largest: int  # float16 weights with float16's largest magnitude
    huge: int  # finite weights above `HUGE`
    dead: int  # groups with different codes, but a scale of 0


def weight_faults(checkpoint: Checkpoint, *, progress: Progress = no_progress) -> list[Fault]:
    """Read every weight once, and return the faults: one for each kind, with the names of the tensors."""
    counted: dict[str, _Counts] = {}
    for i, (name, tensor) in enumerate(checkpoint.tensors.items()):
        progress("reading weights", i / len(checkpoint.tensors))
        counted[name] = _count(tensor)
        checkpoint.release()
    again = "download the file again, or convert it again from the original"
    wider = "convert it again from the original, to bfloat16 or float32"
    damaged = "download the file again: training does not make such weights"
    kinds = (
        ("nan", "nan", "some weights are not numbers", "NaN", again),
        ("overflow", "infinite", "some weights are infinite, because they overflowed the dtype", "infinities", wider),
        (
            "overflow",
            "largest",
            f"some weights are ±{LARGEST_FLOAT16:g}, the largest number of float16",
            "of these",
            wider,
        ),
        (
            "overflow",
            "huge",
            "some weights are larger than 2^64, so their products overflow float32",
            "of these",
            damaged,
        ),
        (
            "scales",
            "dead",
            "some scales are 0, so all weights of their groups are 0",
            "groups whose codes differ",
            again,
        ),
    )
    faults = [
        Fault(fault, what, _listed({name: getattr(seen, field) for name, seen in counted.items()}, unit), mend)
        for fault, field, what, unit, mend in kinds
        if any(getattr(seen, field) for seen in counted.values())
    ]
    return faults


def norm_faults(checkpoint: Checkpoint) -> list[Fault]:
    """Return a fault if more than half of the norms have a median weight of 0 or less.

    In a trained norm, only a few weights are negative.
    """
    norms = [weight.name for weight in weights(checkpoint.config) if weight.role is Role.NORM]
    medians = {name: float(np.median(checkpoint.tensors[name].read().astype(np.float64))) for name in norms}
    odd = [name for name, median in medians.items() if median <= 0]
    if 2 * len(odd) <= len(norms):  # this includes an empty `norms`
        return []
    what = "the weights of norms are stored minus 1, as Gemma's are, or as 0"
    worst = min(odd, key=lambda name: medians[name])
    measured = f"the median weight is 0 or less in {len(odd)} of {len(norms)} norms; {worst}: {medians[worst]:.3g}"
    return [Fault("norms", what, measured, "add 1 to the weights of every norm")]


def same_head_and_embedding(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has a separate head with exactly the same numbers as the embedding."""
    if HEAD not in checkpoint.tensors:
        return False
    head, embedding = checkpoint.tensors[HEAD], checkpoint.tensors[EMBEDDING]
    pairs = zip(exact_parts(head), exact_parts(embedding), strict=False)
    return head.dtype == embedding.dtype and not head.codes and all(np.array_equal(a, b) for a, b in pairs)


def _count(tensor: Tensor) -> _Counts:
    with np.errstate(invalid="ignore", over="ignore"):
        if tensor.codes:
            counts = [_count_codes(part, tensor) for part in tensor.codes.parts()]
        else:
            counts = [_count_weights(part) for part in exact_parts(tensor)]
    return _Counts(*np.sum(counts, axis=0).tolist())


def _count_weights(part: np.ndarray) -> _Counts:
    values = part.astype(np.float32)
    largest = np.sum(np.abs(values) == LARGEST_FLOAT16) if part.dtype == np.float16 else 0
    return _Counts(int(np.isnan(values).sum()), int(np.isinf(values).sum()), int(largest), _huge(values), 0)


def _huge(values: np.ndarray) -> int:
    """Count the finite numbers above `HUGE` in magnitude. float16 has no such numbers."""
    values = np.abs(values.astype(np.float32))
    return int(np.sum((values > HUGE) & np.isfinite(values)))


def _count_codes(part: Part, tensor: Tensor) -> _Counts:
    """Count suspicious numbers in some rows of codes. `dead` counts groups with different codes but a scale of 0.

    A group of zeros also has a scale of 0, but its codes are equal, so we do not count it. In ggml's K types, the scale
    of one group may be rounded to 0. So for these types, `dead` counts superblocks in which all scales are 0.
    """
    codes = tensor.codes
    assert codes
    if part.scales.dtype == np.uint8:  # the scales are exponents: 255 means NaN, and no scale is 0
        return _Counts(int(np.sum(part.scales == NAN_OF_E8M0)), 0, 0, 0, 0)
    numbers = [part.scales, part.minima] if isinstance(part, CodesWithMinima) else [part.scales]
    nan = sum(int(np.isnan(array).sum()) for array in numbers)
    nan += int(np.sum(part.codes & 0x7F == NAN_OF_E4M3)) if codes.form == "fp8" else 0
    infinite = sum(int(np.isinf(array).sum()) for array in numbers)
    together = SUPERBLOCK // codes.group if (tensor.type or "").endswith("_K") else 1
    edges = np.arange(0, part.codes.shape[1], codes.group * together)
    constant = np.maximum.reduceat(part.codes, edges, axis=1) == np.minimum.reduceat(part.codes, edges, axis=1)
    zero = np.logical_and.reduceat(part.scales == 0, np.arange(0, part.scales.shape[1], together), axis=1)
    return _Counts(nan, infinite, 0, sum(map(_huge, numbers)), int(np.sum(zero & ~constant)))


def _listed(counts: dict[str, int], unit: str) -> str:
    """List up to three tensors with a count above 0, and the total."""
    nonzero = {name: count for name, count in counts.items() if count}
    first = ", ".join(f"{name} ({count:,})" for name, count in list(nonzero.items())[:3])
    more = f" and {len(nonzero) - 3} more tensors" if len(nonzero) > 3 else ""
    return f"{sum(nonzero.values()):,} {unit}, in {first}{more}"
