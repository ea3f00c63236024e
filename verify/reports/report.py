"""Reports of a run, for a person, a program or a CI system."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.contract import Arguments, Contract
from llamaspec.verify.draws.domain import domain
from llamaspec.verify.draws.draw import KINDS, LAW, MEANINGS, OF_THE_CALL, Draw, Values
from llamaspec.verify.draws.reach import reaches
from llamaspec.verify.judging.formula import ALGEBRA
from llamaspec.verify.judging.runner import Report
from llamaspec.verify.judging.timing import Timing

WIDTH = 110
FEW = 16  # most numbers of all arrays that we print
MOST_KINDS = 6  # most kinds of input in a line


def headline(report: Report) -> str:
    """Format one line: the verdict, the number of examples that were judged, the time and the seed."""
    if report.not_taken:
        why = f"{report.not_taken}; use --dtype {report.dtype} to judge it anyway"
        return f"{report.outcome:14}{report.op} {report.dtype}  {report.candidate}  ({why})"
    number = "1 example" if report.examples == 1 else f"{report.examples} examples"
    if report.shapes and report.outcome != "violated":
        number += " of 1 shape" if report.shapes == 1 else f" of {report.shapes} shapes"
    if report.cut_short:
        number += " before the time ran out"
    if report.outcome != "violated":
        number += f", {report.compared:,} numbers compared"
    if report.seed is not None:
        number += f", seed {report.seed}"
    details = f"{number}, {report.seconds:.1f} s"
    if report.outcome != "violated":
        details += f", at most {max(report.worst.hard, report.nearest.hard):.2g} of the bound"
    return f"{report.outcome:14}{report.op} {report.dtype}  {report.candidate}  ({details})"


def counterexample(
    report: Report, contract: Contract | None, *, replay: str | None = None, advice: bool = True
) -> list[str]:
    """Format the lines of a report.

    For a right candidate: the verdict and, if the user limited variables of the draws, the share of values that
    remained.

    For a counterexample, up to eight lines: verdict; draw; inputs, or a legend if there are many numbers; the fault;
    conditioning; the convention that the fault depends on, if any; a note if the shape is one of the contract's large
    ones; and `replay`, the command that repeats the call.

    One more line says if the contract is a weaker one, and one more says if all arrays were contiguous. A walk through
    a model has no contract, so it has no inputs to show. Without `advice`, the lines name no option of `verify`.
    """
    lines = [headline(report)]
    finding = report.worst.finding
    if report.weaker:
        lines.append(f"  a weaker contract: {report.weaker}")
    if report.contiguous and advice:
        lines.append("  --contiguous: all arrays were contiguous")
    if report.outcome != "violated" and report.shares:
        lines.append("  " + coverage(report.shares))
        if contract and (unchecked := [law.name for law in contract.laws if report.shares.keys() & set(law.sets)]):
            lines.append(f"  skipped laws, because they need other draws: {'; '.join(unchecked)}")
    if report.differs:
        lines.append(f"  not deterministic: {report.differs}" + "; --deterministic counts that as wrong" * advice)
    lines += [f"  not judged: {count} draws, because {reason}" for reason, count in report.not_judged.items()]
    if report.explained and report.outcome == "within bounds":
        lines.append(f"  {report.explained}")
    if report.formula and not (finding and finding.kind == ALGEBRA):  # otherwise the finding says the same
        lines.append(f"  {report.formula.line()}")
    if finding is None:
        return [*lines, *_nearness(report)]
    if report.worst.draw:
        lines.append("  " + _draw(report.worst.draw))
    if contract:
        lines.append("  " + (_inputs(contract, report) or _legend(contract, report.worst.draw)))
    lines.append(f"  {finding.kind}: {finding.message}")
    if finding.condition:
        lines.append(f"  {finding.condition}")
    if contract:
        convention, option = _convention(contract, report)
        convention += f": {option}" if advice and option else ""
        lines += [f"  {hint}" for hint in (convention, _large(contract, report)) if hint]
    if replay:
        lines.append(f"  {replay}")
    return lines


def _nearness(report: Report) -> list[str]:
    """Format the largest share of the bound for each kind of array, and the number that came nearest to its bound.

    The largest share comes first. We omit shares below a hundredth of the largest.
    """
    lines = []
    for name, used in report.shares_used.items():
        if not set(used) <= set(KINDS):
            continue
        largest = max(used.values())
        ranked = sorted(((share, kind) for kind, share in used.items() if share), reverse=True)
        kinds = [f"{kind} {share:.2g}" for share, kind in ranked if share >= largest / 100]
        if len(used) > 1 and kinds:
            lines.append(f"  of the bound, by {name}: {', '.join(kinds[:MOST_KINDS])}")
    if report.nearest.place:
        lines.append(f"  nearest {report.nearest.place}, for {_draw(report.nearest.draw)}")
    return lines


def coverage(shares: Mapping[str, tuple[int, int]]) -> str:
    """Describe which share of a contract's draws remains if a user limits variables to some values.

    >>> coverage({"hidden": (1, 6), "n": (5, 25)})
    "narrowed to 3.3 % of the contract's draws: hidden 1 of 6, n 5 of 25"
    """
    share = prod(remaining / of for remaining, of in shares.values())
    parts = ", ".join(f"{name} {remaining} of {of}" for name, (remaining, of) in shares.items())
    return f"narrowed to {100 * share:.2g} % of the contract's draws: {parts}"


def _convention(contract: Contract, report: Report) -> tuple[str, str]:
    """Return the convention that decides the expected result, and the option that leaves out such inputs, or "".

    Other kernels may give a row of only -inf a different result, or may rely on finite numbers beyond a length.
    """
    draw = report.worst.draw
    if report.worst.finding is None or report.worst.finding.kind not in ("not finite", "value", "suspicious"):
        return "", ""
    arguments = _arguments(contract, report)
    arrays = [a.astype(np.float64) for a in arguments.values() if isinstance(a, np.ndarray) and a.dtype.kind in "fV"]
    blind = any(a.ndim and a.size and np.any(np.all(np.isneginf(a), axis=-1)) for a in arrays)
    for name in ("hidden", "mask"):
        if blind and draw.get(name, "none") != "none":
            expected = "by convention, this contract expects zeros for a row of only -inf"
            return expected, f"--set {name}=none leaves out such rows"
    if draw.get("padding") and any(np.any(np.isnan(a)) for a in arrays):
        return "the inputs hold NaN where a kernel must not read", "--set padding=0 writes 0 there instead"
    return "", ""


def _large(contract: Contract, report: Report) -> str:
    """Say up to which size earlier draws were right, if a large shape was wrong. Returns "" for a replay."""
    if report.seed is None or report.outcome != "violated":
        return ""
    usual = {reach.dimension: reach.usual for reach in reaches(contract)}
    for name in {**contract.large.sizes, **contract.large.widest}:
        if name in report.shares:
            continue
        value = report.worst.draw.get(name)
        if (
            value in (*contract.large.sizes.get(name, ()), contract.large.widest.get(name))
            and isinstance(value, int)
            and value > usual.get(name, value)
        ):
            return f"a large draw: earlier draws, with {name} up to {usual[name]:,}, were right"
    return ""


def _draw(draw: Draw) -> str:
    return " ".join(f"{name}={short(value)}" for name, value in draw.items() if name != LAW)


def short(value: Any) -> str:
    """Format a drawn value as a person types it; abbreviate a long list of one repeated number.

    >>> short((5, 5, 3)), short((2,) * 1041)
    ('(5,5,3)', '(2,)*1041')
    """
    if isinstance(value, tuple) and len(value) > FEW and len(set(value)) == 1:
        return f"({value[0]},)*{len(value)}"
    return _value_text(value)


def _value_text(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value).replace(" ", "")


def legend(contract: Contract, draw: Draw) -> list[tuple[str, Any, str]]:
    """List name, value and meaning of each variable of a draw."""

    def meaning(name: str, value: Any) -> str:
        if isinstance(value, Values):
            return MEANINGS[value.kind] + (f", times 2^{value.exponent}" if value.exponent else "")
        return "decides the shapes" if name in contract.shapes else f"one of {domain(contract.draws[name])}"

    return [(name, value, meaning(name, value)) for name, value in draw.items() if name not in OF_THE_CALL]


def _legend(contract: Contract, draw: Draw) -> str:
    """Describe the layouts of the arguments and the kinds of array of a draw."""
    kinds = {value.kind: MEANINGS[value.kind] for value in draw.values() if isinstance(value, Values)}
    return "; ".join([contract.domain, *(f"{kind}: {meaning}" for kind, meaning in kinds.items())])


def _inputs(contract: Contract, report: Report) -> str:
    """Format the arguments in one line. Returns "" if they have too many numbers for a line."""
    arrays = {name: value for name, value in _arguments(contract, report).items() if isinstance(value, np.ndarray)}
    if sum(array.size for array in arrays.values()) > FEW:
        return ""
    line = " ".join(f"{name}={_numbers(array)}" for name, array in arrays.items())
    return line if len(line) <= WIDTH else ""


def _arguments(contract: Contract, report: Report) -> Arguments:
    draw = {name: value for name, value in report.worst.draw.items() if name not in OF_THE_CALL}
    return contract.arguments(precision=precision(report.dtype), **draw)


def _numbers(array: np.ndarray) -> str:
    if array.dtype.kind in "biu":
        return str(array.tolist()).replace(" ", "")
    listed = np.vectorize(lambda number: f"{number:.9g}", otypes=[object])(array.astype(np.float64)).tolist()
    return str(listed).replace("'", "").replace(" ", "")


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """Convert all reports to JSON."""
    return {
        "outcome": "violated" if any(report.outcome == "violated" for report in reports) else "within bounds",
        "reports": [
            {
                "op": report.op,
                "candidate": report.candidate,
                "dtype": report.dtype,
                "outcome": report.outcome,
                "examples": report.examples,
                "compared": report.compared,
                "shapes": report.shapes,
                "narrowed": {name: list(share) for name, share in report.shares.items()},
                "weaker_contract": report.weaker,
                "contiguous": report.contiguous,
                "cut_short": report.cut_short,
                "not_taken": report.not_taken,
                "not_deterministic": report.differs,
                "explained": report.explained,
                "not_judged": dict(report.not_judged),
                "of_the_bound": {
                    name: {kind: _finite(share) for kind, share in used.items()}
                    for name, used in report.shares_used.items()
                },
                "nearest": report.nearest.place,
                "seconds": round(report.seconds, 3),
                "timing": _timing(report.timing),
                "algebra": report.formula.as_json() if report.formula else None,
                "seed": report.seed,
                "hard": _finite(report.worst.hard),
                "alarm": _finite(report.worst.alarm),
                "draw": {name: _value_text(value) for name, value in report.worst.draw.items()},
                "finding": report.worst.finding._asdict() if report.worst.finding else None,
            }
            for report in reports
        ],
    }


def _timing(timing: Timing | None) -> dict[str, Any] | None:
    if timing is None:
        return None
    draw = {name: short(value) for name, value in timing.draw.items()}
    return {"draw": draw, "seconds": {name: list(rounds) for name, rounds in timing.seconds.items()}}


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None  # JSON has no infinity


WRONG = ("violated",)  # outcomes that fail a run; --strict adds "suspicious"


def as_junit(reports: Sequence[Report], lines: Sequence[Sequence[str]], *, wrong: Sequence[str] = WRONG) -> str:
    """Return the text of a JUnit file: a test case per op and dtype.

    `lines` are the lines that `verify` prints for each report.

    A report with an outcome in `wrong` fails. A report without a verdict is skipped. A suspicious result that does not
    fail has the lines as its output.
    """
    outcomes = [report.outcome for report in reports]
    suite = ElementTree.Element(
        "testsuite",
        name="llamaspec verify",
        tests=str(len(reports)),
        failures=str(sum(outcome in wrong for outcome in outcomes)),
        skipped=str(outcomes.count("not judged")),
        time=f"{sum(report.seconds for report in reports):.3f}",
    )
    for report, printed in zip(reports, lines, strict=True):
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=report.candidate,
            name=f"{report.op} {report.dtype}",
            time=f"{report.seconds:.3f}",
        )
        finding, text = report.worst.finding, "\n".join(printed)
        if report.outcome == "not judged":
            ElementTree.SubElement(case, "skipped", message=report.not_taken)
        elif finding and report.outcome in wrong:
            ElementTree.SubElement(case, "failure", message=f"{finding.kind}: {finding.message}").text = text
        elif finding:
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"


def as_annotations(
    reports: Sequence[Report], lines: Sequence[Sequence[str]], *, wrong: Sequence[str] = WRONG
) -> list[str]:
    """Format annotations for GitHub Actions: errors for outcomes in `wrong`, warnings for other suspicious outcomes.

    The message is what `verify` prints (`lines`), without the verdict. If the candidate is named by its file, the
    annotation points at the line of its definition.
    """
    annotations = []
    for report, printed in zip(reports, lines, strict=True):
        if report.worst.finding is None:
            continue
        kind = "error" if report.outcome in wrong else "warning"
        fields = {"title": f"{report.outcome}: {report.op} {report.dtype}", **_defined(report.candidate)}
        properties = ",".join(f"{name}={_escaped(value, also=':,')}" for name, value in fields.items())
        message = "\n".join(line.strip() for line in printed[1:])
        annotations.append(f"::{kind} {properties}::{_escaped(message)}")
    return annotations


def _escaped(text: str, *, also: str = "") -> str:
    """Escape the characters that end a command of GitHub Actions, and the characters `also`, which end a property."""
    for character in f"%\r\n{also}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _defined(candidate: str) -> dict[str, str]:
    """Find the file and the line of a candidate named file.py:function, if the file can be read."""
    path, _, name = candidate.rpartition(":")
    try:
        source = Path(path).read_text(encoding="utf-8") if path.endswith(".py") else ""
    except OSError:
        return {}
    match = re.search(rf"^(def {re.escape(name)}\(|{re.escape(name)} *=)", source, re.MULTILINE)
    if not match:
        return {"file": path} if source else {}
    return {"file": path, "line": str(source.count("\n", 0, match.start()) + 1)}
