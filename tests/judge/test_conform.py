"""`conform`: an honest server conforms, and each saboteur's fault is found and named."""

import math
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from llamaspec.commands.conform import conform as command
from llamaspec.commands.conform_page import page
from llamaspec.judge import conform, numbers, protocol, tokens
from llamaspec.judge.client import Server
from llamaspec.judge.conform import Examination, Report, check_numbers, examine
from llamaspec.judge.findings import Finding
from llamaspec.judge.numbers import Position, Spellings
from llamaspec.judge.report import as_rows
from llamaspec.model.weights.loading import no_progress
from tests.judge.saboteurs import SABOTEURS
from tests.judge.small_server import FLOAT32, READER, Engine, checkpoint, definition, serving
from tests.serving.serving_site import TOKENIZER


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare fewer positions, with fewer samples, to save time."""
    monkeypatch.setattr(numbers, "SAMPLES", 2)
    monkeypatch.setattr(conform, "NEW_TOKENS", 3)
    monkeypatch.setattr(conform, "PROMPTS", conform.PROMPTS[:1])
    monkeypatch.setattr(protocol, "DRAWS", 2)


def findings_on(engine: Engine, part: str) -> list[Finding]:
    """Run one part of an examination on a server."""
    with serving(engine) as url:
        server = Server(url)
        if part == "tokens":
            return [*tokens.check_texts(server, TOKENIZER), *tokens.check_chat(server, READER)]
        spellings = Spellings(TOKENIZER, checkpoint().config.vocab)
        shared = (server, checkpoint(), TOKENIZER, READER, definition(), spellings)
        examination = Examination(*shared, longest=80, at_once=4, progress=no_progress)
        if part == "protocol":
            ids = examination.ids(protocol.PROMPT)
            return [*protocol.check_protocol(server, definition(), spellings, ids, at_once=4)]
        outcomes = check_numbers(examination)
        return [outcome for outcome in outcomes if isinstance(outcome, Finding)]


def test_an_honest_server_conforms(brief: None):
    with serving(Engine()) as url:
        report = examine(
            Server(url),
            checkpoint(),
            TOKENIZER,
            READER,
            name="small",
            arithmetic=FLOAT32,
            longest=80,
            at_once=4,
            seconds=100,
        )
    assert report.outcome == "conforms"
    assert {finding.verdict for finding in report.findings} == {"right"}, report.findings


@pytest.mark.parametrize("name", SABOTEURS)
def test_a_saboteur_is_found_and_named(name: str, brief: None, monkeypatch: pytest.MonkeyPatch):
    saboteur = SABOTEURS[name]
    for module, name_of_table in ((conform, "GROUPS"), (protocol, "CHECKS")):
        table = getattr(module, name_of_table)
        monkeypatch.setattr(module, name_of_table, {key: table[key] for key in saboteur.groups if key in table})
    findings = findings_on(saboteur.engine(), saboteur.part)
    named = [finding for finding in findings if saboteur.words in finding.message]
    assert named and {finding.verdict for finding in named} == {saboteur.verdict}, findings


class Silent(Engine):
    """Reports no log-probabilities. Many servers report them only if they are started with an option."""

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return super().answer(path, {**body, "logprobs": None})


def test_without_log_probabilities_there_is_no_verdict(brief: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "CHECKS", {})
    with serving(Silent()) as url:
        report = examine(
            Server(url), checkpoint(), TOKENIZER, READER, name="small", arithmetic=FLOAT32, longest=80, at_once=4,
            seconds=100,
        )  # fmt: skip
    assert (report.outcome, report.status) == ("no verdict", 2)
    assert "no numbers could be compared" in as_rows(report)[-1]


def test_the_page_plots_each_position_by_its_verdict():
    ratios = {"explained": 1.0, "undecided": 9.0, "not explained": 99.0}
    positions = [
        Position(f"<{name}>", i, -2.0, 1e-3, ratio, 0.0, 0.1) for i, (name, ratio) in enumerate(ratios.items())
    ]
    positions.append(positions[2]._replace(trace="no number", difference=math.inf, ratio=math.inf))
    assert [position.verdict for position in positions[:3]] == list(ratios)
    report = Report("http://a?b&c", "small", "served", "float32", [], positions, requests=4, seconds=1.0)
    text = page(report, ["first & last"])
    assert text.count("<svg") == 2 and text.count("3 positions of 4;") == 2
    assert text.count("<circle") >= 6 and "first &amp; last" in text and "a?b&amp;c" in text
    table = text[text.index("<h2>") :]
    assert "2 positions are not explained" in table and "&lt;not explained&gt;" in table and "<td>inf</td>" in table
    assert "<svg" not in page(replace(report, positions=[]), [])


def test_the_time_limit_ends_an_examination():
    with serving(Engine()) as url:
        server = Server(url)
        report = examine(
            server, checkpoint(), TOKENIZER, READER, name="small", arithmetic=FLOAT32, longest=80, at_once=4,
            seconds=-1,
        )  # fmt: skip
    assert (report.outcome, report.ended) == ("no verdict", "the time limit of -1 seconds is over")


def test_without_a_server_the_command_exits_with_2():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = CliRunner().invoke(command, [f"http://127.0.0.1:{port}"])
    assert outcome.exit_code == 2 and "Connection refused" in outcome.stderr
