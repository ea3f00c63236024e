"""The drawing in `docs/engine.md` shows a run of the real scheduler, with its state at every plan."""

import doctest
import re
from xml.etree import ElementTree

import pytest

from llamaspec.learn.site import engine
from llamaspec.learn.site.engine import COLORS, IDLE_PAGE, LIMITS, OUT, REQUESTS, STILL, draw, record
from tests.support.browser import silent_page

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def steps():
    return record()


def visible_parts(drawing: ElementTree.Element, plan: int) -> list[ElementTree.Element]:
    """Return the elements of the drawing that are visible at step `plan`.

    Each element has an animation with the name engine-FIRST-END. The element is visible from step FIRST on, and no
    longer visible at step END.
    """
    parts = []
    for part in drawing.iter(f"{SVG}g"):
        named = re.fullmatch(r"animation-name:engine-(\d+)-(\d+)", part.get("style", ""))
        assert named, part.attrib
        if int(named[1]) <= plan < int(named[2]):
            parts.append(part)
    return parts


def texts(parts: list[ElementTree.Element]) -> list[str]:
    return [text.text or "" for part in parts for text in part.iter(f"{SVG}text")]


def test_the_drawing_is_of_the_scheduler_as_it_is(steps):
    assert OUT.read_text(encoding="utf-8") == draw(steps), "draw it again: python -m llamaspec.learn.site.engine"


def test_the_drawn_run_contains_every_kind_of_event(steps):
    log = " ".join(line for step in steps for line in step.sentences)
    for what in ("finds 3 pages", "gives way", "The cache gives up", "come", "and wait", "A and B begin", "an answer"):
        assert what in log
    assert any(len(requests) > 1 for step in steps for requests in step.pages)  # both requests read this page
    assert any(IDLE_PAGE in step.pages for step in steps) and any("" in step.pages for step in steps)
    assert {state for step in steps for state in step.states.values()} == {"waits", "reads", "draws", "runs"}
    assert set(steps[-1].states) <= set(REQUESTS) and len(COLORS) == len(REQUESTS)
    # docs/engine.md describes these steps.
    assert [*steps[0].states] == ["A", "B"] and [step.states["A"] for step in steps[:4]].count("reads") == 3
    assert steps[4].hits == {"C": 12} and steps[7].gave_way == ("C",) and "C" in steps[12].hits
    assert LIMITS.page * 3 == 12 and (LIMITS.rows, LIMITS.pages - 1, LIMITS.chunk, LIMITS.burst) == (3, 13, 8, 2)


def test_waiting_requests_hold_no_pages_and_limits_are_respected(steps):
    for step in steps:
        holders = set("".join(step.pages)) - {IDLE_PAGE}
        running = {name for name, state in step.states.items() if state != "waits"}
        assert holders <= running and len(running) <= LIMITS.rows
        assert [*step.states.values()].count("reads") <= 1
        assert all(step.states[name] == "waits" for name in step.gave_way)


def test_every_plan_shows_the_state_at_that_time(steps):
    drawing = ElementTree.parse(OUT).getroot()
    for plan, step in enumerate(steps):
        labels = texts(visible_parts(drawing, plan))
        used_pages = [page for page in step.pages if page not in ("", IDLE_PAGE)]
        assert sorted(labels) == sorted([f"plan {plan + 1} of {len(steps)}", *step.sentences, *used_pages])
        rings = [part for part in visible_parts(drawing, plan) if part.find(f"{SVG}circle") is not None]
        assert len(rings) == step.pages.count(IDLE_PAGE)


def test_a_lane_has_a_bar_for_every_plan_that_computes_for_it(steps):
    bars = [bar for bar in ElementTree.parse(OUT).getroot().findall(f"{SVG}rect") if bar.get("fill") in COLORS]
    for name, shade in zip(REQUESTS, COLORS, strict=True):
        states = [step.states.get(name) for step in steps]
        drawn = [float(bar.get("height", "")) for bar in bars if bar.get("fill") == shade]
        legend = [8.0, 18.0] * (shade == COLORS[0])
        assert (
            drawn == [{"reads": 8.0, "draws": 18.0}[state] for state in states if state in ("reads", "draws")] + legend
        )


def test_a_browser_animates_the_plans_and_stops_with_reduced_motion(browser, steps):
    visible = "[...document.querySelectorAll('text')].filter(t => getComputedStyle(t).visibility == 'visible')"
    title = f"{visible}.map(t => t.textContent).filter(t => t.startsWith('plan '))"
    at = "ms => document.getAnimations().forEach(a => { a.pause(); a.currentTime = ms })"
    with silent_page(browser, OUT.as_uri(), viewport={"width": 400, "height": 500}) as page:
        for plan in (0, 7, len(steps) - 1):
            page.evaluate(at, 1000 * engine.SECONDS * (plan + 0.5))
            assert page.evaluate(title) == [f"plan {plan + 1} of {len(steps)}"]
        lit = "getComputedStyle(document.querySelector('.paper')).fill"
        assert page.evaluate(lit) == "rgb(255, 255, 255)"
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(lit) == "rgb(30, 33, 41)"
        page.emulate_media(reduced_motion="reduce")
        assert page.evaluate(title) == [f"plan {STILL + 1} of {len(steps)}"]
        assert page.evaluate("document.getAnimations().length") == 0


def test_examples():
    result = doctest.testmod(engine)
    assert result.attempted and not result.failed
