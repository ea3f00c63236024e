"""Renders docstrings of `reference/` as HTML: paragraphs, formulas, lists and examples."""

import html
import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from llamaspec.learn.mathml import is_prose, typeset

LINK = re.compile(r"https://[\w./%#?=&~:+-]*[\w/]")
VARIABLE = r"(?<![\w.])([A-Za-z]_(?:[a-z]{1,3}|down|gate|head))\b(?![\w^(])"  # with an index
INLINE = re.compile(rf"`([^`]+)`|({LINK.pattern})|(?<![\w*])\*(\S|\S[^*]*?\S)\*(?![\w*])|{VARIABLE}")
ITEM = re.compile(r"- |\d+\. ")
SHORT = ' class="short"'  # a cell that is not broken into lines
GAP = re.compile(r"(?<=\S) {4,}(?=\S)")  # between formulas on a line


def to_html(text: str, links: Mapping[str, str]) -> str:
    """Render a dedented docstring. A name in backquotes becomes a link if `links` contains its address.

    >>> to_html("Turn x by `rope`:\\n\\n    for every x", {"rope": "rope.py.md"})
    '<p>Turn x by <a href="rope.py.md"><code>rope</code></a>:</p>\\n<div class="formula"><div>for every x</div></div>'
    """
    return "\n".join(_block(block, links) for block in _blocks(text))


def inline(text: str, links: Mapping[str, str]) -> str:
    """Render a paragraph as HTML: code in backquotes, emphasis, addresses, variables such as `x_i`; escape the rest."""
    done, rendered = 0, ""
    for match in INLINE.finditer(text):
        rendered += html.escape(text[done : match.start()], quote=False)
        code, address, stressed, variable = match.groups()
        if code is not None:
            element = f"<code>{html.escape(code, quote=False)}</code>"
            rendered += f'<a href="{links[code]}">{element}</a>' if code in links else element
        elif address is not None:
            rendered += f'<a href="{address}">{address.removeprefix("https://")}</a>'
        elif variable is not None:
            rendered += typeset(variable)
        else:
            rendered += f"<em>{inline(stressed, links)}</em>"
        done = match.end()
    return rendered + html.escape(text[done:], quote=False)


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield the lines of each block: a paragraph, an example, or indented lines (including blank lines in them)."""
    block: list[str] = []
    for line in text.splitlines():
        example = bool(block) and block[0].startswith(">>>")
        if not line:
            if block and (example or not _indented(block[0])):
                yield block
                block = []
            elif block:
                block.append(line)
        elif block and not example and (_indented(line) != _indented(block[0]) and not ITEM.match(block[0])):
            yield block
            block = [line]
        elif block and line.startswith(">>>") and not example:
            yield block
            block = [line]
        else:
            block.append(line)
            if len(block) == 2 and set(line) == {"-"}:  # a heading, which does not need a blank line after it
                yield block
                block = []
    if block:
        yield block


def _indented(line: str) -> bool:
    return line.startswith("  ")


def _block(lines: list[str], links: Mapping[str, str]) -> str:
    while not lines[-1]:
        lines = lines[:-1]
    if lines[0].startswith(">>>"):
        return _example(lines)
    if _indented(lines[0]):
        margin = min(len(line) - len(line.lstrip()) for line in lines if line)
        lines = [line[margin:] for line in lines]
        if not ITEM.match(lines[0]):
            return _formulas(lines, links)
    if len(lines) == 2 and set(lines[1]) == {"-"}:
        return f"<h3>{inline(lines[0], links)}</h3>"
    if ITEM.match(lines[0]):
        items: list[str] = []
        for line in lines:
            if ITEM.match(line):
                items.append(ITEM.sub("", line, count=1))
            else:
                items[-1] += " " + line.strip()
        tag = "ul" if lines[0].startswith("-") else "ol"
        return f"<{tag}>{''.join(f'<li>{inline(item, links)}</li>' for item in items)}</{tag}>"
    return f"<p>{inline(' '.join(lines), links)}</p>"


def _formulas(lines: list[str], links: Mapping[str, str]) -> str:
    """Render indented lines as a table if they have columns, otherwise as formulas one below the other.

    Lines before and after a blank line are rendered separately.
    """
    html = ""
    for written, group in groupby(lines, bool):
        rows = list(group)
        columns = _columns(rows)
        if written and len(columns) > 1:
            html += f'<table class="columns">{"".join(_rows(rows, columns, links))}</table>'
        elif written:
            html += "".join(f"<div>{_segments(line, links)}</div>" for line in rows)
    return f'<div class="formula">{html}</div>'


def _columns(lines: list[str]) -> list[int]:
    """Return the positions at which the columns of a table begin.

    A column begins where text follows two spaces in at least two lines, and no line has text in these two spaces.

    >>> _columns(["q8   int8", "nf4  indices"]), _columns(["y = 2 x    x = 1", "z = 3"])
    ([0, 5], [0])
    """
    starts = [match.end() for line in lines for match in re.finditer(r"(?:(?<=\S) |^) +(?=\S)", line)]
    apart = [at for at in set(starts) if all(not line[at - 2 : at].strip() for line in lines)]
    return [0, *sorted(at for at in apart if starts.count(at) > 1 and at > 3)]


def _rows(lines: list[str], columns: list[int], links: Mapping[str, str]) -> Iterator[str]:
    rows: list[list[str]] = []
    for line in lines:
        cells = [line[first:last] for first, last in zip(columns, [*columns[1:], None], strict=True)]
        if rows and cells[0].startswith(" ") and sum(not cell.isspace() and cell != "" for cell in cells) == 1:
            # the row before goes on
            rows[-1] = [f"{above} {cell.strip()}".rstrip() for above, cell in zip(rows[-1], cells, strict=True)]
        else:
            rows.append([cell.strip() for cell in cells])
    for row in rows:
        tag = "td" if rows[0][0] or row is not rows[0] else "th"  # a table's head has no text above its first column
        cells = [f"<{tag}{SHORT * (len(cell) < 15)}>{_segments(cell, links)}</{tag}>" for cell in row]
        yield f"<tr>{''.join(cells)}</tr>"


def _segments(line: str, links: Mapping[str, str]) -> str:
    parts = [inline(part, links) if is_prose(part) else typeset(part) for part in GAP.split(line)]
    return parts[0] if len(parts) == 1 else "".join(f"<span>{part}</span> " for part in parts)


def _example(lines: list[str]) -> str:
    # A blank line would end an HTML block in Markdown.
    text = html.escape("\n".join(line or "&#8203;" for line in lines), quote=False)
    return f'<pre class="example">{text.replace("&amp;#8203;", "&#8203;")}</pre>'
