"""Golden values that other programs computed, stored in `tests/goldens` with the scripts that write them."""

import json
from typing import Any

from tests.support.processes import REPOSITORY


def read_golden(name: str) -> Any:
    """Read tests/goldens/NAME.json."""
    return json.loads((REPOSITORY / "tests" / "goldens" / f"{name}.json").read_text(encoding="utf-8"))
