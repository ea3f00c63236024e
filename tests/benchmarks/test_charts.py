"""SVG charts: bars and lines match their numbers and stay within the page."""

from xml.etree import ElementTree

import pytest

from llamaspec.benchmarks.common import svg
from tests.benchmarks.charts import rectangles


def test_bars_are_as_long_as_their_numbers():
    page = svg.bars("a < b", "on this & that", {"x": {"ours": 0.25, "theirs": 0.75}, "y": {"ours": 1.0}})
    quarter, three_quarters, full = rectangles(page)
    assert three_quarters == pytest.approx(3 * quarter, abs=0.2)
    assert full == pytest.approx(4 * quarter, abs=0.4)
    assert "a &lt; b" in page and "this &amp; that" in page and "75 %" in page


def test_a_bar_over_100_percent_stays_on_the_page():
    page = svg.bars("t", "r", {"x": {"ours": 1.08}, "y": {"ours": 1.0}, "z": {"ours": 7.5}})
    beyond, full, far = rectangles(page)
    assert beyond == pytest.approx(1.08 * full, abs=0.2)
    assert svg.LABELS + far <= svg.WIDTH - svg.NUMBER and "108 %" in page and "750 %" in page


@pytest.mark.parametrize("points", [[(128, 9.0)], [(128, 9.0), (256, 4.0), (8192, 0.5)], [(1, 5.0), (32, 5.0)]])
def test_lines_stay_on_the_page(points: list[tuple[float, float]]):
    page = ElementTree.fromstring(svg.lines("t", "r", {"decode": points}, x="tokens", y="1/s"))
    places = [
        (float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in page.iter("{http://www.w3.org/2000/svg}circle")
    ]
    assert len(places) == len(points)
    assert all(70 <= x <= svg.WIDTH - 30 and svg.TOP <= y <= 430 for x, y in places)
    assert places == sorted(places)  # to the right, and down, since the numbers fall
