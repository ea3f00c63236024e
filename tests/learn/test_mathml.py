"""Formulas of docstrings as MathML: no letter is lost, and the marks become fractions, roots, indices and exponents."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llamaspec.learn.mathml import GREEK, block, typeset
from llamaspec.learn.site import beside, prose
from llamaspec.learn.site.stage import reading_order
from tests.support.processes import REPOSITORY

NAMES = {letter: name for name, letter in GREEK.items()} | {"∈": "in", "∞": "inf"}


def formulas() -> Iterator[tuple[str, str]]:
    """Yield every formula of the docstrings in reference/, as it is written and as HTML."""
    for path in reading_order(REPOSITORY):
        for pair in beside.pairs(Path(REPOSITORY / path).read_text(encoding="utf-8")):
            for lines in (lines for _, text in pair.docstrings for lines in prose._blocks(text)):
                rendered = prose._block(lines, {})
                if rendered.startswith('<div class="formula">'):
                    yield "\n".join(lines), rendered


def letters(text: str) -> list[str]:
    """Return the letters and digits of a formula, sorted.

    The order in the HTML may differ, because a cell of a table may continue on the next line of the docstring.
    """
    for letter, name in NAMES.items():
        text = text.replace(letter, name)
    return sorted(re.sub(r"\bsqrt|\bsum(?![a-z])|\bhttps://|\W|_", "", text))


def test_no_letter_of_a_docstring_is_lost():
    pairs = list(formulas())
    assert len(pairs) > 80
    for written, rendered in pairs:
        root = ElementTree.fromstring(f"<all>{rendered}</all>".replace("&emsp;", " "))
        assert letters("".join(root.itertext())) == letters(written), written


def test_formulas_have_no_marks_of_plain_text():
    for written, rendered in formulas():
        elements = ElementTree.fromstring(f"<all>{rendered}</all>".replace("&emsp;", " "))
        for element in elements.iter():
            hat = element.tag == "mover"
            marks = [part.text or "" for part in element if part.tag in ("mi", "mo", "mn") and not hat]
            assert not re.search(r"\^|_(?!dim|heads)|<-|<=|sqrt", " ".join(marks)), written


@pytest.mark.parametrize(
    ("formula", "markup"),
    [
        ("a b / c", "<mfrac><mrow><mi>a</mi>{}<mi>b</mi></mrow><mrow><mi>c</mi></mrow></mfrac>"),
        ("a/2 b", "<mfrac><mrow><mi>a</mi></mrow><mrow><mn>2</mn></mrow></mfrac>{}<mi>b</mi>"),
        ("1 / sqrt(x)", "<mfrac><mrow><mn>1</mn></mrow><mrow><msqrt><mrow><mi>x</mi></mrow></msqrt></mrow></mfrac>"),
        ("theta^(-2i)", '<msup><mi>θ</mi><mrow><mo form="prefix">−</mo><mn>2</mn>{}<mi>i</mi></mrow></msup>'),
        ("w^_i", '<msub><mover accent="true"><mi>w</mi><mo>^</mo></mover><mi>i</mi></msub>'),
        ("x*", "<msup><mi>x</mi><mo>*</mo></msup>"),
        ("dx_i", "<msub><mrow><mi>d</mi><mi>x</mi></mrow><mi>i</mi></msub>"),
        ("t in T", "<mi>t</mi><mo>∈</mo><mi>T</mi>"),
    ],
)
def test_a_formula_becomes_mathml(formula: str, markup: str):
    assert block(formula) == (f'<math display="block"><mrow>{markup.format('<mspace width="0.17em"/>')}</mrow></math>')


def test_a_word_before_a_sign_is_prose_and_wide_spaces_stay():
    assert typeset("3 from -4").startswith("<math") and " from <math" in typeset("3 from -4")
    assert '<mi>k</mi><mspace width="1em"/><mo stretchy="false">[</mo>' in typeset("k  [keys, 2]")


def test_a_long_formula_can_be_broken_at_relations_signs_and_prose():
    assert typeset("y = rint(a + b, c) - z for all z").count("<math") == 6
