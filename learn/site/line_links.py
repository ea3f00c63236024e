"""Links of documents to lines of source files: `[softmax](../reference/softmax.py#L24)`.

The text of such a link is the name that the line defines, or a part of the line, so the line is found again when it has
moved: the site always has the right number, and `python -m llamaspec.learn.site lines` corrects the documents.
"""

import ast
import os
import re
from pathlib import Path

LINE_LINK = re.compile(r"\[`?([^\]`]+)`?\]\((?!https?:)([^)#\s]+\.py)#L(\d+)\)")


def line_of(source: str, text: str) -> int:
    """Return the number of the line that defines the name `text`, or else of the first line that contains it.

    Raises ValueError if no line does.

    >>> line_of("a = f(1)\\n\\ndef f(x):\\n    return x + 1", "f"), line_of("a = f(1)\\nb = 2", "f(1)")
    (3, 1)
    """
    lines = source.splitlines()
    defines = re.compile(rf"\s*(async def|def|class) {re.escape(text)}\b|\s*{re.escape(text)}\b *(:[^=]*)?=(?!=)")
    defining = [number for number, line in enumerate(lines, 1) if defines.match(line)]
    containing = [number for number, line in enumerate(lines, 1) if text in line]
    if not containing:
        raise ValueError(f"no line contains {text!r}")
    return (defining or containing)[0]


def renumbered(document: Path, root: Path) -> str:
    """Return the text of a document, after writing the current line number into every link to a line.

    Raises ValueError if a link's text is in no line of its file, and FileNotFoundError for a missing file.
    """

    def renumber(match: re.Match) -> str:
        file = Path(os.path.normpath(document.parent / match[2]))
        try:
            number = line_of(file.read_text(encoding="utf-8"), match[1])
        except ValueError as error:
            raise ValueError(f"{document.relative_to(root)}: {file.relative_to(root)}: {error}") from None
        return match[0].replace(f"#L{match[3]})", f"#L{number})")

    return LINE_LINK.sub(renumber, document.read_text(encoding="utf-8"))


def anchor(source: str, path: str, line: int) -> str:
    """Return the anchor of a line on the page of its file.

    On the page of a file of reference/, this is the anchor of the function or class around the line. If there is none,
    or if the page has a single function, it is "page".
    """
    if not path.startswith("reference/"):
        return f"__span-0-{line}"
    documented = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
    ]
    if len(documented) < 2:
        return "page"
    around = [node.name.lower() for node in documented if node.lineno <= line <= (node.end_lineno or 0)]
    return around[0] if around else "page"
