"""What a person, a program or a CI system is told of a run."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np

from verify.contract import Arguments, Contract
from verify.precision import precision
from verify.runner import LAW, Draw, Report

WIDTH = 110
FEW = 16  # numbers that are shown themselves


def headline(report: Report) -> str:
    """One line: the verdict, and what it rests on."""
    number = "1 example" if report.examples == 1 else f"{report.examples} examples"
    if report.cut_short:
        number += " until the time was up"
    rest = f"{number}, seed {report.seed}, {report.seconds:.1f} s"
    if report.outcome != "violated":
        rest += f", at most {report.worst.hard:.2g} of the bound"
    return f"{report.outcome:14}{report.op} {report.dtype}  {report.candidate}  ({rest})"


def counterexample(report: Report, contract: Contract | None, *, replay: str | None = None) -> list[str]:
    """Up to six lines: verdict, draw, inputs where they are few numbers, what is wrong, conditioning, how to replay.

    What no contract draws, a walk through a model, has no inputs to show.
    """
    lines = [headline(report)]
    finding = report.worst.finding
    if finding is None:
        return lines
    if report.worst.draw:
        lines.append("  " + _draw(report.worst.draw))
    if contract and (inputs := _inputs(contract, report)):
        lines.append("  " + inputs)
    lines.append(f"  {finding.kind}: {finding.message}")
    if finding.condition:
        lines.append(f"  {finding.condition}")
    if replay:
        lines.append(f"  llamaspec verify --replay {replay}")
    return lines


def _draw(draw: Draw) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in draw.items() if name != LAW)


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value).replace(" ", "")


def _inputs(contract: Contract, report: Report) -> str:
    """The arguments, where all that is in them fits a line."""
    draw = {name: value for name, value in report.worst.draw.items() if name != LAW}
    arguments: Arguments = contract.arguments(precision=precision(report.dtype), **draw)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    if sum(array.size for array in arrays.values()) > FEW:
        return ""
    line = " ".join(f"{name}={_numbers(array)}" for name, array in arrays.items())
    return line if len(line) <= WIDTH else ""


def _numbers(array: np.ndarray) -> str:
    if array.dtype.kind in "biu":
        return str(array.tolist()).replace(" ", "")
    listed = np.vectorize(lambda number: f"{number:.9g}", otypes=[object])(array.astype(np.float64)).tolist()
    return str(listed).replace("'", "").replace(" ", "")


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "outcome": "violated" if any(report.outcome == "violated" for report in reports) else "within bounds",
        "reports": [
            {
                "op": report.op,
                "candidate": report.candidate,
                "dtype": report.dtype,
                "outcome": report.outcome,
                "examples": report.examples,
                "cut_short": report.cut_short,
                "seconds": round(report.seconds, 3),
                "seed": report.seed,
                "hard": _finite(report.worst.hard),
                "alarm": _finite(report.worst.alarm),
                "draw": {name: _short(value) for name, value in report.worst.draw.items()},
                "finding": report.worst.finding._asdict() if report.worst.finding else None,
            }
            for report in reports
        ],
    }


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None  # JSON has no infinity


def as_junit(reports: Sequence[Report], contracts: Mapping[str, Contract]) -> str:
    """A JUnit file: one test case an op and dtype; a suspicious one passes, with its findings as output."""
    violated = sum(report.outcome == "violated" for report in reports)
    suite = ElementTree.Element("testsuite", name="llamaspec verify", tests=str(len(reports)), failures=str(violated))
    for report in reports:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=report.candidate,
            name=f"{report.op} {report.dtype}",
            time=f"{report.seconds:.3f}",
        )
        if report.worst.finding is None:
            continue
        text = "\n".join(counterexample(report, contracts.get(report.op)))
        if report.outcome == "violated":
            ElementTree.SubElement(case, "failure", message=report.worst.finding.message).text = text
        else:
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"


def describe(contract: Contract, mutants: Sequence[str]) -> list[str]:
    """A contract as `--list` prints it: how a candidate is called, and what it is held to."""
    signature = re.sub(r"jaxtyping\.|np\.|numpy\.|ndarray, ", "", str(inspect.signature(contract.definition)))
    lines = [
        contract.name + signature.replace("'", ""),
        f"  is      {contract.definition.__module__}.{contract.name}",
        f"  domain  {contract.domain}",
        f"  bound   {contract.bound}",
        f"  draws   {', '.join(contract.draws)}",
    ]
    lines += [f"  law     {law.name}" for law in contract.laws]
    if mutants:
        lines.append(f"  kills   {len(mutants)} mutants: {'; '.join(mutants)}")
    return lines
