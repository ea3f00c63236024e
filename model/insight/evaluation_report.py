"""Formats an evaluation as JSON, and as text for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from llamaspec.model.insight.evaluation import Comparison, Divergence, Evaluation
from llamaspec.model.insight.evaluation_by_tensor import TensorCost


def as_json(
    evaluation: Evaluation | Comparison, costs: Sequence[TensorCost] | None = None, **request: Any
) -> dict[str, Any]:
    """Return the values of `request` and all results, for JSON. Divergences are in nats."""
    if isinstance(evaluation, Evaluation):
        return {**request, **_evaluation(evaluation)}
    report = {
        **request,
        **_evaluation(evaluation.model),
        "base": _evaluation(evaluation.base),
        "divergence": evaluation.divergence._asdict(),
    }
    if costs is not None:
        report["by_tensor"] = [
            {"name": cost.name, "relative_error": cost.relative_error, **cost.divergence._asdict()} for cost in costs
        ]
    return report


def as_text(report: Mapping[str, Any]) -> str:
    """Format the lines that `llamaspec eval` prints.

    >>> print(as_text(as_json(Evaluation(tokens=10, bytes=20, loss=0.7), model="a", against=None)), end="")
    tokens          10, of 20 bytes
    perplexity      2.0138
    bits per byte   0.5049
    """
    lines = [
        f"tokens          {report['tokens']:,}, of {report['bytes']:,} bytes",
        f"perplexity      {report['perplexity']:.4f}",
        f"bits per byte   {report['bits_per_byte']:.4f}",
    ]
    if "base" in report:
        base, divergence = report["base"], Divergence(**report["divergence"])
        lines[1] += f", against {base['perplexity']:.4f}"
        lines[2] += f", against {base['bits_per_byte']:.4f}"
        mean, median, p99, most = (_short(value) for value in divergence[:4])
        lines += [
            f"KL divergence   mean {mean}, median {median}, 99 % {p99}, most {most} nats",
            f"same top token  {100 * divergence.same_top:.2f} %",
        ]
    if costs := report.get("by_tensor"):
        width = max(len(cost["name"]) for cost in costs)
        lines += [
            "",
            f"{'one tensor at a time':{width}} {'rel. error':>11} {'KL mean':>10} {'99 %':>10} {'same top':>9}",
        ]
        lines += [
            f"{cost['name']:{width}} {_short(cost['relative_error']):>11} {_short(cost['mean']):>10} "
            f"{_short(cost['p99']):>10} {100 * cost['same_top']:7.2f} %"
            for cost in costs
        ]
    return "\n".join(lines) + "\n"


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    return {
        **evaluation._asdict(),
        "perplexity": evaluation.perplexity,
        "bits_per_byte": evaluation.bits_per_byte,
    }


def _short(value: float) -> str:
    return f"{value:.3g}"
