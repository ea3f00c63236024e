"""Contracts as `--list` prints them: the parameters of a candidate, the domain, the bounds and the laws."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import domain
from llamaspec.verify.draws.reach import reaches


def signature(contract: Contract) -> str:
    """Format the parameters of a definition with shapes and dtypes."""
    parameters = str(inspect.signature(contract.definition))
    return re.sub(r"jaxtyping\.|(?<=\[)(np\.|numpy\.)?ndarray, |np\.|numpy\.", "", parameters).replace("'", "")


def group(contract: Contract) -> str:
    """Find the group of an op in `--list` from the folder of its definition.

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
    """Convert a contract to JSON: the contents of `describe`, by name."""
    return {
        "op": contract.name,
        "group": group(contract),
        "signature": signature(contract),
        "definition": f"{contract.definition.__module__}.{contract.name}",
        "domain": str(contract.domain),
        "bound": str(contract.bound),
        "draws": {name: str(domain(strategy)) for name, strategy in contract.draws.items()},
        "large": [
            {"dimension": reach.dimension, "most": reach.most, "why": reach.why}
            for reach in reaches(contract)
            if reach.most > reach.usual
        ],
        "laws": [{"law": law.name, "left_out_where_narrowed": list(law.sets)} for law in contract.laws],
        "mutants": list(mutants),
    }


def describe(contract: Contract, mutants: Sequence[str]) -> list[str]:
    """Format the lines that `--list` prints for a contract."""
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
            f"{reach['dimension']} to {reach['most']:,}" + f" ({reach['why']})" * bool(reach["why"])
            for reach in parts["large"]
        )
        lines.append(f"  large   one at a time: {'; '.join(far)}")
    for law in parts["laws"]:
        sets = ", ".join(law["left_out_where_narrowed"])
        lines.append(f"  law     {law['law']}" + f" (skipped if --set gives {sets})" * bool(sets))
    if mutants:
        lines.append(f"  kills   {len(mutants)} mutants: {'; '.join(mutants)}")
    return lines
