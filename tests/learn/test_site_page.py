"""The built site in a browser, opened from files without a network: its pages, search and accessibility."""

import shutil
from pathlib import Path

import pytest

from llamaspec.learn.site.stage import ASSETS
from tests.support.browser import let_timers_run, picture, problems, silent_page
from tests.support.site_search import SITE, require_site

PAGES = {
    "front": "index.html",
    "definition": "reference/attention.py.html",
    "gallery": "docs/gallery.html",
    "notebook": "docs/first-steps.ipynb.html",
    "a text": "xray.html",
    "engine": "docs/engine.html",
}
SERIOUS = ("serious", "critical")
WIDTHS = (1400, 800, 400)
# Every kind of block: formulas, tables of docstrings and of documents, code, drawings and pictures.
SAMPLE = ["attention", "llama", "losses", "quantizers/ggml_superblocks", "quantizers/ggml_activations"]
SAMPLE = [f"reference/{name}.py.html" for name in SAMPLE] + [
    "docs/gallery.html",
    "docs/serving.html",
    "docs/engine.html",
]
# Blocks with more content than fits. A drawing in characters and the output of a program are lines that scroll, and
# the padding of code in a sentence may stand out by 5 pixels.
CLIPPED = """() => [...document.querySelectorAll("article, article *")].filter((block) =>
    block.scrollWidth > block.clientWidth + 5 && block.clientWidth > 0 && getComputedStyle(block).display !== "inline"
    && block instanceof HTMLElement && !block.matches(".language-text code[tabindex]")
  ).map((block) => `${block.tagName}.${block.className} ${block.scrollWidth} in ${block.clientWidth}`)"""

# Only style sheets decide the widths, so we do not wait for timers of the theme.
LAYOUT_IS_DONE = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture
def opened(browser):
    require_site()

    def at(page, width=1600, scheme="light", motion="no-preference"):
        options = {"offline": True, "viewport": {"width": width, "height": 1000}, "color_scheme": scheme}
        options["reduced_motion"] = motion
        return silent_page(browser, (SITE / PAGES[page]).as_uri(), **options)

    return at


def test_the_front_page_leads_to_every_section(opened):
    with opened("front") as page:
        assert page.locator("h1").inner_text().startswith("llamaspec")
        for section in ("Start", "Read", "Verify", "Run", "Speed", "Project"):
            page.locator(".md-tabs__link", has_text=section).click()
            page.locator(".md-tabs__item--active", has_text=section).wait_for()
            assert page.locator("article h1").inner_text()
        picture(page, "site-front")


def test_the_x_ray_page_is_a_click_away(opened):
    with opened("a text") as page:
        page.get_by_text("Open the page").click()
        page.locator("html[data-ready]").wait_for()
        assert page.locator("#quantization").is_visible()


def test_a_derivation_stands_beside_its_code(opened):
    with opened("definition") as page:
        prose, code = (page.locator(f".beside .{part}").first.bounding_box() for part in ("said", "code"))
        assert prose["x"] + prose["width"] <= code["x"] and abs(prose["y"] - code["y"]) < 5
        definition = page.locator("h2#attention + .beside")
        assert "def attention(" in definition.locator(".code").inner_text()
        assert "Attend" in definition.locator(".said").inner_text()
        assert page.locator(".formula math").count() > 5 and page.locator(".formula mfrac").first.is_visible()
    with opened("definition", 400) as page:
        prose, code = (page.locator(f".beside .{part}").first.bounding_box() for part in ("said", "code"))
        assert prose["y"] + prose["height"] <= code["y"]


def test_the_animation_can_be_stopped_and_respects_reduced_motion(opened):
    state = "getComputedStyle(document.querySelector('#engine .head')).{}"
    with opened("engine") as page:
        assert page.evaluate(state.format("animationName")) == "engine-head"
        assert page.evaluate(state.format("animationPlayState")) == "running"
        page.get_by_label("Stop").check()
        assert page.evaluate(state.format("animationPlayState")) == "paused"
    with opened("engine", 400, motion="reduce") as page:
        assert page.evaluate(state.format("animationName")) == "none"
        page.locator("#engine").scroll_into_view_if_needed()
        picture(page, "site-engine-still-400")


def test_search_works_from_files_and_by_keyboard_alone(opened):
    with opened("front") as page:
        focused = "document.activeElement.classList.contains('md-search__input')"
        for _ in range(12):  # the logo, the tabs and the color switch come before it
            page.keyboard.press("Tab")
            if page.evaluate(focused):
                break
        assert page.evaluate(focused)
        is_open = "document.querySelector('[data-md-toggle=search]').checked"
        page.wait_for_function(is_open)
        page.keyboard.press("Escape")
        page.wait_for_function(f"!{is_open} && !{focused}")
        let_timers_run(page)  # the theme looks a moment later where the focus is, and must have seen that it is gone
        page.keyboard.press("/")
        page.wait_for_function(f"{is_open} && {focused}")
        page.locator(".md-search__input").fill("online softma")
        page.keyboard.press("x")  # the only key that the theme sees, so results match the whole text
        results = page.locator(".md-search-result__link")
        results.first.wait_for()
        assert any("#online-softmax" in results.nth(i).get_attribute("href") for i in range(3))
        picture(page, "site-search")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_url("**/glossary.html*")
        page.get_by_role("link", name="softmax_online").click()
        page.wait_for_url("**/softmax.py.html#softmax_online")
        assert "softmax" in page.locator("article h1").inner_text()


def test_colors_follow_the_system_and_the_switch(opened):
    color_scheme = "document.body.dataset.mdColorScheme"
    for scheme, name, other_name in (("light", "default", "slate"), ("dark", "slate", "default")):
        with opened("front", scheme=scheme) as page:
            page.wait_for_function(f"{color_scheme} === {name!r}")
            page.locator("label[for^=__palette]:visible").click()
            page.wait_for_function(f"{color_scheme} === {other_name!r}")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
def test_pages_fit_the_screen_and_axe_finds_nothing_serious(opened, name, width, scheme):
    with opened(name, width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        picture(page, f"site-{name}-{width}-{scheme}")
        assert problems(page, *SERIOUS) == []


def clipped(browser, paths):
    """List the blocks of the pages `paths` that are wider than the space for them, at each width in WIDTHS."""
    blocks = []
    with silent_page(browser, "about:blank", offline=True) as page:
        for path in paths:
            page.goto((SITE / path).as_uri())
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 1000})
                page.evaluate(LAYOUT_IS_DONE)
                blocks += [f"{path} at {width}: {block}" for block in page.evaluate(CLIPPED)]
    return blocks


def test_nothing_is_clipped_at_any_width(browser, opened):
    assert clipped(browser, SAMPLE) == []


@pytest.mark.slow
def test_nothing_is_clipped_on_any_page(browser, opened):
    listings = ("xray/", "benchmarks/", "model/", "serving/", "tests/", "verify/", "pallas_kernels/", "404")
    pages = [path.relative_to(SITE).as_posix() for path in sorted(SITE.rglob("*.html"))]
    assert clipped(browser, [path for path in pages if not path.startswith(listings)]) == []


def test_the_gallery_shows_its_first_picture_on_a_phone(opened):
    with opened("gallery", 400) as page:
        box = page.locator("article td img").first.bounding_box()
        assert box["x"] >= 0 and box["width"] >= 240 and box["x"] + box["width"] <= 400
        assert page.locator("article table.stacked td").nth(1).get_attribute("data-label") == "bits"


def test_a_page_from_the_file_system_has_its_worker(browser, tmp_path: Path):
    shutil.copy(ASSETS / "iframe-worker.js", tmp_path)
    (tmp_path / "worker.js").write_text("addEventListener('message', event => postMessage(event.data + 1))")
    (tmp_path / "page.html").write_text(
        "<body><script src='iframe-worker.js'></script><script>const worker = new Worker('worker.js');"
        "worker.addEventListener('message', event => document.title += event.data);"
        "worker.postMessage(1); worker.postMessage(4)</script>"
    )
    with silent_page(browser, (tmp_path / "page.html").as_uri()) as page:
        page.wait_for_function("document.title === '25'")
