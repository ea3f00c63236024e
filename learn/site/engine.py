"""Draws the picture of `docs/engine.md`: a run of the scheduler, plan by plan, as an animated SVG.

python -m llamaspec.learn.site.engine    writes docs/images/engine.svg again

We run the real `serving.scheduler` and draw every line, page and sentence from its plans. So a test notices if the
drawing no longer shows what the scheduler does. No model runs, because the values of tokens do not change a plan. The
SVG needs no script. Readers who prefer reduced motion see one plan. The file is long because it records the run, writes
a sentence for each event, and draws requests, pages, text and legend, all without a graphics library.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

from llamaspec.serving.request import Request
from llamaspec.serving.scheduler import Draws, Limits, Plan, Scheduler

OUT = Path(__file__).parents[3] / "docs/images/engine.svg"
SECONDS = 1.6  # time for which we show a plan
STILL = (
    12  # the plan that readers who prefer reduced motion see: two requests begin, two wait, pages are shared and kept
)
LIMITS = Limits(pages=14, page=4, rows=3, chunk=8, burst=2, context=36)
PREFIX = tuple(range(100, 112))  # tokens of three pages


class DemoRequest(NamedTuple):
    """A request of the run. It arrives before the plan with the index `plan`, and its answer has `answer` tokens."""

    plan: int
    prompt: tuple[int, ...]
    answer: int


# The run shows every kind of event: a prompt with several chunks, a wait, pages from the prefix cache, a preemption.
REQUESTS = {
    "A": DemoRequest(0, (*PREFIX, *range(6)), 16),
    "B": DemoRequest(0, tuple(range(20, 29)), 18),
    "C": DemoRequest(4, (*PREFIX, *range(30, 34)), 12),
    "D": DemoRequest(5, tuple(range(40, 57)), 6),
    "E": DemoRequest(9, (*PREFIX, *range(60, 66)), 5),
}
State = Literal[
    "waits", "reads", "draws", "runs"
]  # "runs": the request has a row and pages, but the plan does not include it


class Moment(NamedTuple):
    """A plan, and the state of requests and pages during this plan."""

    states: Mapping[str, State]  # states of the requests that have arrived and not ended
    pages: tuple[str, ...]  # for each page: the names of the requests that hold it, IDLE_PAGE, or ""
    hits: Mapping[str, int]  # request that begins with this plan: number of cached tokens
    gave_way: tuple[str, ...]
    sentences: tuple[str, ...]  # one sentence per event


IDLE_PAGE = "·"


def record() -> list[Moment]:
    """Run the scheduler on `REQUESTS` until all requests have their answers, and record every plan."""
    scheduler, names, steps = Scheduler(LIMITS), [*REQUESTS], list[Moment]()
    while not steps or not scheduler.idle or any(event.plan >= len(steps) for event in REQUESTS.values()):
        came = [name for name in names if REQUESTS[name].plan == len(steps)]
        for name in came:
            request = Request(REQUESTS[name].prompt, REQUESTS[name].answer)
            scheduler.submit(names.index(name), request, now=0.0)
        waited, ran = {*scheduler.waiting}, {*scheduler.running}
        cached = {*scheduler.pool.nodes.items()}
        plan = scheduler.plan(now=0.0)
        begun = [number for number in scheduler.running if number in waited]
        gave_way = tuple(names[number] for number in scheduler.waiting if number in ran)
        hits = {names[n]: scheduler.running[n].computed for n in begun if scheduler.running[n].computed}
        unended = [*scheduler.waiting, *scheduler.running]
        states: dict[str, State] = {names[number]: _state(number, plan, scheduler) for number in unended}
        pages = tuple(_holders(page, scheduler, names) for page in range(1, LIMITS.pages))
        news = scheduler.done({row.number: Draws((0,) * row.steps, None) for row in plan.rows})
        ended = [names[event.number] for event in news if event.ended]
        lost = len(cached - {*scheduler.pool.nodes.items()})
        sentences = tuple(_sentences(plan, names, came, [names[n] for n in begun], hits, gave_way, lost, ended))
        steps.append(Moment(states, pages, hits, gave_way, sentences))
    return steps


def _state(number: int, plan: Plan, scheduler: Scheduler) -> State:
    if number in scheduler.waiting:
        return "waits"
    if plan.chunk and plan.chunk.number == number:
        return "reads"
    return "draws" if any(row.number == number for row in plan.rows) else "runs"


def _holders(page: int, scheduler: Scheduler, names: Sequence[str]) -> str:
    holders = "".join(sorted(names[job.number] for job in scheduler.running.values() if page in job.pages))
    return holders or (IDLE_PAGE if page in scheduler.pool.idle else "")


def _sentences(
    plan: Plan,
    names: Sequence[str],
    came: Sequence[str],
    begun: Sequence[str],
    hits: Mapping[str, int],
    gave_way: Sequence[str],
    lost: int,
    ended: Sequence[str],
) -> Iterator[str]:
    if waiting := [name for name in came if name not in begun]:
        yield f"{_list(waiting)} {_verb(waiting, 'come')} and {_verb(waiting, 'wait')}."
    if fresh := [name for name in begun if name not in hits]:
        yield f"{_list(fresh)} {_verb(fresh, 'begin')}."
    for name, tokens in hits.items():
        yield f"{name} begins and finds {_count(tokens // LIMITS.page, 'page')} of its text in the cache."
    if gave_way:
        yield f"No page is left, so {_list(gave_way)} {_verb(gave_way, 'give')} way."
    if lost:
        yield f"The cache gives up {_count(lost, 'page')}, unused for longest."
    if plan.chunk:
        yield f"{names[plan.chunk.number]} reads {_count(len(plan.chunk.tokens), 'token')} of its prompt."
    if plan.rows:
        drawing = [names[row.number] for row in plan.rows]
        yield f"{_list(drawing)} {_verb(drawing, 'go')} on by {_count(max(row.steps for row in plan.rows), 'token')}."
    if ended:
        yield f"{_list(ended)} then {_verb(ended, 'have')} an answer."


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _verb(names: Sequence[str], verb: str) -> str:
    return verb if len(names) > 1 else {"go": "goes", "have": "has"}.get(verb, f"{verb}s")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


# The drawing is as wide as the screen of a phone. Wider screens scale it up.
WIDTH, LEFT, RIGHT, TOP, LANE, PAGE, LINE = 400, 28, 392, 34, 24, 28, 17  # pixels
COLORS = ("#8ab4f8", "#f6a6a1", "#8fd6a8", "#f2d06b", "#d9a8ec")  # of requests; dark letters are legible on them
# All rules apply only within #engine, because the site puts the SVG into a page that has other styles.
STYLE = """
#engine {
--ink: #1f2328; --paper: #ffffff; --faint: #5b6472; font: 12px sans-serif;
@media (prefers-color-scheme: dark) { --ink: #e6e6e6; --paper: #1e2129; --faint: #a3acba }
text { fill: var(--ink) } .on { fill: #1f2328 } .faint { fill: var(--faint) } .paper { fill: var(--paper) }
.line { stroke: var(--ink); fill: none } .t, .head { animation: TIME step-end infinite }
.t { visibility: hidden } .still { visibility: visible }
.head { animation-name: engine-head; animation-timing-function: steps(STEPS); transform: translateX(HERE) }
@media (prefers-reduced-motion: reduce) { .t, .head { animation: none } }
}
#engine:hover .t, #engine:hover .head { animation-play-state: paused }
@keyframes engine-head { from { transform: none } to { transform: translateX(END) } }
"""


def draw(steps: Sequence[Moment]) -> str:
    """Draw a run: a horizontal lane for each request, and the pages and events of each plan."""
    names, count = [*REQUESTS], len(steps)
    wide = (RIGHT - LEFT) / count
    shades = dict(zip(names, COLORS, strict=True))
    spans: set[tuple[int, int]] = set()
    body = [*_lanes(steps, wide, shades)]
    foot = TOP + LANE * len(names)
    body.append(
        f'<rect class="head line" x="{LEFT}" y="{TOP - 4}" width="{wide:.2f}" height="{foot - TOP + 4}" rx="2" '
        'stroke-width="2"/>'
    )
    for i in range(count):
        body.append(
            _visible(i, i + 1, count, spans, f'<text x="8" y="20" font-weight="bold">plan {i + 1} of {count}</text>')
        )
    body.append(f'<text class="faint" x="{RIGHT}" y="20" text-anchor="end">a row is a request, a column a plan</text>')
    y = foot + 24
    body.append(f'<text class="faint" x="8" y="{y}">{len(steps[0].pages)} pages of {LIMITS.page} tokens</text>')
    body += _pages(steps, y + 8, shades, spans)
    y += 8 + PAGE + LINE
    for i, step in enumerate(steps):
        lines = "".join(
            f'<text x="8" y="{y + LINE * k}">{escape(line)}</text>' for k, line in enumerate(step.sentences)
        )
        body.append(_visible(i, i + 1, count, spans, lines))
    y += LINE * max(len(step.sentences) for step in steps) + 4
    body += _legend(y)
    height = y + 3 * LINE
    style = STYLE.replace("TIME", f"{SECONDS * count:g}s").replace("STEPS", str(count))
    style = style.replace("HERE", f"{wide * STILL:.2f}px").replace("END", f"{RIGHT - LEFT}px")
    style += "\n".join(_keyframes(start, stop, count) for start, stop in sorted(spans))
    run = " ".join(f"Plan {i + 1}: {escape(' '.join(step.sentences))}" for i, step in enumerate(steps))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" id="engine" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="engine-title engine-run">\n'
        '<title id="engine-title">The engine at work, one plan after the other</title>\n'
        f'<desc id="engine-run">{run}</desc>\n<style>{style}\n</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _lanes(steps: Sequence[Moment], wide: float, shades: Mapping[str, str]) -> Iterator[str]:
    for lane, (name, shade) in enumerate(shades.items()):
        top = TOP + LANE * lane
        middle = top + LANE / 2 - 2
        yield f'<circle cx="15" cy="{middle}" r="9" fill="{shade}"/>'
        yield f'<text class="on" x="15" y="{middle + 4}" text-anchor="middle">{name}</text>'
        for i, step in enumerate(steps):
            x, state = LEFT + wide * i, step.states.get(name)
            if state == "waits":
                yield f'<path class="line" d="M{x:.2f} {middle}h{wide:.2f}" stroke-dasharray="2 2"/>'
            elif state == "runs":
                yield f'<path class="line" d="M{x:.2f} {middle}h{wide:.2f}"/>'
            elif state:
                height = {"reads": 8, "draws": 18}[state]
                yield (
                    f'<rect x="{x + 0.5:.2f}" y="{middle - height / 2}" width="{wide - 1:.2f}" height="{height}" '
                    f'fill="{shade}"/>'
                )
            if name in step.hits:
                yield _diamond(x + wide / 2, middle)
            if name in step.gave_way:
                yield _cross(x + wide / 2, middle)


def _pages(steps: Sequence[Moment], y: int, shades: Mapping[str, str], spans: set[tuple[int, int]]) -> Iterator[str]:
    for page in range(len(steps[0].pages)):
        x, start = 8 + 1.06 * PAGE * page, 0
        holders = [step.pages[page] for step in steps]
        yield f'<rect class="line" x="{x:.2f}" y="{y}" width="{PAGE - 2}" height="{PAGE - 2}" rx="3"/>'
        while start < len(holders):
            stop = next((i for i in range(start, len(holders)) if holders[i] != holders[start]), len(holders))
            if holders[start]:
                inside = "".join(_page(holders[start], x, y, shades))
                yield _visible(start, stop, len(holders), spans, inside)
            start = stop


def _page(holders: str, x: float, y: int, shades: Mapping[str, str]) -> Iterator[str]:
    """Fill a page with a stripe for each holder, or with a dot if only the prefix cache keeps the page."""
    middle = x + PAGE / 2 - 1
    if holders == IDLE_PAGE:
        yield f'<circle class="line" cx="{middle:.2f}" cy="{y + PAGE / 2 - 1}" r="4"/>'
        return
    high = (PAGE - 3) / len(holders)
    for k, name in enumerate(holders):
        fill = f'height="{high:.2f}" fill="{shades[name]}"'
        yield f'<rect x="{x + 0.5:.2f}" y="{y + 0.5 + high * k:.2f}" width="{PAGE - 3}" {fill}/>'
    yield f'<text class="on" x="{middle:.2f}" y="{y + PAGE / 2 + 3}" text-anchor="middle">{holders}</text>'


def _legend(y: int) -> Iterator[str]:
    """Explain the marks of the drawing, in three lines."""
    shade, at = COLORS[0], y - 4.0
    marks = (
        (8, 0, f'<rect x="8" y="{at - 4}" width="12" height="8" fill="{shade}"/>', "reads its prompt"),
        (132, 0, f'<rect x="132" y="{at - 9}" width="12" height="18" fill="{shade}"/>', "draws tokens"),
        (236, 0, f'<path class="line" d="M236 {at}h14" stroke-dasharray="2 2"/>', "waits"),
        (302, 0, _cross(308.0, at), "gives way"),
        (8, LINE, _diamond(14.0, at + LINE), "finds pages in the cache"),
        (184, LINE, f'<circle class="line" cx="190" cy="{at + LINE}" r="4"/>', "page kept for later prompts"),
        (8, 2 * LINE, f'<path class="line" d="M8 {at + 2 * LINE}h14"/>', "has a row, while another prompt is read"),
    )
    for x, down, mark, word in marks:
        yield f'{mark}<text class="faint" x="{x + 18}" y="{y + down}">{word}</text>'


def _diamond(x: float, y: float) -> str:
    return f'<path fill="#1f2328" stroke="#fff" d="M{x:.2f} {y - 6}l5 6l-5 6l-5 -6z"/>'


def _cross(x: float, y: float) -> str:
    return f'<path class="line" stroke-width="2" d="M{x - 4:.2f} {y - 4}l8 8m0 -8l-8 8"/>'


def _visible(start: int, stop: int, count: int, spans: set[tuple[int, int]], inside: str) -> str:
    """Make the SVG elements `inside` visible during the plans from `start` up to `stop`."""
    if (start, stop) == (0, count):
        return inside
    spans.add((start, stop))
    still = " still" * (start <= STILL < stop)
    return f'<g class="t{still}" style="animation-name:engine-{start}-{stop}">{inside}</g>'


def _keyframes(start: int, stop: int, count: int) -> str:
    """Make the animation that shows an element of `_visible` during its plans.

    >>> _keyframes(1, 2, 4)
    '@keyframes engine-1-2 { 0% { visibility: hidden } 25% { visibility: visible } 50% { visibility: hidden } }'
    """
    moments = {0.0: "hidden", 100 * start / count: "visible"}
    if stop < count:
        moments[100 * stop / count] = "hidden"
    inside = " ".join(f"{at:.6g}% {{ visibility: {state} }}" for at, state in moments.items())
    return f"@keyframes engine-{start}-{stop} {{ {inside} }}"


if __name__ == "__main__":
    OUT.write_text(draw(record()), encoding="utf-8")
