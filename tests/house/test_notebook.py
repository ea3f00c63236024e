"""docs/first-steps.ipynb: every cell runs and prints what the notebook shows."""

import numpy as np

from llamaspec.learn.site.notebook import code_cells, printed, read, stored_outputs
from tests.support.processes import REPOSITORY


def test_every_cell_prints_what_the_notebook_shows():
    notebook = read(REPOSITORY / "docs/first-steps.ipynb")
    assert len(code_cells(notebook)) >= 6 and all(stored_outputs(notebook)[:2])
    with np.errstate():  # a cell may change how NumPy warns
        assert printed(notebook) == stored_outputs(notebook)
    assert stored_outputs(notebook)[-2].startswith("violated\n") and stored_outputs(notebook)[-1] == "within bounds\n"


def test_a_notebook_that_shows_something_else_is_seen():
    cell = {"cell_type": "code", "source": ["print(1)"], "outputs": [{"text": ["2\n"]}]}
    assert printed({"cells": [cell]}) == ["1\n"] != stored_outputs({"cells": [cell]})
