"""The page that runs the specification in a browser tab: its Python side here, and the built page in Chromium."""

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import llamaspec.reference.rmsnorm
from llamaspec.learn.lab import built_in
from llamaspec.learn.lab.check import check
from llamaspec.learn.lab.folder import ALL, KERNEL, kernel
from llamaspec.learn.site.tab import inside, pack
from llamaspec.reference import llama, rmsnorm, softmax
from llamaspec.reference.sentencepiece_bpe import decode, encode
from tests.support.browser import opened_page, picture, problems, silent_page
from tests.support.processes import REPOSITORY
from tests.support.site_search import require_site

PACKAGES = ("hypothesis", "jaxtyping", "numpy", "sortedcontainers", "wadler_lindig")
PROMPT = "Once upon a time, a little fox found a"
LIMIT = 30e6  # bytes
# Elements with more content than fits.
WIDER = """() => [...document.querySelectorAll("html, body *")].filter((element) =>
    element.scrollWidth > element.clientWidth && getComputedStyle(element).display !== "inline"
  ).map((element) => `${element.tagName}#${element.id}: ${element.scrollWidth} in ${element.clientWidth}`)"""


def answers(**request):
    """Send a request to the Python side of the tab, and return its messages."""
    messages = []
    inside.answer(json.dumps(request), lambda text: messages.append(json.loads(text)))
    return messages


def sources():
    """Map the ops to the files of their definitions."""
    return {item["op"]: item["source"] for item in answers(do="contents")[0]["definitions"]}


@pytest.mark.sampled(2)  # 1 to 4 s each
@pytest.mark.parametrize("op", inside.OPS)
def test_a_definition_is_within_its_bounds(op):
    *progress, verdict = answers(do="verify_definition", op=op, source=sources()[op])
    assert verdict["solved"], verdict
    assert progress[-1] == {"examples": inside.DRAWS, "of": inside.DRAWS}


def test_a_changed_definition_gets_a_counterexample_and_leaves_ours_as_it_was():
    source = sources()["rmsnorm"].replace("+ eps", "- eps")
    assert source != sources()["rmsnorm"]
    verdict = answers(do="verify_definition", op="rmsnorm", source=source)[-1]
    assert not verdict["solved"] and verdict["lines"][0].startswith(
        "violated      rmsnorm float32  reference/rmsnorm.py"
    )
    assert sys.modules["llamaspec.reference.rmsnorm"] is rmsnorm and llama.rmsnorm is rmsnorm.rmsnorm
    assert llamaspec.reference.rmsnorm is rmsnorm  # a second copy would have no attribute of this name


@pytest.mark.parametrize("request_", ["verify_definition", "tell"])
def test_a_definition_that_cannot_be_imported_gives_one_line(request_):
    more = {"prompt": PROMPT, "tokens": 3} if request_ == "tell" else {}
    [answer] = answers(do=request_, op="softmax", source="def softmax(x:", **more)
    assert answer["lines"] == [
        "reference/softmax.py cannot be imported: SyntaxError: '(' was never closed (softmax.py, line 1)"
    ]
    assert sys.modules["llamaspec.reference.softmax"] is softmax


def test_an_exercise_gets_the_verdict_of_lab_check(tmp_path):
    (tmp_path / KERNEL).write_text(kernel(ALL[3]), encoding="utf-8")
    apart = check(ALL[3], tmp_path)
    *_, here = answers(do="check_exercise", number=3, source=kernel(ALL[3]))
    assert not here["solved"] and here["lines"][1:] == [line for line in apart.lines if line][1:]
    assert answers(do="check_exercise", number=3, source="import nothing")[0]["lines"][0].startswith("kernel.py cannot")
    [sent] = answers(do="exercise", number=3)
    assert sent["source"] == kernel(ALL[3]) and sent["hint"] == ALL[3].hint


@pytest.fixture(scope="module")
def in_a_tab(tmp_path_factory):
    """Return a function that sends requests to a Python that has only what the tab has, and returns their messages.

    It also has no type checker, which would compare the classes of both copies of the reference.
    """
    folder = tmp_path_factory.mktemp("tab")
    with zipfile.ZipFile(io.BytesIO(pack._site(REPOSITORY, []))) as archive:
        archive.extractall(folder)
    for name in PACKAGES:
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(package.locate_file(top))))
    ask = (
        "import json, sys; from llamaspec.learn.site.tab.inside import answer\n"
        "for request in json.load(sys.stdin):\n"
        "    answer(json.dumps(request), print)\n"
        "    print('null')"
    )

    def send(*requests):
        command, environment = [sys.executable, "-S", "-c", ask], {**os.environ, "PYTHONPATH": str(folder)}
        text = json.dumps(requests)
        done = subprocess.run(command, input=text, env=environment, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        messages = [json.loads(line) for line in done.stdout.splitlines()]
        for _ in requests:
            end = messages.index(None)
            yield messages[:end]
            del messages[: end + 1]

    return send


def test_stories_come_from_the_edited_definition(in_a_tab):
    model, source = built_in.built_in(), sources()["swiglu"]
    ids = [model.start, *encode(PROMPT, model.vocabulary)]
    ids += islice(llama.greedy(model.params, np.array(ids), config=model.config), 12)
    changed = [source.replace("sigmoid * up", "up"), source.replace("    return", "    1 / 0\n    return")]
    assert source not in changed
    requests = [
        {"do": "tell", "op": "swiglu", "source": text, "prompt": PROMPT, "tokens": 12}
        for text in (source, *changed, source)
    ]
    own, other, failed, again = in_a_tab(*requests)
    assert own[-1] == again[-1] == {"story": decode(ids, model.vocabulary)} and own[-2]["tokens"] == 12
    assert "".join(message.get("text", "") for message in own) == own[-1]["story"]
    assert other[-1]["story"].startswith(PROMPT) and other[-1] != own[-1]
    assert failed[-1] == {"lines": ["The model stopped: ZeroDivisionError: division by zero"]}


def test_exercises_need_neither_jax_nor_bfloat16(in_a_tab):
    forward = (
        "from llamaspec.reference import llama\n\n\ndef forward(params, tokens, *, config):\n"
        "    return llama.forward(params, tokens, llama.empty_cache(config), config=config)[0]\n"
    )
    requests = [
        {"do": "check_exercise", "number": number, "source": source}
        for number, source in ((29, kernel(ALL[29])), (47, forward))
    ]
    broken, right = (messages[-1] for messages in in_a_tab(*requests))
    assert not broken["solved"] and not any("raised" in line for line in broken["lines"])
    assert right == {"solved": True, "lines": ["Solved."]}


def test_an_exported_model_is_the_built_in_one_bit_for_bit():
    assert len(built_in.exported()) < 4e6
    copy, model = pickle.loads(built_in.exported()), built_in.built_in()
    assert copy[1:] == model[1:]
    np.testing.assert_array_equal(copy.params.embedding, model.params.embedding, strict=True)
    for layer, own in zip(copy.params.layers, model.params.layers, strict=True):
        np.testing.assert_array_equal(layer.q.weight, own.q.weight, strict=True)


@pytest.fixture
def repository(tmp_path):
    """Make a repository with only the pins."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / pack.PINS).write_text((REPOSITORY / pack.PINS).read_text())
    return tmp_path


def test_without_a_registry_the_page_says_why_it_is_absent(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    line = pack.write_page(repository, repository / "tab")
    assert line == "the site has no page that runs Python: npm cannot fetch pyodide 0.29.5: it is not installed"
    page = (repository / "tab/index.html").read_text()
    assert "when it was built, npm cannot fetch pyodide 0.29.5: it is not installed." in page


def test_a_registry_that_cannot_be_reached_costs_the_page_and_nothing_else(repository, monkeypatch):
    (repository / pack.PINS).write_text(f"pip hypothesis 6 hypothesis.whl {'0' * 64}\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    line = pack.write_page(repository, repository / "tab")
    assert line.startswith(
        "the site has no page that runs Python: pip cannot fetch hypothesis 6: no answer, or no such"
    )
    assert [file.name for file in (repository / "tab").iterdir()] == ["index.html"]


def test_a_file_with_another_checksum_is_refused(repository, monkeypatch):
    def wheel(registry, package, version, folder):
        (folder / "a.whl").write_bytes(b"changed")
        return folder / "a.whl"

    (repository / pack.PINS).write_text(f"# a pin\npip a 1 a.whl {'0' * 64}\n")
    monkeypatch.setattr(pack, "_download", wheel)
    with pytest.raises(pack.Unavailable, match=f"a.whl: expected the checksum {'0' * 64}, got d67e2e94"):
        pack.fetched(repository)


def test_the_browser_refuses_connections_of_a_worker(browser, tmp_path):
    worker = (
        "addEventListener('securitypolicyviolation', event => postMessage(event.effectiveDirective));"
        "fetch('https://host.invalid/').catch(() => null)"
    )
    refused = (
        "worker => new Promise(done => new Worker(URL.createObjectURL(new Blob([worker]))).onmessage = done)"
        ".then(event => event.data)"
    )
    file = tmp_path / "page.html"
    file.write_text((pack.PAGE / "index.html").read_text().partition("<script")[0])
    with opened_page(browser, file.as_uri(), offline=True) as page:
        assert page.evaluate(refused, worker) == "connect-src"


@pytest.fixture(scope="module")
def page(browser):
    """Open the built page without a network, and wait until Python runs in it. It takes 10 s."""
    folder = require_site() / "tab"
    if not (folder / "page.js").is_file():
        pytest.skip(f"needs packages for browsers: {(folder / 'index.html').read_text().partition('built, ')[2][:100]}")
    assert sum(file.stat().st_size for file in folder.iterdir()) < LIMIT
    with silent_page(browser, (folder / "index.html").as_uri(), offline=True) as opened:
        opened.locator("html[data-ready]").wait_for()
        yield opened


@pytest.mark.slow  # with the others of the page 15 s, most of it in Chromium
def test_the_page_has_the_license_of_each_package(page):
    links = page.locator("footer a[href$='.txt']")
    assert sorted(links.nth(i).inner_text().partition("-")[0] for i in range(links.count())) == list(PACKAGES)
    licenses = [require_site() / "tab" / links.nth(i).get_attribute("href") for i in range(links.count())]
    [numpy] = [file.read_text() for file in licenses if "numpy" in file.name]
    assert numpy.startswith("Copyright (c) 2005-2024, NumPy Developers.") and "THE COPYRIGHT HOLDERS" in numpy


def edit_and_run(page, item, edit):
    """Choose an item of the page, change its source with `edit`, and run it."""
    page.locator("#what").select_option(item)
    page.locator("#restore").click()
    source = page.locator("#source")
    source.fill(edit(source.input_value()))
    page.locator("#run").click()


@pytest.mark.slow
def test_the_tab_tells_a_story_and_finds_a_counterexample(page):
    edit_and_run(page, "rmsnorm", lambda source: source.replace("+ eps", "- eps"))
    page.locator("#verdict[data-solved=false]", has_text="violated").wait_for()
    for width, scheme in ((1400, "light"), (800, "dark"), (400, "light")):
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme=scheme)
        picture(page, f"tab-{width}-{scheme}")
        assert page.evaluate(WIDER) == [] and problems(page) == []
    assert page.locator("#story").inner_text().startswith(PROMPT)
    assert page.locator("#rate").inner_text().endswith(" tokens/s")


@pytest.mark.slow
def test_an_endless_loop_stops_and_the_page_goes_on(page):
    loop = "def softmax(x):\n    while True:\n        pass\n"
    edit_and_run(page, "softmax", lambda source: loop)
    page.locator("#state", has_text="Running.").wait_for()
    assert page.evaluate("1 + 1") == 2
    page.locator("#stop").click()
    page.locator("#verdict", has_text="Stopped.").wait_for()
    page.locator("#state", has_text="Ready").wait_for()
    edit_and_run(page, "lab-7", lambda source: source)
    page.locator("#verdict[data-solved=false]", has_text="The error bound was violated").wait_for()
