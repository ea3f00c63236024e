"""The glossary: its links lead to the lines that define the terms, and the site's search finds every term."""

import re
from pathlib import Path

import pytest

from llamaspec.learn.site.line_links import LINE_LINK, anchor, line_of, renumbered
from tests.support.processes import REPOSITORY
from tests.support.site_search import search

GLOSSARY = REPOSITORY / "docs/glossary.md"
DOCUMENTS = sorted(path for path in (REPOSITORY / "docs").glob("*.md") if LINE_LINK.search(path.read_text()))
TYPED = {"nucleus": "Top-p: nucleus sampling", "flash attention": "FlashAttention (Flash Attention)"}


def entries() -> dict[str, str]:
    """Map the terms of the glossary to their explanations."""
    parts = re.split(r"^### (.*)$", GLOSSARY.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_term_has_one_sentence_and_one_link():
    assert len(entries()) >= 80
    for term, text in entries().items():
        sentence, links = LINE_LINK.sub("", text.partition("\n## ")[0]).strip(), LINE_LINK.findall(text)
        assert len(links) == 1 and sentence.endswith(".") and not re.search(r"[.] [A-Z]", sentence), term


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_lines_that_a_document_links_to_exist(document: Path):
    """Each link to a line of code names something that is still in the file.

    The number in the link may be out of date, because every change moves lines. The site renumbers its links.
    """
    assert LINE_LINK.findall(renumbered(document, REPOSITORY))


def test_a_line_that_is_gone_is_reported(tmp_path: Path):
    (tmp_path / "page.md").write_text("[`f`](code.py#L7) [`h`](code.py#L1)")
    (tmp_path / "code.py").write_text("g = 1\n\ndef f(): pass\n")
    with pytest.raises(ValueError, match=r"page\.md: code\.py: no line contains 'h'"):
        renumbered(tmp_path / "page.md", tmp_path)
    (tmp_path / "page.md").write_text("[`f`](code.py#L7), [`g`](https://example.org/code.py#L7)")
    assert renumbered(tmp_path / "page.md", tmp_path) == "[`f`](code.py#L3), [`g`](https://example.org/code.py#L7)"


def test_a_link_to_a_line_leads_to_its_function_or_to_the_line_of_a_listing():
    source = '"""Doc."""\nA = 1\ndef f():\n    """F."""\n    return A\ndef G():\n    """G."""'
    assert [anchor(source, "reference/a.py", line) for line in (2, 5, 6)] == ["page", "f", "g"]
    assert anchor(source, "model/a.py", 5) == "__span-0-5"
    assert anchor(source.replace('    """G."""', "    pass"), "reference/a.py", 5) == "page"
    assert line_of(source, "A") == 2 and line_of(source, "return A") == 5


def test_the_search_finds_every_term(browser):
    texts = TYPED | {part.strip(): term for term in entries() for part in re.split(r": |[(),]", term) if part.strip()}
    for (text, term), results in zip(texts.items(), search(browser, list(texts)), strict=True):
        name = re.sub(r"[^\w\s-]", "", term.lower()).strip()
        assert f"docs/glossary.html#{re.sub(r'[-\s]+', '-', name)}" in results[:6], (text, results[:6])
