"""The frame of the pages that `verify --html` and `conform --html` write."""

from collections.abc import Iterable
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1240px; padding: 0 1em; color: #222 }
h2 { overflow-wrap: anywhere }
pre { background: #f6f6f6; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere }
pre { font-size: 13px; line-height: 1.4 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(540px, 100%), 1fr)); gap: 1em }
.wide { overflow-x: auto }
.plots svg text { font-size: 14px }
.plots svg { width: 100%; height: auto; border: 1px solid #ddd }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: left; border-bottom: 1px solid #ddd }
.violated { color: #b51d14 } .suspicious { color: #96690b } .within { color: #087a3d }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Return a self-contained HTML page. `parts` are HTML, and come below the title."""
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
            f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
            *parts,
            "</body>\n</html>\n",
        ]
    )
