"""Writes the table of judged functions: the largest error as a share of its bound, or the reason for a violation."""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamaspec.benchmarks.audits.others.refused import REFUSED

HERE = Path(__file__).parent
PACKAGES = {
    "torch": "torch 2.14.1, on a CPU",
    "transformers": "transformers 5.24.0, on torch's CPU",
    "scipy": "scipy 1.18.1",
    "liger_kernel": "Liger-Kernel 0.8.5, in Triton 3.8.0's interpreter",
    "fla": "flash-linear-attention (fla-core 0.6.0), in Triton 3.8.0's interpreter",
    "flash_attn": "flash-attn's Triton at 0251105a, in Triton 3.8.0's interpreter",
    "unsloth": "unsloth at 015bdef0, in Triton 3.8.0's interpreter",
    "flag_gems": "FlagGems 5.0.2, in Triton 3.8.0's interpreter",
    "vllm": "vLLM 0.33.0, in Triton 3.8.0's interpreter",
    "sglang": "SGLang 0.5.23, in Triton 3.8.0's interpreter",
    "bitsandbytes": "bitsandbytes 0.50.2, on a CPU",
    "torchao": "torchao 0.18.0, on a CPU",
    "quanto": "optimum-quanto 0.2.7, on a CPU",
}
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def library_of(candidate: str) -> tuple[str, str]:
    """Split a candidate's name into its library and its function.

    >>> library_of("llamaspec.benchmarks.audits.others.flash_attn_ops:rmsnorm")
    ('flash_attn', 'rmsnorm')
    """
    module, _, function = candidate.partition(":")
    return module.rpartition(".")[2].removesuffix("_ops"), function


def called(library: str) -> dict[str, str]:
    """Map each function of LIBRARY_ops.py to the library's function that it calls.

    We take the name of the library's function from the first line of the docstring in LIBRARY_ops.py.
    """
    tree = ast.parse((HERE / f"{library}_ops.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    lines = {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in functions}
    return {name: re.sub(r"^(Call|Return) (the )?|\.$", "", line) for name, line in lines.items()}


def replay_of(library: str, function: str) -> str:
    """Return the name of the replay file of a violation.

    >>> replay_of("flash_attn", "rmsnorm")
    'flash-attn-rmsnorm.json'
    """
    return f"{library}-{function}.json".replace("_", "-")


def _row(library: str, function: str, rows: Sequence[dict[str, Any]], what: str) -> str:
    accepted = [f"{SHORT[r['dtype']]} {r['share']:.2f}" for r in rows if r["outcome"] == "within bounds"]
    refused = [SHORT[r["dtype"]] for r in rows if r["outcome"] != "within bounds"]
    not_accepted = ""
    if refused:
        _, why = REFUSED[f"{library}:{function}"]
        not_accepted = f"{', '.join(refused)}: {why} ([replay]({replay_of(library, function)}))"
    return f"| {what} | {rows[0]['op']} | {', '.join(accepted)} | {not_accepted} | `{library}_ops:{function}` |"


def table(logs: Sequence[Path]) -> str:
    """Render the JSON rows in `logs` as Markdown, with a section for each package."""
    verdicts: dict[str, dict[str, list[dict[str, Any]]]] = {library: {} for library in PACKAGES}
    for log in logs:
        for row in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
            library, function = library_of(row["candidate"])
            verdicts[library].setdefault(f"{function} {row['op']}", []).append(row)
    lines = []
    for library, functions in verdicts.items():
        if not functions:
            continue
        lines += [f"\n## {PACKAGES[library]}\n", "| called | op | within bounds, share used | refused | adapter |"]
        lines.append("|---|---|---|---|---|")
        names = called(library)
        for key in sorted(functions):
            function = key.partition(" ")[0]
            lines.append(_row(library, function, functions[key], names[function]))
    return "\n".join(lines)
