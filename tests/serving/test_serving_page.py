"""The chat page in a browser: streaming, stopping, a token's distribution, and a narrow screen."""

import pytest

from llamaspec.model.tokenizers.tokenizer import decode
from tests.serving.serving_site import TOKENIZER, FakeEngine, running, spelling
from tests.serving.test_serving_channels import TOKENIZER as HARMONY
from tests.serving.test_serving_channels import ids_of
from tests.serving.test_serving_thoughts import replies
from tests.serving.tool_templates import HARMONY as TEMPLATE
from tests.support.browser import opened_page, picture, silent_page
from tests.support.waiting import until

ANSWER = "The fox found a red kite in the old tree. She sang <b>loudly</b>, and slept."


@pytest.fixture
def engine():
    return FakeEngine(spelling(ANSWER))


@pytest.fixture
def site(engine):
    with running(engine) as site:
        yield site


@pytest.fixture
def page(browser, site):
    """Open the site's page, and fail if the page prints anything on its console."""
    with silent_page(browser, site.url, viewport={"width": 900, "height": 700}) as page:
        page.get_by_role("heading", name="stories").wait_for()
        yield page


def ask(page, text="Tell me a story about a fox."):
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def finished(page):
    page.get_by_role("button", name="Regenerate").wait_for()
    return page.locator(".turn.assistant .said").last


def test_an_answer_streams_and_markup_in_it_stays_text(page, engine):
    picture(page, "empty")
    engine.pause = 8
    ask(page)
    page.locator(".busy .token").nth(3).wait_for()
    picture(page, "streaming")
    engine.pause = None
    assert finished(page).inner_text() == ANSWER
    assert page.locator(".said b").count() == 0
    assert "tokens/s" in page.locator(".turn.assistant .foot").inner_text()
    picture(page, "answered")


HOSTILE = r"""# Head <img src=x onerror=alert(1)>

<script>window.hit = 1</script>

<img src="http://127.0.0.1:9/x.png" onerror="window.hit = 1"> and <b>bold</b> &lt;i&gt;

[a](javascript:window.hit=1) [b](data:text/html,x) [c](vbscript:x) [d](//evil.example) [e](https://good.example/p?q=1)
[f](https://good.example "t\" onclick=window.hit=1 x=\"") ![picture](https://evil.example/x.png)
<https://auto.example> [g](JaVaScRiPt:window.hit=1) [h](java&#115;cript:window.hit=1)

- **one** `co<de>`
  1. two *three* ~~four~~
- [x] done

| a | b |
|---|--:|
| 1 | <iframe src=x></iframe> |

> quote **deep**

```html
<script>window.hit = 1</script>
```

[ref]: javascript:window.hit=1
"""
LINKS = ["https://good.example/p?q=1", "https://good.example/", "https://evil.example/x.png", "https://auto.example/"]


def test_markdown_becomes_elements_and_hostile_markup_stays_text(browser):
    """An answer with hostile markup runs nothing, loads nothing, and has no link to a script.

    It becomes only the HTML elements that our own Markdown code makes.
    """
    requested: list[str] = []
    with (
        running(FakeEngine(spelling(HOSTILE), context=4000)) as site,
        silent_page(browser, site.url, viewport={"width": 900, "height": 900}) as page,
    ):
        page.on("request", lambda request: requested.append(request.url))
        ask(page)
        said = finished(page)
        picture(page, "markdown")
        assert page.evaluate("window.hit") is None
        assert all(url.startswith(site.url) for url in requested)
        names = said.evaluate("(place) => [...new Set([...place.querySelectorAll('*')].map((made) => made.localName))]")
        assert {*names} == {
            *("a", "blockquote", "br", "code", "del", "em", "h3", "hr", "input", "li", "ol", "p", "pre", "span"),
            *("strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
        } - {"hr"}
        links = said.locator("a").evaluate_all("(links) => links.map((link) => [link.href, link.rel, link.target])")
        assert [href for href, *_ in links] == LINKS
        assert {tuple(rest) for _, *rest in links} == {("noopener noreferrer nofollow", "_blank")}
        attributes = said.evaluate(
            "(place) => [...new Set([...place.querySelectorAll('*')].flatMap((made) => made.getAttributeNames()))]"
        )
        assert {*attributes} <= {
            *("class", "style", "data-token", "href", "title", "rel", "target", "type", "disabled"),
            "start",
        }
        text = said.inner_text()
        for part in (
            "<script>window.hit = 1</script>",
            "<img src=x onerror=alert(1)>",
            "<iframe src=x></iframe>",
            "co<de>",
        ):
            assert part in text
        assert said.locator("h3").inner_text().startswith("Head") and said.locator("strong").first.inner_text() == "one"
        # Every token that is shown is where its text is, and shows its distribution.
        spelled = said.locator(".token").evaluate_all(
            "(marks) => marks.map((mark) => [mark.dataset.token, mark.textContent])"
        )
        pieces = [decode(TOKENIZER, [token], start=False) for token in TOKENIZER.encode(HOSTILE)]
        assert len(spelled) > 100 and all(part.strip() in pieces[int(index)] for index, part in spelled)
        assert [int(index) for index, _ in spelled] == sorted(int(index) for index, _ in spelled)
        said.locator("strong .token").first.hover()
        page.locator("#odds").wait_for()
        page.mouse.move(0, 0)
        said.focus()
        for _ in range(6):
            page.keyboard.press("ArrowRight")
            assert page.locator(".token.shown").count() > 0
        # The answer itself, as the model wrote it.
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Render Markdown").uncheck()
        assert page.locator(".turn.assistant .said").inner_text().strip() == HOSTILE.strip()
        assert page.locator(".said strong").count() == 0
        page.reload()
        assert finished(page).locator("strong").count() == 0 and not page.get_by_label("Render Markdown").is_checked()


def test_markdown_grows_while_it_streams(page, engine):
    engine._script = spelling("Some **bold words** and\n\n- an item\n- and another one")
    engine.pause = 14
    ask(page)
    page.locator(".busy .said strong").wait_for()
    engine.pause = None
    assert finished(page).locator("li").count() == 2


def test_stop_ends_the_request_in_the_engine(page, engine):
    engine.pause = 8
    ask(page)
    page.locator(".busy .token").nth(3).wait_for()
    page.get_by_role("button", name="Stop").click()
    assert 0 < len(finished(page).inner_text()) < len(ANSWER)
    until(lambda: engine.open == 0)
    assert engine.ends == {"cancelled": 1}
    assert "stopped" in page.locator(".turn.assistant .foot").inner_text()


def test_a_token_shows_the_distribution_it_was_drawn_from(page, engine):
    ask(page)
    finished(page)
    page.locator(".token").nth(2).hover()
    odds = page.locator("#odds")
    odds.wait_for()
    assert odds.get_by_role("button").count() == 10
    assert odds.locator(".drawn").count() == 1 and "88.2 %" in odds.locator(".drawn").inner_text()
    picture(page, "distribution")
    page.keyboard.press("Escape")
    assert odds.is_hidden()
    page.mouse.move(0, 0)  # otherwise the browser may report at any time that the mouse is over a token
    # The keyboard can also select a token, and continue from another one.
    page.locator(".turn.assistant .said").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    until(lambda: len(engine.requests) == 2)
    first, second = engine.requests
    assert second.prompt[: len(first.prompt)] == first.prompt and len(second.prompt) == len(first.prompt) + 2
    assert second.seed == first.seed
    finished(page)


@pytest.mark.slow  # 5 s
def test_regenerate_edit_and_the_same_seed(page, engine):
    ask(page)
    finished(page)
    page.get_by_role("button", name="Same seed again").click()
    page.get_by_text("the same text again").wait_for()
    assert engine.requests[0].seed == engine.requests[1].seed
    page.get_by_role("button", name="Regenerate").click()
    until(lambda: len(engine.requests) == 3)
    finished(page)
    assert engine.requests[2].seed != engine.requests[0].seed
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message").input_value() == "Tell me a story about a fox."
    assert page.locator(".turn").count() == 0


def test_the_page_sends_only_the_options_that_are_set(page, engine, site):
    """The page sends no value for an option with an empty field, so that the server uses the model's default."""
    bodies: list[dict] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    ask(page)
    finished(page)
    (body,) = [body for body in bodies if "seed" in body]
    assert {*body} - {"model"} == {"messages", "seed", "stream", "logprobs", "top_logprobs"}


@pytest.mark.slow  # 3 s
def test_settings_reach_the_engine_and_history_is_kept(page, engine):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Seed").fill("12")
    page.get_by_label("Most tokens").fill("5")
    picture(page, "settings")
    ask(page)
    finished(page)
    request = engine.requests[0]
    assert (request.temperature, request.seed, request.max_tokens) == (0.3, 12, 5)
    assert "cut by length" in page.locator(".turn.assistant .foot").inner_text()
    page.reload()
    assert len(finished(page).inner_text()) > 0
    page.get_by_role("button", name="New").click()
    page.reload()
    page.get_by_role("heading", name="stories").wait_for()
    assert page.locator(".turn").count() == 0


@pytest.mark.slow  # 2 s
def test_an_adapter_is_chosen_in_the_settings(browser, engine):
    with running(engine, adapters=("robot",)) as site, silent_page(browser, site.url) as page:
        page.get_by_role("heading", name="stories").wait_for()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Model").select_option("robot")
        page.get_by_role("heading", name="robot").wait_for()
        ask(page)
        finished(page)
    assert [request.adapter for request in engine.requests] == ["robot"]


def test_thoughts_are_folded_and_markup_in_them_stays_text(browser):
    thinks = ids_of("<|channel|>analysis<|message|>A <i>fox</i>?<|end|><|start|>assistant<|channel|>final<|message|>")
    engine = FakeEngine(lambda _: [*thinks, *ids_of("The fox.<|return|>")], context=1000)
    engine.pause = len(thinks) - 8  # pauses during the thoughts
    with (
        running(engine, template=TEMPLATE, tokenizer=HARMONY) as site,
        silent_page(browser, site.url, viewport={"width": 400, "height": 700}) as page,
    ):
        ask(page, "Who?")
        page.get_by_text("Thinking…").wait_for()
        engine.pause = None
        assert finished(page).inner_text() == "The fox."
        thoughts = page.locator(".thoughts div")
        assert thoughts.is_hidden()
        page.get_by_text("Thoughts").click()
        assert thoughts.inner_text() == "A <i>fox</i>?" and page.locator(".thoughts i").count() == 0
        picture(page, "thoughts")
        page.locator(".token").first.hover()  # no token can be chosen, since that would lose the thoughts
        page.locator("#odds").wait_for()
        assert page.locator("#odds").get_by_role("button").first.is_disabled()
        page.reload()
        assert finished(page).inner_text() == "The fox." and page.get_by_text("Thoughts").is_visible()
        engine.pause = len(thinks) - 8
        ask(page, "Who else?")  # this answer is stopped during its thoughts
        page.get_by_text("Thinking…").wait_for()
        page.get_by_role("button", name="Stop").click()
        finished(page)
        ask(page, "And who then?")
        page.get_by_text("Thinking…").wait_for()
        assert page.get_by_text("Thoughts").count() == 2  # an earlier answer no longer shows "Thinking…"
        engine.pause = None
        finished(page)


@pytest.mark.slow  # 3 s
def test_thoughts_between_tags_are_folded_too(browser):
    written = "<think>\n**Which** fox?\n</think>\n\nThe **red** one.|END|"
    with replies(written) as site, silent_page(browser, site.url) as page:
        ask(page, "Which?")
        assert finished(page).inner_text() == "The red one."
        page.get_by_text("Thoughts").click()
        assert page.locator(".thoughts div").inner_text() == "**Which** fox?"  # thoughts are shown as they are


def test_old_turns_make_room_for_an_answer_and_that_is_said(browser):
    """The page drops old turns, and says so, to keep a quarter of a small context free for the answer."""
    engine = FakeEngine(spelling(ANSWER), context=192)
    with running(engine) as site, silent_page(browser, site.url) as page:
        page.get_by_role("heading", name="stories").wait_for()
        for count in range(1, 5):
            ask(page, f"The fox sang {'and slept ' * count}.")
            until(lambda count=count: len(engine.requests) == count)
            finished(page)
        prompts = [decode(TOKENIZER, request.prompt) for request in engine.requests]
        assert "sang and slept ." in prompts[1] and "sang and slept ." not in prompts[3]
        assert all(f"sang {'and slept ' * count}." in prompt for count, prompt in enumerate(prompts, 1))
        assert all(len(request.prompt) <= engine.context * 3 / 4 for request in engine.requests)
        assert page.locator(".turn").count() == 8
        assert page.get_by_text("context of 192 tokens").count() == 1
        picture(page, "forgotten")
        page.get_by_role("button", name="Same seed again").click()
        page.get_by_text("the same text again").wait_for()
        assert engine.requests[3].prompt == engine.requests[4].prompt
        page.reload()
        finished(page)
        assert page.get_by_text("was forgotten").count() == 1


def test_no_turn_is_dropped_if_dropping_does_not_help(browser, engine, site):
    with opened_page(browser, site.url) as page:  # its console names the failed request
        page.get_by_role("heading", name="stories").wait_for()
        ask(page, "Who sang?")
        finished(page)
        ask(page, "fox " * 300)
        page.get_by_text("do not fit in the context").wait_for()
        assert page.get_by_text("was forgotten").count() == 0
        page.get_by_role("button", name="Edit").last.click()
        ask(page, "And who slept?")
        until(lambda: len(engine.requests) == 2)
        assert "Who sang?" in decode(TOKENIZER, engine.requests[1].prompt)


def test_an_error_is_shown_in_place_of_an_answer(browser, site):
    with opened_page(browser, site.url) as page:  # its console names the failed request
        page.get_by_role("heading", name="stories").wait_for()
        ask(page, "fox " * 300)
        page.get_by_text("do not fit in the context").wait_for()


@pytest.mark.sampled(1)  # 3 s each
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_has_no_sideways_scrolling(browser, site, scheme):
    options = {"viewport": {"width": 400, "height": 700}, "color_scheme": scheme, "has_touch": True}
    with opened_page(browser, site.url, **options) as page:
        page.get_by_role("heading", name="stories").wait_for()
        ask(page)
        finished(page)
        page.get_by_role("button", name="Settings").tap()
        page.locator("#settings").wait_for()  # the click follows the tap a moment later
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        picture(page, f"narrow-settings-{scheme}")
        page.get_by_role("button", name="Settings").tap()
        page.locator("#settings").wait_for(state="hidden")
        page.locator(".token").nth(4).tap()
        page.locator("#odds").wait_for()
        box = page.locator("#odds").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 400
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        picture(page, f"narrow-{scheme}")
