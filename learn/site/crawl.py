"""Checks a built site: every address must be a file of the site, so that the site works without a network."""

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
}  # the browser loads these without a click
FOLLOWED = ("canonical", "alternate", "prev", "next")  # kinds of `link` that the browser does not load


class Page(HTMLParser):
    """The addresses and the anchors on a page."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchors and the address of an HTML element."""
        named = {name: value for name, value in attrs if value is not None}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if tag in LOADED and LOADED[tag] in named:
            address = named[LOADED[tag]]
            (self.links if named.get("rel") in FOLLOWED else self.loaded).append(address)


def faults(site: Path) -> list[str]:
    """Return a line for each address of a built site that has no target, is absolute, or loads from elsewhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site)}: {fault}" for path, page in pages.items() for fault in _of_page(path, page, pages)
    ]


def _of_page(path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    yield from (f"{address} is loaded from another site" for address in page.loaded if urlsplit(address).netloc)
    if path.name == "404.html":  # a server sends this page for any address, so its links are absolute
        return
    for address in (*page.links, *page.loaded):
        parts = urlsplit(address)
        if parts.scheme in ("http", "https", "mailto", "data"):
            continue
        if parts.path.startswith("/"):
            yield f"{address} is an absolute path"
            continue
        goal = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
        if not goal.is_file():
            yield f"{address} does not exist"
        elif parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].anchors:
            yield f"{address} names an anchor that does not exist"
