"""docs/quantizers-compared.md equals what its command writes, except for machine-dependent roundings of products."""

import re

import pytest

from llamaspec.learn.site import compared
from tests.support.processes import REPOSITORY

NUMBER = re.compile(r"(?<=\| )\d+\.?\d*(?= \|)")
PAGE = (REPOSITORY / "docs/quantizers-compared.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|]+?) ((?:\|[ \d.]*)+)\|$", re.M)


@pytest.mark.slow
def test_the_page_has_the_figures_that_the_command_computes():
    page = compared.page()
    assert NUMBER.sub("", page) == NUMBER.sub("", PAGE)
    for actual, stored in zip(NUMBER.findall(page), NUMBER.findall(PAGE), strict=True):
        assert abs(float(actual) - float(stored)) <= 0.1 + 0.1 * float(stored)


def test_the_methods_differ_as_the_page_says():
    rows = {
        name: [float(figure) for figure in figures.replace("|", " ").split()] for name, figures in ROW.findall(PAGE)
    }
    weights, outputs = ({name: rows[name][at] for name in ("RTN", "HQQ", "AWQ", "GPTQ", "QAT")} for at in (1, 2))
    assert all(weights[name] > weights["RTN"] and outputs[name] < outputs["RTN"] for name in ("AWQ", "GPTQ", "QAT"))
    assert min((name for name in outputs if name != "HQQ"), key=outputs.__getitem__) == "GPTQ"
    assert rows["SmoothQuant, int8 W and int8 X"][1] < rows["RTN, int8 W and int8 X"][1]
