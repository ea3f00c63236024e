"""Call candidates that are older than an optional keyword argument of their op."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from llamaspec.verify.candidates.candidate import Failure, NotJudged, Outputs
from llamaspec.verify.contract import Arguments, Contract
from llamaspec.verify.draws.domain import domain

UNEXPECTED = re.compile(r"TypeError: .* got an unexpected keyword argument '(\w+)'")


def accepted(
    contract: Contract,
    call: Callable[[Arguments, Arguments], Outputs | Failure],
    positional: Arguments,
    keyword: Arguments,
    left_out: set[str],
) -> Outputs | Failure:
    """Call a candidate with the keyword arguments that it accepts, and return the outcome.

    The candidate may be older than a keyword that has a default or may be None. If the value is this default, or None,
    we call again without the keyword, and add its name to `left_out`. Later calls with the same `left_out` omit this
    keyword from the start, because a failed call would end the worker's check of earlier results. Raises NotJudged for
    any other value.
    """
    passed = {
        name: value for name, value in keyword.items() if name not in left_out or value != _neutral(contract, name)
    }
    outcome = call(positional, passed)
    while isinstance(outcome, Failure) and (name := _unexpected(contract, outcome, passed)):
        if passed[name] != _neutral(contract, name):
            raise NotJudged(
                f"the candidate does not take {name}, which is {_neutral(contract, name)} in all other draws"
            )
        del passed[name]
        outcome = call(positional, passed)
    if isinstance(outcome, Outputs):
        left_out |= keyword.keys() - passed.keys()
    return outcome


def _unexpected(contract: Contract, failure: Failure, keyword: Arguments) -> str:
    """Return the optional keyword argument that the candidate does not accept. Returns "" for any other failure."""
    match = UNEXPECTED.match(failure.message) if failure.kind == "raised" else None
    name = match[1] if match else ""
    if name not in keyword:
        return ""
    drawn = contract.draws.get(name)
    optional = _default(contract, name) is not inspect.Parameter.empty
    return name if optional or (drawn is not None and None in domain(drawn).drawn) else ""


def _neutral(contract: Contract, name: str) -> Any:
    """Return the default of an optional keyword argument, or None if it has no default."""
    default = _default(contract, name)
    return None if default is inspect.Parameter.empty else default


def _default(contract: Contract, name: str) -> Any:
    return inspect.signature(contract.definition).parameters[name].default
