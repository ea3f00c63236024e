"""Makes a page from a file of `reference/`, with each docstring to the left of its code."""

import ast
import inspect
from collections.abc import Mapping
from typing import NamedTuple

from llamaspec.learn.site.prose import inline, to_html

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


class Pair(NamedTuple):
    """The name of a function or class, its docstrings, and its code."""

    name: str  # "" for the introduction
    docstrings: list[tuple[str, str]]  # (name of the method, docstring); "" as the name: the function or class itself
    code: str


def pairs(source: str) -> list[Pair]:
    """Split the source of a module into pairs of docstrings and code, one for each function and class.

    The first pair is for the module itself. Code without a docstring becomes part of the previous pair.

    >>> [pair.name for pair in pairs('"Doc."\\nimport a\\ndef f():\\n    "F."\\ndef _g():\\n    pass')]
    ['', 'f']
    """
    tree, lines = ast.parse(source), source.splitlines()
    parts: list[tuple[str, ast.AST, int]] = [("", tree, 0)]
    end = 0
    for node in tree.body:
        if (
            isinstance(node, DOCUMENTED)
            and ast.get_docstring(node)
            and isinstance(node, ast.ClassDef | ast.FunctionDef)
        ):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            while first > end and lines[first - 1].startswith("#"):
                first -= 1
            parts.append((node.name, node, first))
        end = node.end_lineno or 0
    ends = [first for *_, first in parts[1:]] + [len(lines)]
    return [
        Pair(name, _docstrings(node), _without_docstrings(lines, first, last, tree))
        for (name, node, first), last in zip(parts, ends, strict=True)
    ]


def page(source: str, name: str, links: Mapping[str, str]) -> str:
    """Return the page of a module in Markdown. `links` maps each name that has a page to its address.

    Raises SyntaxError for source code that is not Python.
    """
    first, *further = pairs(source)
    title, _, body = (first.docstrings[0][1] if first.docstrings else "").partition("\n\n")
    intro = f'<p class="lead">{inline(" ".join(title.split()), links)}</p>\n{to_html(body, links)}'
    # The title has its own anchor, because a function may have the same name as the module.
    head = f"---\ntitle: {name}\nhide: [toc]\n---\n\n# {name} {{ #page }}\n"
    if len(further) == 1:
        [only] = further
        about = "\n".join([intro, f"<h4><code>{only.name}</code></h4>", _prose(only, links)])
        return f"{head}\n{_row(about, f'{first.code}\n\n\n{only.code}')}"
    inside = "\n".join(f"- [`{pair.name}`](#{pair.name.lower()})" for pair in further)
    written = [head, _row(intro, first.code, inside)]
    return "\n".join(written + [f"## `{pair.name}`\n\n{_row(_prose(pair, links), pair.code)}" for pair in further])


def _prose(pair: Pair, links: Mapping[str, str]) -> str:
    return "\n".join(f"<h4><code>{of}</code></h4>\n" * bool(of) + to_html(text, links) for of, text in pair.docstrings)


def _row(docstring: str, code: str, inside: str = "") -> str:
    block = f"```python\n{code}\n```\n" if code else ""
    right = f'<div class="code" markdown="1">\n\n{block}\n{inside}\n\n</div>\n' if block or inside else ""
    return f'<div class="beside" markdown="1">\n<div class="said">\n{docstring}\n</div>\n{right}</div>\n'


def _docstrings(node: ast.AST) -> list[tuple[str, str]]:
    """Collect the docstring of a node, and for a class also the docstrings of its methods."""
    assert isinstance(node, DOCUMENTED)
    own = ast.get_docstring(node)
    docstrings = [("", inspect.cleandoc(own))] if own else []
    if isinstance(node, ast.ClassDef):
        methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
        docstrings += [(inner.name, text) for inner in methods if (text := ast.get_docstring(inner))]
    return docstrings


def _without_docstrings(lines: list[str], first: int, last: int, tree: ast.Module) -> str:
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            doc = node.body[0]
            end = doc.end_lineno or doc.lineno
            left_out |= set(range(doc.lineno - 1, end + (end < len(lines) and not lines[end])))
    return "\n".join(line for i, line in enumerate(lines[first:last], first) if i not in left_out).strip("\n")
