"""The search of the built site, in a browser."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import silent_page
from tests.support.processes import REPOSITORY

SITE = REPOSITORY / "build/site/html"
# Types each text into the search, and returns the addresses of its results.
SEARCH = """async (texts) => {
  const input = document.querySelector(".md-search__input");
  const list = document.querySelector(".md-search-result__list");
  const found = [];
  for (const text of texts) {
    const before = list.innerHTML;
    input.value = text;
    input.dispatchEvent(new KeyboardEvent("keyup"));
    const start = performance.now();
    while (list.innerHTML === before && performance.now() - start < 5000) await new Promise((go) => setTimeout(go, 10));
    found.push([...list.querySelectorAll("a.md-search-result__link")].map((link) => link.href));
  }
  return found;
}"""


def require_site() -> Path:
    """Skip the test if the site is not built."""
    if not (SITE / "index.html").is_file():
        pytest.skip("needs the built site: make docs")
    return SITE


def search(browser: Any, texts: list[str]) -> list[list[str]]:
    """Type each text into the search of the site, and list the results as pages with anchors, relative to the site."""
    start = f"{require_site().as_uri()}/"
    with silent_page(browser, f"{start}index.html", offline=True) as page:
        page.locator(".md-search__input").focus()
        page.locator(".md-search-result__meta", has_text="Type to start").wait_for(state="attached")
        return [
            [re.sub(r"\?[^#]*", "", address).removeprefix(start) for address in addresses]
            for addresses in page.evaluate(SEARCH, texts)
        ]
