"""Benchmarks of concurrent requests run to the end.

Their figures are not checked, because they need an idle machine.
"""

import doctest
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.benchmarks.audits import peers
from llamaspec.benchmarks.audits.serve import AFTER, BURST, measure
from llamaspec.benchmarks.common import load
from llamaspec.benchmarks.common.load import Answered, Ask, Workload, arrivals, draw_requests, send, summarize
from llamaspec.benchmarks.suites import serve_suite
from llamaspec.benchmarks.suites.serve_suite import Served, our_command, processor_seconds, served
from llamaspec.cli import llamaspec
from tests.serving.serving_site import EOS, FakeEngine, running
from tests.support.random_models import SMALL
from tests.support.waiting import PATIENCE

# A server that answers as llama.cpp's server does: it takes options that our server does not have, and reports how many
# prompt tokens it found in its cache.
STAND_IN = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
assert "--model" in sys.argv and "--parallel" in sys.argv

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, *lines):
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\\n\\n".join(lines).encode())
    def do_GET(self):
        self.answer("ok")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "cache_salt" not in body
        count, read = body["max_tokens"], len(body["prompt"])
        usage = {{"prompt_tokens": read, "completion_tokens": count, "prompt_tokens_details": {{"cached_tokens": 1}}}}
        pieces = [{{"choices": [{{"text": "a"}}]}}] * count
        events = [*pieces, {{"choices": [], "usage": usage}}]
        self.answer(*("data: " + json.dumps(each) for each in events), "data: [DONE]")

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine()) as site:
        yield site


@pytest.mark.slow  # 8 s
def test_a_model_is_measured():
    config = replace(SMALL, dim=64, head_dim=16, ffn=128, layers=1, context=AFTER + 16 * BURST)
    figures = measure(config, "float32", "q8", [2], rounds=1)
    assert [*figures] == ["one sequence, ms a token", "2 together", "1 of 2"]
    assert all(figure > 0 for figure in figures.values())


def test_requests_come_as_a_poisson_process():
    assert not arrivals(3, None, seed=0).any()
    times = arrivals(10_000, 4.0, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps > 0).all()
    # Mean and standard deviation of n exponential gaps with mean 1/4, within five standard errors: 1 / sqrt(n) and
    # sqrt(2 / n) of it.
    assert abs(gaps.mean() - 1 / 4) < 5 / 4 / np.sqrt(len(gaps))
    assert abs(gaps.std() - 1 / 4) < 5 / 4 * np.sqrt(2 / len(gaps))


@given(st.integers(1, 60), st.integers(1, 300), st.integers(0, 60), st.floats(0, 1), st.integers(8, 200))
def test_requests_fit_the_context_and_share_what_they_should(count, prompt, prefix, shared, context):
    work = Workload(requests=count, prompt=prompt, prefix=prefix, shared=shared, answer=20)
    asks = draw_requests(work, vocab=1000, context=context)
    assert asks == draw_requests(work, vocab=1000, context=context)
    assert len(asks) == count and [ask.seed for ask in asks] == [*range(count)]
    for ask in asks:
        assert 1 <= len(ask.prompt) and 1 <= ask.max_tokens and len(ask.prompt) + ask.max_tokens <= context
    heads = {ask.prompt[:8] for ask in asks if len(ask.prompt) > 8}
    if shared == 1 and min(prefix, context // 4) >= 8:
        assert len(heads) <= work.prefixes


def test_lengths_and_shared_prefixes_are_as_said():
    asks = draw_requests(Workload(requests=4000), vocab=1000, context=4096)
    heads = Counter(ask.prompt[:128] for ask in asks)
    common = {head for head, count in heads.items() if count > 1 and len(head) == 128}
    assert len(common) == 4
    sharing = [ask for ask in asks if ask.prompt[:128] in common]
    # A binomial's share and a log-normal's median, within five standard errors. A median's error is 1.25 times a
    # mean's.
    assert abs(len(sharing) / 4000 - 0.5) < 5 * 0.5 / np.sqrt(4000)
    own = [len(ask.prompt) - 128 * (ask.prompt[:128] in common) for ask in asks]
    assert abs(np.log(np.median(own) / 64)) < 5 * 1.25 * 0.7 / np.sqrt(4000) + 1 / 64
    assert abs(np.mean([ask.max_tokens for ask in asks]) - 32) < 5 * 32 / np.sqrt(4000)


def test_every_answer_is_read_as_the_server_gave_it(site):
    asks = [Ask((5, 6, 7 + i), 3 + i, i) for i in range(6)]
    counts: list[int] = []
    answers = send(site.url, asks, [0.0] * 6, extra={"cache_salt": "a"}, done=counts.append)
    assert counts == [1, 2, 3, 4, 5, 6]
    request = max(site.engine.requests, key=lambda request: request.max_tokens)
    assert (request.seed, request.ignore_eos, EOS in request.stop_ids) == (5, True, False)
    for ask, answer in zip(asks, answers, strict=True):
        assert (answer.error, answer.prompt_tokens, answer.tokens) == (None, 3, ask.max_tokens)
        assert answer.text and all(a <= b for a, b in pairwise((*answer.pieces, answer.ended)))
    assert [reply.text for reply in send(site.url, asks, [0.0] * 6, extra={})] == [reply.text for reply in answers]


def test_requests_do_not_wait_for_earlier_answers(site, monkeypatch):
    """The load generator sends a second request before the first answer ends.

    The server holds the first answer until then.
    """
    monkeypatch.setattr(load, "HOPELESS", 20.0)
    asks, ended = [Ask((5,), 9, 0), Ask((5,), 3, 1)], []
    site.engine.pause = 5

    def done(count: int) -> None:
        ended.append(count)
        site.engine.pause = None

    first, second = send(site.url, asks, [0.0, 0.01], extra={}, done=done)
    assert (first.tokens, second.tokens, ended) == (9, 3, [1, 2]) and second.ended < first.ended


def test_failed_requests_are_counted_with_a_reason(site):
    site.engine.poison = 9
    asks = [Ask((9, 9), 2, 0), Ask((1,) * 200, 2, 1), Ask((5,), 2, 2)]
    poisoned, too_long, right = send(site.url, asks, [0.0] * 3, extra={})
    site.engine.poison = None
    assert "logits are not finite" in (poisoned.error or "") and (too_long.error or "").startswith("400 ")
    report = summarize([poisoned, too_long, right])
    assert (len(report["errors"]), report["tokens"], report["requests"]) == (2, 2, 3)
    assert any("2 requests failed" in line for line in serve_suite.wrong({"rows": [{**report, "due": "1.00"}]}))
    (refused,) = send("http://127.0.0.1:1", [Ask((1,), 1, 0)], [0.0], extra={})
    assert "ClientConnectorError" in (refused.error or "")


def test_delays_count_from_the_scheduled_time():
    answers = [
        Answered(1.0, (1.5, 2.0, 2.5), 2.5, "abc", 10, 3, 4, None),
        Answered(2.0, (2.1, 4.1), 5.0, "d", 10, 4, 0, None),
        Answered(3.0, (), 4.0, "", 0, 0, 0, "503 no"),
    ]
    report = summarize(answers, ["abc", "x", ""])
    assert report["first_token"]["p50"] == pytest.approx((0.5 + 0.1) / 2)
    assert report["between_tokens"]["p50"] == pytest.approx((0.5 + 1.0) / 2)
    assert report["longest_pause"]["p50"] == pytest.approx((0.5 + 2.0) / 2)
    assert report["whole"]["p50"] == pytest.approx((1.5 + 3.0) / 2)
    assert (report["tokens_a_second"], report["requests_a_second"]) == (7 / 5, 2 / 5)
    assert (report["cached_tokens"], report["different"]) == (4, 1)
    assert "1 texts" in serve_suite.wrong({"rows": [{**report, "due": "1.00", "errors": []}]})[0]


def test_a_server_is_waited_for_and_ended(tmp_path: Path):
    with served([stand_in(tmp_path), "--model", "--parallel"]) as server:
        assert urlopen(f"{server.url}/health", timeout=PATIENCE).read() == b"ok"
        assert (processor_seconds(server.pid) or 0) >= 0
    assert processor_seconds(server.pid) is None
    with pytest.raises(OSError):
        urlopen(f"{server.url}/health", timeout=PATIENCE)
    with pytest.raises(ValueError, match="no such model"):
        with served([sys.executable, "-c", "raise SystemExit('no such model')"]):
            pass


def stand_in(folder: Path) -> str:
    program = folder / "llama-server"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


def fake(monkeypatch: pytest.MonkeyPatch, url: str) -> list[list[str]]:
    """Use the running server at `url` in place of each server that a benchmark would start.

    Returns a list that gets the command of each replaced server.
    """
    started: list[list[str]] = []

    class RunningServer:
        def __init__(self, command: list[str]):
            started.append(command)

        def __enter__(self) -> Served:
            return Served(url, os.getpid())

        def __exit__(self, *error: object) -> None:
            pass

    real = serve_suite.served
    for module in (serve_suite, peers):
        monkeypatch.setattr(
            module, "served", lambda command: RunningServer(command) if "serve" in command else real(command)
        )
    return started


def test_the_command_reports_draws_and_keeps(site, monkeypatch, tmp_path: Path, capsys):
    started = fake(monkeypatch, site.url)
    monkeypatch.setattr(serve_suite, "choose_context", lambda choice, most: site.engine.context)
    report_file, chart = tmp_path / "kept.json", tmp_path / "chart.svg"
    arguments = ["--requests", 6, "--rate", 200, "--rate", 500.0, "--context", 8, "--batch", 4, "--quantize", "q8"]
    command = ["bench", "--suite", "serve", *map(str, arguments), "--json", str(report_file), "--plot", str(chart)]
    llamaspec.main(command, standalone_mode=False)
    out = capsys.readouterr().out
    assert "stories, q8, 4 at once" in out and "0 of 12 texts differ from the first row's" in out
    assert out.count("\n| ") == 1 + 1 + 3
    report = json.loads(report_file.read_text())
    assert [row["due"] for row in report["rows"]] == ["all at once", "200.00", "500.00"]
    assert report["workload"]["prompt"] == 8 and report["about"]["versions"]["llamaspec"]
    assert all(row["tokens_a_second"] > 0 and row["errors"] == [] for row in report["rows"])
    assert len(list(ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}polyline"))) == 6
    assert started == [our_command("stories", width=4, quantize="q8")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "serve", "--shape", "stories-15m"], "--shape does not apply to --suite serve"),
        (["--suite", "serve", "--devices", "2"], "--devices does not apply to --suite serve"),
        (["--rate", "2"], "--rate does not apply to --suite decode"),
        (["--suite", "growth", "--requests", "2"], "--requests does not apply to --suite growth"),
        (["--suite", "serve", "--rate", "0"], "0.0 .*x>0"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(arguments, words):
    from click import UsageError

    with pytest.raises(UsageError, match=words):
        llamaspec.main(["bench", *arguments], standalone_mode=False)


def test_llama_cpp_is_loaded_in_the_same_way(site, monkeypatch, tmp_path: Path, capsys):
    fake(monkeypatch, site.url)
    monkeypatch.setattr(peers.os, "sched_setaffinity", lambda process, cores: None)  # other tests need all cores
    monkeypatch.setattr(peers, "draw_requests", lambda work, **of: [Ask((5, 6 + i), 3, i) for i in range(4)])
    report_file = tmp_path / "kept.json"
    peers.main.main(["--llama-server", stand_in(tmp_path), "--tiny", "--json", str(report_file)], standalone_mode=False)
    rows = json.loads(report_file.read_text())["rows"]
    servers = [(row["server"], row["due"]) for row in rows]
    assert servers == [(name, rate) for name in ("llamaspec", "llama.cpp") for rate in ("all at once", "20.00")]
    assert [(row["errors"], row["tokens"]) for row in rows] == [([], 12)] * 4
    assert all(row["processor_seconds"] >= 0 for row in rows)
    assert rows[-1]["cached_tokens"] == 4  # as the stand-in server reports
    assert "| llama.cpp | 20.00" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_refused_in_a_line():
    from click import BadParameter

    with pytest.raises(BadParameter, match="there is no such program"):
        peers.main.main(["--llama-server", "/nowhere/llama-server"], standalone_mode=False)


@pytest.mark.slow  # 10 s
def test_the_built_in_model_is_loaded_by_a_server_of_its_own():
    """The benchmark starts its own server with the built-in model.

    Requests reuse cached prefixes, and the texts are the same at every request rate.
    """
    report = serve_suite.run_suite(model="stories", rates=[50.0], requests=8, context=None, width=4)
    assert serve_suite.wrong(report) == [] and len(report["rows"]) == 2
    assert all(row["tokens"] > 0 and row["cached_tokens"] > 0 for row in report["rows"])


def test_examples():
    assert [doctest.testmod(module).failed for module in (load, serve_suite)] == [0, 0]
