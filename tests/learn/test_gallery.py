"""docs/gallery.md has a row for each quantization scheme, and its pictures show what the quantizers compute."""

import re

import numpy as np
import pytest

from llamaspec.learn.quantizers.schemes import SCHEMES
from llamaspec.learn.site.gallery import SPEEDS, picture, picture_of, speeds
from llamaspec.model.checkpoints.open import open_checkpoint
from tests.support.processes import REPOSITORY

PAGE = (REPOSITORY / "docs/gallery.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| \[([^]]+)\]\(\.\./reference/quantizers/(.*)$", PAGE, re.M))
NOT_OF_WEIGHTS = {"__init__", "blocks", "packing", "schemes", "ops", "ggml"} | {
    *("kv_cache", "fixed_point", "ggml_activations", "qat", "ggml_lattices", "ggml_grids"),
    "ggml_search",  # the page says so
}


def test_every_scheme_has_a_row_and_every_file_of_quantizers_a_scheme():
    assert set(SCHEMES) < set(ROWS) and len(ROWS) == len(SCHEMES) + 3
    for name, scheme in SCHEMES.items():
        assert ROWS[name].startswith(f"{scheme.page}) | {scheme.bits:.4g} | {scheme.guarantee} | ")
        assert f"({picture_of(name)})" in ROWS[name] and (REPOSITORY / "docs" / picture_of(name)).is_file()
    files = {path.stem for path in (REPOSITORY / "reference/quantizers").glob("*.py")} - NOT_OF_WEIGHTS
    assert files == {row.partition(".py)")[0] for row in ROWS.values()}


@pytest.mark.parametrize("name", ["q4", "fp8", "nf4", "GGUF Q4_0", "BitNet b1.58"])
def test_a_picture_is_what_the_scheme_makes_of_the_weights(name: str):
    row = open_checkpoint("stories").tensors["model.layers.0.self_attn.q_proj.weight"].read()[0].astype(np.float64)
    stored = (REPOSITORY / "docs" / picture_of(name)).read_text(encoding="utf-8")
    assert picture(SCHEMES[name].rounded, row) == stored
    other_scheme = "q8" if name != "q8" else "q4"
    assert picture(SCHEMES[other_scheme].rounded, row) != stored


def test_speeds_are_those_that_were_measured_and_named_with_machine_and_date():
    measured, relative = speeds(SPEEDS.read_text(encoding="utf-8"))
    assert measured in PAGE and re.match(r"Measured on \d{4}-\d\d-\d\d: .*AMD EPYC", measured)
    printed = {name: row.split(" | ")[6] for name, row in ROWS.items()}
    assert printed == {name: relative.get(name, "-") for name in ROWS}
    assert printed["GGUF Q6_K"].startswith("1.") and printed["gptq"] == printed["q4"] != printed["FP4"] == "-"
    assert {*relative} - {"bfloat16"} <= {*ROWS}


def test_more_bits_of_one_kind_are_closer():
    errors = {name: float(row.split(" | ")[3]) for name, row in ROWS.items() if name in SCHEMES}
    for kind in (
        ["q8", "q4"],
        ["HQQ, 4 bits", "HQQ, 3 bits", "HQQ, 2 bits"],
        [f"GGUF Q{bits}_K" for bits in (6, 5, 4, 3, 2)],
    ):
        assert [errors[name] for name in kind] == sorted(errors[name] for name in kind)
