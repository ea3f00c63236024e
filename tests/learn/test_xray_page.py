"""The built-in model's X-ray page in a browser, opened from a file: its numbers equal the reference's."""

import re

import numpy as np
import pytest

from llamaspec.learn.quantizers.by_inputs import METHODS
from llamaspec.learn.quantizers.schemes import SCHEMES
from llamaspec.learn.xray.page import data_of
from llamaspec.model.cache import position_bytes
from llamaspec.reference.config import Config
from llamaspec.reference.rope import frequencies, halves_to_interleaved, rope_halves, rope_interleaved
from llamaspec.reference.sampling import distribution, draw
from tests.learn.test_xray import numbers, script
from tests.support.browser import picture, problems, silent_page
from tests.support.processes import run_python

pytestmark = pytest.mark.slow  # 20 s, with a browser; test_xray.py checks the data of the page

TEXT = "The fox found"
OPS = ("norm_qkv", "attend", "project_add", "norm_gate_up", "down_add")
LAST = 4  # position of the newest token


# One coarse scheme, whose text soon differs from the exact one, stands for all schemes here: `test_xray.py` checks the
# data of all. The whole page would take 35 s of processor time, and this one takes 8.
QUICK = """
from llamaspec.learn.quantizers.schemes import SCHEMES, rounded
from llamaspec.learn.xray import quantized
quantized.TOLD = 4
quantized.rounded = lambda checkpoint, _: rounded(checkpoint, SCHEMES["GGUF TQ1_0"].rounded)
from llamaspec import cli; cli.main()
"""


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory, browser):
    """Create a page with the command `xray`, and return its folder. Skip the test if there is no browser."""
    folder = tmp_path_factory.mktemp("xray") / "page"
    done = run_python(QUICK, "xray", TEXT, "--out", str(folder))
    assert (done.code, done.out) == (0, f"{folder / 'index.html'}\n")
    assert f"{LAST + 1} tokens" in done.err and "10 layers" in done.err
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 8e6
    return folder


@pytest.fixture
def opened(browser, page_folder):
    def at(width=1600, scheme="light"):
        options = {"offline": True, "viewport": {"width": width, "height": 1000}, "color_scheme": scheme}
        return silent_page(browser, (page_folder / "index.html").as_uri(), **options)

    return at


@pytest.fixture
def page(opened):
    with opened() as page:
        page.locator("html[data-ready]").wait_for()
        yield page


@pytest.fixture
def model(page_folder):
    return script(data_of(page_folder / "index.html") / "model.js")


@pytest.fixture
def token(page_folder):
    return script(data_of(page_folder / "index.html") / f"token-{LAST}.js")


def text(value: float, digits: int = 4) -> str:
    """Format a number that needs no exponent, as the page does."""
    return np.format_float_positional(float(f"{value:.{digits - 1}e}"), trim="-").replace("-", "−")


def choose(page, group: str, value) -> None:
    page.locator(f'input[name={group}][value="{value}"]').check()


def set_slider(page, label: str, value: float) -> None:
    page.get_by_role("slider", name=label).fill(str(value))


def test_every_op_of_a_block_opens_with_the_numbers_of_the_walk(page, token):
    for op in (*OPS, "norm_logits"):
        if op == "norm_logits":
            choose(page, "floor", "out")
        else:
            choose(page, "floor", 9)
            choose(page, "op", op)
        page.locator("#op h3", has_text=op).wait_for()
        layer = None if op == "norm_logits" else 9
        [visit] = [entry for entry in token["visits"] if (entry["op"], entry["layer"]) == (op, layer)]
        rows = page.locator("#op tbody tr")
        assert rows.count() == len(visit["outputs"])
        for i, output in enumerate(visit["outputs"]):
            name, norm, exact, ran, _, share = rows.nth(i).locator("th, td").all_inner_texts()
            assert name == output["map"]["name"] and norm == text(output["norm"])
            if abs(output["reference"]) > 1e-3:
                assert (exact, ran) == (text(output["reference"], 9), text(output["running"], 9))
            assert float(share.removesuffix(" %")) == pytest.approx(100 * output["share"], abs=0.5)
        assert page.locator("#op math").count() >= 1 and page.locator("#op .ran").count() >= 2
        for view in ("difference", "share", "values"):
            choose(page, "view", view)
            assert page.locator("#op .map").count() == 1 + len(visit["outputs"])
        picture(page, f"op-{op}")


def test_a_heat_map_is_read_with_the_keyboard_alone(page, token):
    canvas = page.get_by_role("img", name=re.compile("^q, heads 4 × head_dim 32: how large"))
    canvas.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    output = token["visits"][0]["outputs"][0]
    value, off, share = (numbers(output["map"][part])[34] for part in ("values", "difference", "share"))
    label = page.locator("output", has_text="q[1, 2]").inner_text()
    assert label.startswith(f"q[1, 2] = {text(value, 7)}; definition {text(value - off, 9)}, ")
    assert float(re.findall(r", ([\d.]+) % of the bound", label)[0]) == pytest.approx(100 * share, abs=0.5)


def test_the_whole_page_is_reached_by_tab_and_arrows(page):
    seen: list[str] = []
    page.locator("body").press("Tab")
    for _ in range(70):
        at = "document.activeElement"
        seen.append(page.evaluate(f"{at}.name || {at}.getAttribute('aria-label') || {at}.textContent"))
        page.keyboard.press("Tab")
    page.locator("input[name=token]:checked").focus()
    page.keyboard.press("ArrowLeft")
    page.locator("#attention-lead", has_text="␣f").wait_for()
    assert page.evaluate("XRAY.chosen.token") == LAST - 1
    page.locator("input[name=op]:checked").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#op h3", has_text="attend").wait_for()
    reached = {"token", "floor", "op", "view", "head", "scheme", "matrix", "Temperature", "Top-k", "Top-p", "Min-p"}
    reached |= {"Random number", "Position of the query", "Tokens kept", "Skip to the model"}
    assert reached <= {*seen}


def test_attention_is_that_of_the_token_and_the_head(page, token):
    choose(page, "floor", 5)
    choose(page, "head", 2)
    weights = numbers(token["attention"]["5"]).reshape(4, -1)[2]
    percentages = [float(label.removesuffix(" %")) for label in page.locator(".attended small").all_inner_texts()]
    assert len(percentages) == LAST + 1 and np.abs(np.array(percentages) - 100 * weights).max() <= 0.5


def test_sliders_shape_the_distribution_by_the_definition(page, token):
    labels = ("Temperature", "Top-k", "Top-p", "Min-p", "Random number")
    logits = numbers(token["logits"])
    # Three sums over the vocabulary in another order, and exponentials that may differ in the last bit.
    bound = 4 * len(logits) * 2.0**-53
    for settings in (
        (1.0, 0, 1.0, 0.0, 0.5),
        (0.0, 0, 0.95, 0.0, 0.0),
        (1.6, 7, 0.9, 0.05, 0.99),
        (2.0, 40, 0.31, 0.4, 0.3),
    ):
        for label, value in zip(labels, settings, strict=True):
            set_slider(page, label, value)
        temperature, top_k, top_p, min_p, u = settings
        filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        p = distribution(logits, logits > np.inf, repetition_penalty=1.0, **filters)
        rows = page.locator(".odds li").evaluate_all("(all) => all.map(({ dataset }) => [dataset.id, dataset.p])")
        assert len(rows) == 16
        for id, printed in rows:
            assert abs(float(printed) - p[int(id)]) <= bound * p[int(id)]
        assert int(page.locator("#drawn").get_attribute("data-id")) == draw(p, u)
        assert (
            f"{np.count_nonzero(p):,} of {len(p):,} tokens can be drawn" in page.locator("#distribution").inner_text()
        )


def test_filters_agree_on_ties_and_extremes(page):
    for logits in ([0.0, 1.0, 1.0, 1.0, -3.0], [5.0] * 4, [0.0, -800.0, 30.0]):
        for options in (
            (0.0, 0, 1.0, 0.0),
            (1.0, 2, 1.0, 0.0),
            (0.05, 0, 0.5, 0.0),
            (1.0, 0, 0.3, 0.9),
            (2.0, 3, 0.99, 1.0),
        ):
            t, k, top_p, min_p = options
            p = distribution(
                np.array(logits), np.zeros(len(logits), bool),
                temperature=t, top_k=k, top_p=top_p, min_p=min_p, repetition_penalty=1.0,
            )  # fmt: skip
            call = f"Array.from(distribution({logits}, {{temperature: {t}, topK: {k}, topP: {top_p}, minP: {min_p}}}))"
            np.testing.assert_allclose(page.evaluate(call), p, rtol=1e-14, err_msg=f"{logits} {options}")


def test_arrows_turn_by_the_definition_in_both_layouts(page, model, token):
    set_slider(page, "Position of the query", 37)
    page.locator("#rope-slider output", has_text="37").wait_for()
    q = numbers(token["before_rope"]["0"])[:32]
    turns, at = frequencies(32, theta=1e4), np.array([37])
    np.testing.assert_array_equal(model["frequencies"], turns)
    mixed = halves_to_interleaved(q, heads=1)
    key = numbers(model["first_keys"]["0"])[:32]
    for x, pairing, definition in ((q, "halves", rope_halves), (mixed, "interleaved", rope_interleaved)):
        call = f"Array.from(turned({x.tolist()}, 37, XRAY.model.frequencies, PAIRINGS.{pairing}))"
        np.testing.assert_allclose(page.evaluate(call), definition(x[None, None], at, turns)[0, 0], rtol=0, atol=1e-14)
    assert page.evaluate(f"Array.from(interleave({q.tolist()}))") == mixed.tolist()
    scores = page.evaluate(f"scoresAt({q.tolist()}, {key.tolist()}, 37, XRAY.model.frequencies)")
    right = rope_halves(q[None, None], at, turns)[0, 0] @ key / np.sqrt(32)
    wrong = rope_interleaved(q[None, None], at, turns)[0, 0] @ key / np.sqrt(32)
    assert scores["halves"] == pytest.approx(right, abs=1e-14) == scores["interleaved"]
    assert scores["wrong"] == pytest.approx(wrong, abs=1e-14)
    assert text(right) in page.locator("#scores .right").inner_text()
    assert page.locator(".dial").count() == 16 and page.locator(".pairing path").count() == 32


def test_the_cache_costs_what_the_definition_says(page, model):
    names = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "eps", "theta")
    config = Config(**{name: model["config"][name] for name in names})
    set_slider(page, "Tokens kept", 1000)
    bars = page.locator("#cache-cost [data-bytes]")
    byte_counts = [int(bars.nth(i).get_attribute("data-bytes")) for i in range(3)]
    position_sizes = [position_bytes(config, dtype=np.dtype(dtype)) for dtype in ("float32", "float16", "int8")]
    assert byte_counts == [1000 * bytes for bytes in position_sizes]


def test_every_scheme_shows_its_row_and_tells(page, model):
    quantize = model["quantize"]
    assert quantize["names"] == [*SCHEMES, *METHODS]
    for name, about in {**SCHEMES, **METHODS}.items():
        choose(page, "scheme", name)
        choose(page, "matrix", "down")
        row = quantize["schemes"][name]["rows"]["down"]
        page.get_by_role("img", name=re.compile("^Weights, and what")).focus()
        page.keyboard.press("ArrowRight")
        output = page.locator("#row output").first.inner_text()
        error, within = numbers(row["error"])[0], row["guaranteed"] and numbers(row["guaranteed"])[0]
        code = "" if row["codes"] is None else f", code {row['codes'][0]}"
        assert output.startswith("weight 0: ") and code in output
        if abs(error) > 1e-3:
            assert f"off {text(error, 3)}" in output
        assert ("guaranteed" in output) == (within is not None)
        row_text = page.locator("#row").inner_text()
        [bits] = re.findall(r": ([\d.]+) bits a weight", row_text)
        assert float(bits) == pytest.approx(about.bits, rel=5e-4)  # four digits
        assert about.guarantee in row_text and about.page in row_text
        if name in METHODS:
            assert "calibrated on other texts" in page.locator("#told").inner_text()
        else:
            assert page.locator("#divergence").inner_text()
            assert page.locator(".told").last.inner_text().startswith(TEXT)
    for matrix in quantize["matrices"]:
        choose(page, "matrix", matrix)
        assert f"'s {matrix}, quantized by itself" in page.locator("#row").inner_text()
    picture(page, "quantization-schemes")


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1600, "dark")])
def test_it_fits_and_axe_finds_nothing(opened, width, scheme):
    with opened(width, scheme) as page:
        page.locator("html[data-ready]").wait_for()
        choose(page, "op", "attend")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        caption = page.locator("#op caption").bounding_box()
        assert caption["x"] + caption["width"] <= width
        ops = page.locator("#block .half .radio")  # each op but the first has an arrow before it
        assert all(ops.nth(i).bounding_box()["x"] >= 16 for i in range(ops.count()))
        assert problems(page) == []
        for section in ("text", "tower", "attention", "positions", "cache", "next", "quantization"):
            page.locator(f"#{section}").scroll_into_view_if_needed()
            picture(page, f"{section}-{width}-{scheme}")
