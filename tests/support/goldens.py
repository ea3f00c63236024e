"""Goldens: numbers that other programs computed. `tests/goldens` has them, and the scripts that write them."""

import json
from typing import Any

from tests.support.processes import REPOSITORY


def read_golden(name: str) -> Any:
    """Read tests/goldens/NAME.json."""
    return json.loads((REPOSITORY / "tests" / "goldens" / f"{name}.json").read_text(encoding="utf-8"))
