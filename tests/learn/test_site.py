"""The site's sources: the list of copied files, docstrings as HTML, and reports of broken links."""

import re
from pathlib import Path

import pytest

from llamaspec import reference
from llamaspec.learn.site import beside, prose
from llamaspec.learn.site.crawl import faults
from llamaspec.learn.site.stage import FIRST, SECTIONS, reading_order, stage, target_of
from llamaspec.reference import quantizers
from tests.support.processes import REPOSITORY


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "source"
    stage(REPOSITORY, out)
    return out


def test_every_definition_is_a_page_in_the_order_of_reading(source: Path):
    order = reading_order(REPOSITORY)
    files = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "reference").rglob("*.py")}
    assert set(order) == {path for path in files if not path.endswith("__init__.py")}
    assert order.index("reference/rmsnorm.py") < order.index("reference/llama.py") < order.index("reference/losses.py")
    settings = (source.parent / "mkdocs.yml").read_text()
    assert all(f"- {target_of(path)}\n" in settings for path in order)


def test_the_prefaces_name_every_page_that_they_come_before():
    for package in (reference, quantizers):
        folder = Path(str(package.__file__)).parent
        named = set(re.findall(r"\w+", package.__doc__ or ""))
        assert {file.stem for file in folder.glob("*.py")} - {"__init__"} <= named


def test_every_page_that_is_named_is_staged_and_links_lead_to_pages(source: Path):
    named = [FIRST, *(path for section in SECTIONS.values() for path in section)]
    assert all((source / target_of(path)).is_file() for path in named)
    page = (source / "docs/reading.md").read_text()
    assert "(../reference/rope.py.md)" in page and (source / "reference/rope.py.md").is_file()
    assert "(../reference/quantizers/index.md)" in page and (source / "reference/quantizers/index.md").is_file()


def test_an_animated_drawing_has_a_checkbox_that_stops_it(source: Path):
    page = (source / "docs/engine.md").read_text()
    drawing = page.split('<div class="moving" data-search-exclude>\n')[1].split("\n</div>")[0]
    box, svg = drawing.split("\n", 1)
    assert 'type="checkbox"' in box and svg == (REPOSITORY / "docs/images/engine.svg").read_text().strip()
    assert "\n\n" not in drawing  # a blank line would end a block of HTML in Markdown


def test_a_document_without_a_place_is_refused(tmp_path: Path):
    for path in [FIRST, *(path for section in SECTIONS.values() for path in section), "docs/reading.md", "docs/new.md"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("# A page\n")
    with pytest.raises(ValueError, match=r"docs/new\.md"):
        stage(tmp_path, tmp_path / "out")


def test_code_stands_beside_its_docstring_without_it():
    intro, pair = beside.pairs(
        '"""Title.\n\nMore."""\nimport a\n\n# Why.\ndef f(x):\n    """Turn x."""\n    return x\n'
    )
    assert (intro.name, intro.docstrings, intro.code) == ("", [("", "Title.\n\nMore.")], "import a")
    assert (pair.name, pair.docstrings, pair.code) == ("f", [("", "Turn x.")], "# Why.\ndef f(x):\n    return x")


def test_no_line_of_a_definition_is_lost():
    for path in reading_order(REPOSITORY):
        source = (REPOSITORY / path).read_text()
        html = beside.page(source, Path(path).stem, {})
        code = [line for pair in beside.pairs(source) for line in pair.code.splitlines()]
        assert all(line in html for line in code)
        assert {line for line in code if line.lstrip().startswith(("def ", "class "))} == {
            line for line in source.splitlines() if line.lstrip().startswith(("def ", "class "))
        }


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("A `b<c`, *so* and a*b*c.", "<p>A <code>b&lt;c</code>, <em>so</em> and a*b*c.</p>"),
        ("See https://arxiv.org/abs/1.", '<p>See <a href="https://arxiv.org/abs/1">arxiv.org/abs/1</a>.</p>'),
        ("Of:\n    the rest", '<p>Of:</p>\n<div class="formula"><div>the rest</div></div>'),
        (
            "    q8   int8\n    nf4  16 levels\n         of one table",
            '<div class="formula"><table class="columns"><tr><td class="short">q8</td><td class="short">int8</td></tr>'
            '<tr><td class="short">nf4</td><td>16 levels of one table</td></tr></table></div>',
        ),
        (">>> 1\n1", '<pre class="example">&gt;&gt;&gt; 1\n1</pre>'),
        ("- a\n  b\n- c", "<ul><li>a b</li><li>c</li></ul>"),
        ("Order\n-----\n1. a one\n   b two\n2. c", "<h3>Order</h3>\n<ol><li>a one b two</li><li>c</li></ol>"),
    ],
)
def test_a_docstring_becomes_html(text: str, html: str):
    assert prose.to_html(text, {}) == html


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="other.html">', None),
        ('<a href="other.html#here">', None),
        ('<a href="https://example.org">', None),
        ('<a href="nowhere.html">', "nowhere.html does not exist"),
        ('<a href="other.html#there">', "other.html#there names an anchor that does not exist"),
        ('<a href="/other.html">', "/other.html is an absolute path"),
        ('<img src="nowhere.svg">', "nowhere.svg does not exist"),
        ('<script src="https://example.org/a.js">', "https://example.org/a.js is loaded from another site"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "//example.org/a.css is loaded from another site"),
    ],
)
def test_an_address_that_leads_nowhere_is_seen(body: str, fault: str | None, tmp_path: Path):
    (tmp_path / "page.html").write_text(body)
    (tmp_path / "other.html").write_text('<h1 id="here">')
    assert (fault is None and faults(tmp_path) == []) or f"page.html: {fault}" in faults(tmp_path)
