"""Renders docstrings of `reference/` as HTML: paragraphs, formulas, lists and examples."""

import html
import re
from collections.abc import Iterator, Mapping

LINK = re.compile(r"https://[\w./%#?=&~:+-]*[\w/]")
INLINE = re.compile(rf"`([^`]+)`|({LINK.pattern})|(?<![\w*])\*(\S|\S[^*]*?\S)\*(?![\w*])")
ITEM = re.compile(r"- |\d+\. ")


def to_html(text: str, links: Mapping[str, str]) -> str:
    """Render a dedented docstring. A name in backquotes becomes a link if `links` contains its address.

    >>> to_html("Turn x by `rope`:\\n\\n    y = R x", {"rope": "rope.py.md"})
    '<p>Turn x by <a href="rope.py.md"><code>rope</code></a>:</p>\\n<pre class="formula">y = R x</pre>'
    """
    return "\n".join(_block(block, links) for block in _blocks(text))


def inline(text: str, links: Mapping[str, str]) -> str:
    """Render a paragraph as HTML: code in backquotes, emphasis and addresses. Everything else is escaped."""
    done, rendered = 0, ""
    for match in INLINE.finditer(text):
        rendered += html.escape(text[done : match.start()], quote=False)
        code, address, stressed = match.groups()
        if code is not None:
            element = f"<code>{html.escape(code, quote=False)}</code>"
            rendered += f'<a href="{links[code]}">{element}</a>' if code in links else element
        elif address is not None:
            rendered += f'<a href="{address}">{address.removeprefix("https://")}</a>'
        else:
            rendered += f"<em>{inline(stressed, links)}</em>"
        done = match.end()
    return rendered + html.escape(text[done:], quote=False)


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield the lines of each block: a paragraph, an example, or indented lines, which may have blank lines between."""
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
        return _fixed("example", lines)
    if _indented(lines[0]):
        margin = min(len(line) - len(line.lstrip()) for line in lines if line)
        return _fixed("formula" if len(lines) == 1 else "formula lines", [line[margin:] for line in lines])
    if len(lines) == 2 and set(lines[1]) == {"-"}:
        return f"<h3>{inline(lines[0], links)}</h3>"
    if ITEM.match(lines[0]):
        if any(re.search(r"\S {2,}\S", line) for line in lines):  # lines with columns
            return _fixed("formula lines", lines)
        items: list[str] = []
        for line in lines:
            if ITEM.match(line):
                items.append(ITEM.sub("", line, count=1))
            else:
                items[-1] += " " + line.strip()
        tag = "ul" if lines[0].startswith("-") else "ol"
        return f"<{tag}>{''.join(f'<li>{inline(item, links)}</li>' for item in items)}</{tag}>"
    return f"<p>{inline(' '.join(lines), links)}</p>"


def _fixed(kind: str, lines: list[str]) -> str:
    # A blank line would end an HTML block in Markdown.
    text = html.escape("\n".join(line or "&#8203;" for line in lines), quote=False)
    return f'<pre class="{kind}">{text.replace("&amp;#8203;", "&#8203;")}</pre>'
