"""`verify --html` writes a page that needs no other file, with a dot for each result, placed by its error."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import click
import numpy as np
import pytest

from llamaspec.benchmarks.common import svg
from llamaspec.cli import llamaspec
from llamaspec.commands.verify_page import page
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.judging.runner import Report, verify
from llamaspec.verify.reports.report import counterexample
from tests.support.processes import interrupt_within

SVG = "{http://www.w3.org/2000/svg}"


def added(x, y):
    return x + y


def off(x, y):
    z = x + y
    z[:, 100:] += np.float32(0.25)
    return z


def report(candidate) -> Report:
    contract, candidate = CONTRACTS["add"], Direct(candidate)
    return verify(contract, candidate, precision=precision("float32"), examples=60, seed=0, shrink=False)


def page_of(*reports: Report) -> str:
    return page(reports, CONTRACTS, [counterexample(report, CONTRACTS["add"]) for report in reports])


def charts(text: str) -> dict[str, ElementTree.Element]:
    """Parse the charts of a page, by title."""
    drawings = [ElementTree.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    return {str(drawing.findtext(f"{SVG}text")): drawing for drawing in drawings}


@pytest.fixture(scope="module")
def pages() -> tuple[str, str]:
    return page_of(report(added)), page_of(report(off))


def test_a_page_needs_nothing_else(pages):
    for text in pages:
        assert re.findall(r"https?://[^\"]*", text.replace("http://www.w3.org/2000/svg", "")) == []
        assert not re.search(r"<(script|link|img|iframe)|src=", text)


def test_every_plot_is_there(pages):
    for text in pages:
        assert list(charts(text)) == [
            "Error and bound",
            "Share of the bound by size",
            "Share of the bound by position",
            "Share of the bound by kind of array",
        ]


def test_errors_beyond_the_bound_have_a_color_of_their_own(pages):
    within, violated = (charts(text)["Share of the bound by position"] for text in pages)
    colors = [{dot.get("fill") for dot in chart.iter(f"{SVG}circle")} for chart in (within, violated)]
    assert colors == [{svg.COLORS[0]}, {svg.COLORS[1]}]  # the other errors vanish next to one of 0.25


def box(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """Estimate the left, top, right and bottom edge of a text, with 8 pixels per letter and a height of 14 pixels."""
    x, y, width = float(text.get("x", 0)), float(text.get("y", 0)), 8 * len(text.text or "")
    left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
    return left, y - 11, left + width, y + 3


def test_no_texts_of_a_chart_overlap(pages):
    for title, chart in [entry for text in pages for entry in charts(text).items()]:
        texts = [text for text in chart.iter(f"{SVG}text") if text.text]
        for first, second in itertools.combinations(texts, 2):
            a, b = box(first), box(second)
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (title, first.text, second.text)


def test_a_kind_beyond_its_bound_is_in_the_chart(pages):
    """If a value exceeds its bound, the bar of its kind of array has the color for that, even if the value is NaN."""
    _, violated = pages
    not_finite = page_of(report(lambda x, y: np.full_like(x, np.nan)))
    for text, label in ((violated, r"[\d,]+ %"), (not_finite, "\N{INFINITY} %")):
        chart = charts(text)["Share of the bound by kind of array"]
        assert svg.COLORS[1] in {bar.get("fill") for bar in chart.iter(f"{SVG}rect")}
        assert any(re.fullmatch(label, text.text or "") for text in chart.iter(f"{SVG}text") if text.get("fill"))


def test_a_page_fits_a_narrow_screen(pages):
    for text in pages:
        widths = [int(width) for width in re.findall(r"minmax\((\d+)px", text)]
        assert not widths and text.count('<div class="wide"><table>') == text.count("<table>")


def test_a_page_says_what_the_lines_say(pages):
    within, violated = pages
    assert '<td class="within">within bounds</td>' in within and "The draw nearest to its bound" in within
    assert '<td class="violated">violated</td>' in violated and "The counterexample's draw" in violated
    assert "expected " in violated and ": off by 0.25" in violated
    assert re.search(r"<td>rows</td><td>\d+</td><td>decides the shapes</td>", violated)


def test_the_command_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def add(x, y):\n    return x + y\n")
    few = ("verify", "add", "--candidate", "mine.py", "--arrays", "numpy", "--examples", "5", "--seed", "1")
    llamaspec.main([*few, "--html", "page.html"], standalone_mode=False)
    first, *_ = capsys.readouterr().out.splitlines()
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert first in text and text.count("<h2") == 3  # one section per dtype
    with pytest.raises(click.UsageError, match=r"none/page\.html: No such file or directory"):
        llamaspec.main([*few, "--html", "none/page.html"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("within bounds")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(Path, "write_text", interrupt_within)
    with pytest.raises(click.Abort):
        llamaspec.main([*few, "--html", "page.html"], standalone_mode=False)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text and set(tmp_path.iterdir()) == before


def test_what_a_candidate_is_called_is_no_markup():
    named = Direct(added, name="<b>:f&g")
    report = verify(CONTRACTS["add"], named, precision=precision("float32"), examples=2, seed=0)
    assert "&lt;b&gt;:f&amp;g" in page_of(report) and "<b>" not in page_of(report)


def test_a_result_without_an_error_has_no_plot_of_it():
    exact = verify(
        CONTRACTS["embedding"],
        Direct(lambda tokens, table: table[tokens]),
        precision=precision("float32"),
        examples=3,
        seed=0,
    )
    assert exact.outcome == "within bounds"
    assert "<svg" not in page([exact], CONTRACTS, [["within bounds"]])


def test_a_level_is_drawn_and_is_on_the_page():
    chart = ElementTree.fromstring(svg.scatter("t", "r", {"a": [(1, 1e-5), (100, 1e-3)]}, x="n", y="share", level=1))
    (level,) = [line for line in chart.iter(f"{SVG}line") if line.get("stroke") == "#222"]
    assert svg.TOP < float(level.attrib["y1"]) == float(level.attrib["y2"])
    assert all(float(dot.attrib["cy"]) > float(level.attrib["y1"]) for dot in chart.iter(f"{SVG}circle"))
