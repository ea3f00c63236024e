"""Rules for Pallas kernels: `pallas_call` as its interpreter runs it, and kernels for Mosaic GPU with one warpgroup.

We run the thread blocks of a Mosaic kernel one after the other, and each copy at once. So the walk sees neither races
nor a missing wait.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.pallas.hlo_interpreter import pallas_call_hlo_interpret

from llamaspec.verify.algebra.concrete import Parameters
from llamaspec.verify.algebra.jaxprs import RULES as PLAIN
from llamaspec.verify.algebra.jaxprs import Rule, Values, Walk, opened
from llamaspec.verify.algebra.residues import OutsideError, Residues

WAITS = (
    *("barrier_wait", "barrier_arrive", "commit_smem", "commit_group", "wait_smem_to_gmem"),
    *("griddepcontrol_wait", "griddepcontrol_launch_dependents"),
)


def _pallas_call(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    """Evaluate the loop over the grid that Pallas's interpreter makes of a kernel."""
    known = inspect.signature(pallas_call_hlo_interpret).parameters
    run = partial(pallas_call_hlo_interpret, **{key: value for key, value in parameters.items() if key in known})
    variables = parameters["jaxpr"].invars
    places = [number for number, value in enumerate(inputs) if isinstance(value, Residues)]
    shapes = [jax.ShapeDtypeStruct(inputs[n].shape, variables[n].aval.dtype) for n in places]

    def of_residues(*arrays: Any) -> Any:
        arguments = list(inputs)
        for place, array in zip(places, arrays, strict=True):
            arguments[place] = array
        return run(*arguments)

    return walk.evaluate(jax.make_jaxpr(of_residues)(*shapes), *(inputs[n] for n in places))


class Memory:
    """Memory of a Mosaic kernel. Elements that nobody has written are NaN."""

    def __init__(self, array: Any):
        self.array = array

    @classmethod
    def unwritten(cls, shape: tuple[int, ...], dtype: Any) -> "Memory":
        return cls(np.zeros(shape, dtype) if np.dtype(dtype).kind in "biu" else np.full(shape, np.nan, np.float64))

    def places(self, transforms: Any) -> np.ndarray:
        """Return the flat indices of the elements that indexing selects."""
        places = np.arange(int(np.prod(self.array.shape, dtype=int))).reshape(self.array.shape)
        for transform in transforms:
            if hasattr(transform, "indices"):
                places = places[tuple(map(_index, transform.indices))]
            elif type(transform).__name__ == "RefReshaper":
                places = places.reshape(transform.shape)
            elif hasattr(transform, "permutation"):
                places = places.transpose(transform.permutation)
            else:
                raise OutsideError(f"memory with the transform {type(transform).__name__}")
        return places

    def read(self, transforms: Any) -> Any:
        return self.array.reshape(-1)[self.places(transforms)]

    def write(self, transforms: Any, value: Any) -> None:
        places, shape = self.places(transforms).ravel(), self.array.shape

        def changed(array: np.ndarray, elements: np.ndarray) -> np.ndarray:
            flat = array.ravel().copy()
            flat[places] = np.broadcast_to(elements, np.shape(elements)).ravel()
            return flat.reshape(shape)

        known = next((x for x in (value, self.array) if isinstance(x, Residues)), None)
        if known is None:
            self.array = changed(np.asarray(self.array), np.asarray(value))
        else:
            self.array = known.operand(self.array).merged(changed, known.operand(value))


def _index(index: Any) -> Any:
    if hasattr(index, "start"):
        start, stride = int(index.start), getattr(index, "stride", 1) or 1
        return slice(start, start + int(index.size) * stride, stride)
    if np.ndim(index):
        raise OutsideError("memory indexed by an array")
    return int(index)


def _transforms(tree: Any, leaves: Values) -> Any:
    return () if tree is None else jax.tree.unflatten(tree, leaves)


def _load(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    memory, *leaves = inputs
    return [memory.read(_transforms(parameters["tree"], leaves))]


def _swap(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    memory, value, *leaves = inputs
    transforms = _transforms(parameters["tree"], leaves)
    before = memory.read(transforms)
    memory.write(transforms, value)
    return [before]


def _store(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    _swap(walk, inputs, parameters)
    return []


def _copy(walk: Walk, inputs: Values, parameters: Parameters, *, skipped: int) -> Values:
    """Copy between memories; `skipped` operands, the barrier, follow source and target."""
    source, target, *others = inputs
    leaves = others[skipped:]
    count = parameters["src_transforms_treedef"].num_leaves
    of_target = parameters["dst_transforms_treedef"].num_leaves
    if parameters.get("has_user_predicate") and not bool(leaves[-1]):
        return []
    if parameters.get("reduction_op") is not None:
        raise OutsideError("a copy that adds")
    value = source.read(_transforms(parameters["src_transforms_treedef"], leaves[:count]))
    target.write(_transforms(parameters["dst_transforms_treedef"], leaves[count : count + of_target]), value)
    return []


def _run_scoped(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    """Run a body with memory of its own. Barriers are None."""
    body, _ = opened(parameters["jaxpr"])
    if any(parameters.get("ref_transforms") or ()):
        raise OutsideError("memory with tiles or swizzles")
    memories = []
    for variable in body.invars:
        inner = variable.aval.inner_aval
        is_array = isinstance(getattr(inner, "dtype", None), np.dtype)
        memories.append(Memory.unwritten(inner.shape, inner.dtype) if is_array else None)
    return walk.run(body, inputs, memories)


def _mosaic(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    """Run the thread blocks of a Mosaic GPU kernel one after the other."""
    meshes, jaxprs = parameters["meshes"], parameters["jaxprs"]
    mesh = meshes[0]
    if len(meshes) > 1 or not hasattr(mesh, "num_threads"):
        raise OutsideError("a kernel with several meshes, or for another device")
    if (mesh.num_threads or 1) > 1 or mesh.cluster:
        raise OutsideError("a kernel with several warpgroups, or with clusters")
    outputs = [Memory.unwritten(aval.shape, aval.dtype) for aval in parameters["out_avals"]]
    for source, target in dict(parameters["input_output_aliases"]).items():
        outputs[target] = Memory(inputs[source])
    memories = [Memory(value) for value in inputs] + outputs
    for place in itertools.product(*map(range, mesh.grid)):
        rules = {**walk.rules, "axis_index": _axis_index(dict(zip(mesh.grid_names, place, strict=True)))}
        Walk(rules, everywhere=True, end=walk.end).evaluate(jaxprs[0], *memories)
    return [memory.array for memory in outputs]


def _axis_index(coordinates: Mapping[str, int]) -> Rule:
    return lambda walk, inputs, parameters: [np.int32(coordinates[parameters["axis_name"]])]


def _unchanged(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    return inputs[:1]


MOSAIC: dict[str, Callable[..., Values]] = {
    "mpmd_map": _mosaic,
    "run_scoped": _run_scoped,
    "get": _load,
    "load": _load,
    "swap": _swap,
    "store": _store,
    "copy_gmem_to_smem": partial(_copy, skipped=1),
    "copy_smem_to_gmem": partial(_copy, skipped=0),
    "layout_cast": _unchanged,
    "multiple_of": _unchanged,
    **dict.fromkeys(WAITS, lambda walk, inputs, parameters: []),
}
RULES: dict[str, Rule] = {**PLAIN, "pallas_call": _pallas_call, **MOSAIC}
