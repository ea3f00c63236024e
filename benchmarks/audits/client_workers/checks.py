"""Runs the checks of one client, and prints one JSON object per check."""

import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

URL, MODEL = sys.argv[1:3]
QUESTION = "Tell me a story about a fox."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "bear"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["animal", "count"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "count_animals", "description": "Count.", "parameters": PARAMETERS},
}
TEXTS = ["The fox found a kite.", "A bear swims.", "The fox found a red kite."]


def are_near(vectors: list[list[float]]) -> bool:
    """Return whether the first vector is nearer to the third (of a similar text) than to the second."""
    first, second, third = vectors
    return sum(a * b for a, b in zip(first, third, strict=True)) > sum(
        a * b for a, b in zip(first, second, strict=True)
    )


def run(checks: Mapping[str, Callable[[], Any]], packages: list[str]) -> None:
    """Run each check. A check succeeds if it returns a true value."""
    for name, check in checks.items():
        try:
            outcome = "ok" if check() else "wrong answer"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"check": name, "outcome": outcome}), flush=True)
    print(json.dumps({"versions": ", ".join(f"{package} {version(package)}" for package in packages)}))
