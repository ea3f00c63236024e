"""Adapters: wrap a kernel with a different signature, so that we can call it with the arguments of the definition.

    @adapt("attention_prefill", "out: q", "q: b t h d -> b h t d", "k: b s g d -> b g s d", "v: b s g d -> b g s d",
           "start=offsets", "window=window", returns="b h t d -> b t h d")
    def candidate(out, q, k, v, start, window): ...

A hand-written function that calls the kernel works just as well. But an adapter also fills output arrays with NaN
before the call, so that we notice an element that the kernel forgets to write.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from llamaspec.verify.catalogue import contract_for


def adapt(op: str, *takes: str, returns: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a kernel of `op`. Each string of `takes` describes one argument of the kernel, in order:

        x                       the argument x of the definition
        x: a b c -> c a b       the argument x with its axes in a different order
        eps=epsilon             the definition's argument epsilon, passed as the keyword eps
        out: x                  an array of NaN with the shape and dtype of x, for the kernel's result
        over: x                 a copy of x, which the kernel overwrites with its result

    `returns` ("a b c -> c a b") reorders the axes of the kernel's result. Raises ValueError for an argument that the
    definition does not have.
    """
    names = list(inspect.signature(contract_for(op).definition).parameters)

    def named(name: str) -> str:
        if name not in names:
            raise ValueError(f"{op} has no argument {name}: expected one of {', '.join(names)}")
        return name

    entries = []
    for take in takes:
        name, _, target = (part.strip() for part in take.partition(":"))
        keyword, _, source = (part.strip() for part in name.rpartition("="))
        if name in ("out", "over"):
            entries.append((name, "", named(target)))
        else:
            entries.append((target, keyword, named(source)))

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def candidate(*positional: Any, **keyword: Any) -> Any:
            values = {**dict(zip(names, positional, strict=False)), **keyword}
            arguments, options, written = [], {}, None
            for how, by_name, name in entries:
                if how in ("out", "over"):
                    value = written = _full_of_nan(values[name]) if how == "out" else _copy(values[name])
                else:
                    value = _reordered(values[name], how)
                if by_name:
                    options[by_name] = value
                else:
                    arguments.append(value)
            result = kernel(*arguments, **options)
            return _reordered(result if written is None else written, returns)

        return candidate

    return decorate


def _full_of_nan(array: Any) -> Any:
    library = import_module(type(array).__module__.partition(".")[0])
    return library.full_like(array, float("nan"))


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _reordered(array: Any, layout: str) -> Any:
    """Put the axes of `array` in the order of the right side of `layout`; the result is contiguous."""
    if not layout:
        return array
    before, _, after = (side.split() for side in layout.partition("->"))
    order = [before.index(axis) for axis in after]
    if hasattr(array, "permute"):
        return array.permute(order).contiguous()
    return array.transpose(order).copy()
