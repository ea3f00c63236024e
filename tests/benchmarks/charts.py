"""Read the bars of a benchmark's SVG charts, for tests."""

from xml.etree import ElementTree

from llamaspec.benchmarks.common import svg


def rectangles(page: str) -> list[float]:
    """Return the width of each bar in an SVG chart."""
    drawn = ElementTree.fromstring(page).iter("{http://www.w3.org/2000/svg}rect")
    return [float(bar.get("width", "0")) for bar in drawn if bar.get("height") == str(svg.ROW - 6)]
