"""Contracts as `--list` shows them: how a candidate is called, and what it is held to."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import domain
from llamaspec.verify.draws.reach import reaches


def signature(contract: Contract) -> str:
    """Parameters of a definition with shapes and dtypes."""
    parameters = str(inspect.signature(contract.definition))
    return re.sub(r"jaxtyping\.|(?<=\[)(np\.|numpy\.)?ndarray, |np\.|numpy\.", "", parameters).replace("'", "")


def group(contract: Contract) -> str:
    """The group that `--list` names an op in, by where its definition is.

    >>> from llamaspec.verify.contracts.rmsnorm import CONTRACT
    >>> group(CONTRACT)
    'layers'
    """
    if contract.name.endswith("_backward"):
        return "backward"
    module = contract.definition.__module__
    parts = {"quantizers": "quantized", "attention": "attention", "fused": "fused"}
    return next((name for part, name in parts.items() if part in module), "layers")


def as_json(contract: Contract, mutants: Sequence[str]) -> dict[str, Any]:
    """A contract, as JSON can say it: what `describe` tells, by name."""
    return {
        "op": contract.name,
        "group": group(contract),
        "signature": signature(contract),
        "definition": f"{contract.definition.__module__}.{contract.name}",
        "domain": str(contract.domain),
        "bound": str(contract.bound),
        "draws": {name: str(domain(strategy)) for name, strategy in contract.draws.items()},
        "large": [
            {"dimension": one.dimension, "most": one.most, "why": one.why}
            for one in reaches(contract)
            if one.most > one.usual
        ],
        "laws": [{"law": law.name, "left_out_where_narrowed": list(law.sets)} for law in contract.laws],
        "mutants": list(mutants),
    }


def describe(contract: Contract, mutants: Sequence[str]) -> list[str]:
    """A contract as `--list` prints it."""
    parts = as_json(contract, mutants)
    lines = [
        parts["op"] + parts["signature"],
        f"  is      {parts['definition']}",
        f"  domain  {parts['domain']}",
        f"  bound   {parts['bound']}",
    ]
    width = max(map(len, parts["draws"]))
    for i, (name, values) in enumerate(parts["draws"].items()):
        lines.append(f"  {'draws' if i == 0 else '':7} {name:{width}}  {values}")
    if parts["large"]:
        far = (
            f"{one['dimension']} to {one['most']:,}" + f" ({one['why']})" * bool(one["why"]) for one in parts["large"]
        )
        lines.append(f"  large   one at a time: {'; '.join(far)}")
    for law in parts["laws"]:
        sets = ", ".join(law["left_out_where_narrowed"])
        lines.append(f"  law     {law['law']}" + f" (left out where {sets} is narrowed)" * bool(sets))
    if mutants:
        lines.append(f"  kills   {len(mutants)} mutants: {'; '.join(mutants)}")
    return lines
