"""Debian's Chromium, driven by Playwright. Without Chromium, the tests that need it are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def started_browser() -> Iterator[Any]:
    """Start Chromium. Playwright occupies the thread's event loop until the with block ends."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    if BROWSER is None:
        pytest.skip("needs Chromium (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=BROWSER, args=flags, timeout=1000 * PATIENCE)
        yield browser
        browser.close()


@contextmanager
def opened_page(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """Open a page in a new browser context with `options`, and with `PATIENCE` as Playwright's timeout."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * PATIENCE)
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


@contextmanager
def silent_page(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """Open a page as `opened_page` does; fail if the page writes to its console or raises an error."""
    messages: list[str] = []
    with opened_page(browser, "about:blank", **options) as page:
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(url)
        yield page
    assert messages == []


def let_timers_run(page: Any) -> None:
    """Wait until all of the page's timers that are set for less than 0.2 s have fired; timers fire in order."""
    page.evaluate("new Promise((done) => setTimeout(() => setTimeout(done, 200), 200))")


def problems(page: Any, *impacts: str) -> list[tuple[str, str, list[str]]]:
    """List what axe finds on a page, or only its findings with these impacts: the rule, the impact, three elements.

    Without `preload` axe asks for no style sheets, which a page from a file may not read.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe, of the extra dev")
    return [
        (finding["id"], finding["impact"], [node["html"][:120] for node in finding["nodes"][:3]])
        for finding in axe.Axe().run(page, options={"preload": False}).response["violations"]
        if not impacts or finding["impact"] in impacts
    ]


def picture(page: Any, name: str) -> None:
    """Save a screenshot in the folder that the variable SCREENSHOTS names, if it is set."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")
