"""Find a Python with libraries that we do not depend on. LLAMASPEC_OTHER_PYTHON lists Pythons, separated by colons."""

import os
import subprocess
from functools import cache

ASK = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"


@cache
def python_with(*libraries: str) -> str | None:
    """Find a Python that has the libraries, without importing them: some cannot be imported without a GPU."""
    for python in filter(None, os.environ.get("LLAMASPEC_OTHER_PYTHON", "").split(os.pathsep)):
        if not subprocess.run([python, "-c", ASK, *libraries], capture_output=True).returncode:
            return python
    return None
