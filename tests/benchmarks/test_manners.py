"""The script that looks for XLA's log lines on stderr: which lines it recognizes, and how it judges a command."""

import doctest
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from llamaspec.benchmarks.audits import manners
from llamaspec.benchmarks.audits.manners import (
    CommandResult,
    agreeing,
    beside_another,
    interruption,
    noise,
    quiet,
    refused,
)


def test_examples():
    result = doctest.testmod(manners)
    assert result.attempted and not result.failed


def test_library_log_lines_are_distinguished_from_our_messages():
    library_lines = (
        "W1126 12:00:00.000000 1 cuda_executor.cc:1] no",
        "2026-11-26 12:00:00.1: E external/xla/x.cc:1] Out of memory",
        "WARNING:2026-11-26 12:00:00,1:jax._src.xla_bridge:1: no GPU",
        "lib/x.py:1: UserWarning: no",
        "Traceback (most recent call last):",
    )
    own_lines = (
        "compiling 50 %\rreading weights 3 %",
        "error: 2.2 GB of weights do not fit",
        "by kernels, norm_qkv by xla",
    )
    assert noise("\n".join((*own_lines[:1], *library_lines, *own_lines[1:]))) == [*library_lines]


def test_a_command_that_fails_or_prints_xla_log_lines_is_wrong():
    line = "E0000 00:00:17.1 cuda_timer.cc:87] Delay kernel timed out"
    assert quiet("story", CommandResult(0, "text", "32 new in 0.1 s\n", 1.0))["right"]
    assert not quiet("story", CommandResult(1, "", "error: no\n", 1.0))["right"]
    verdict = quiet("story", CommandResult(0, "text", f"{line}\n32 new in 0.1 s\n", 1.0))
    assert (verdict["right"], verdict["noise"]) == (False, [line])


def test_two_parallel_commands_must_print_the_same():
    row = quiet("story", CommandResult(0, "text", "", 1.0))
    assert agreeing(row, True)["right"] and not agreeing(row, False)["right"]
    assert not agreeing({**row, "right": False}, True)["right"]


def test_a_refusal_is_a_last_line_that_names_memory():
    line = "error: 1.95 GB of weights do not fit"
    assert refused(CommandResult(1, "", f"reading\r{line}\n", 1.0), 0.97)["right"]
    for code, stderr in ((0, line), (1, ""), (1, "killed"), (1, f"Traceback: no\n{line}")):
        assert not refused(CommandResult(code, "", stderr, 1.0), 0.97)["right"]


def test_a_command_that_ended_before_ctrl_c_is_right_if_it_ended_well():
    ended, interrupted = CommandResult(0, "text", "", 0.0), CommandResult(130, "", "", 0.5)
    assert interruption("Ctrl-C", interrupted, running=True)["right"]
    assert interruption("Ctrl-C", ended, running=False)["right"]
    for done, running in ((ended, True), (interrupted, False), (CommandResult(1, "", "error: no", 0.0), False)):
        assert not interruption("Ctrl-C", done, running=running)["right"]
    assert not interruption("Ctrl-C", CommandResult(130, "", "", 9.0), running=True)["right"]


@pytest.mark.parametrize(("fits", "code", "right"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_model_that_fits_next_to_another_process_must_run(monkeypatch, fits, code, right):
    monkeypatch.setattr(manners, "holding", lambda share: nullcontext())
    plan = json.dumps({"memory": {"fits": fits}})

    def run(*words: str) -> CommandResult:
        return CommandResult(0, plan, "", 1.0) if words[0] == "inspect" else CommandResult(code, "text", "", 1.0)

    *_, planned, row = beside_another(SimpleNamespace(run=run), "model")  # type: ignore[arg-type]  # only `run` is called
    assert (planned["right"], row["right"]) == (True, right)


def test_a_model_that_does_not_fit_next_to_another_process_must_be_refused(monkeypatch):
    monkeypatch.setattr(manners, "holding", lambda share: nullcontext())
    results = {"inspect": CommandResult(0, '{"memory": {"fits": false}}', "", 1.0)}
    refusal = CommandResult(1, "", "error: 2.2 GB of weights do not fit in 1.0 GB of free memory", 1.0)
    runner = SimpleNamespace(run=lambda command, *words: results.get(command, refusal))
    *_, row = beside_another(runner, "model")  # type: ignore[arg-type]  # only `run` is called
    assert row["right"]
    results["inspect"] = CommandResult(1, "", "error: no", 1.0)
    *_, planned, row = beside_another(runner, "model")  # type: ignore[arg-type]  # only `run` is called
    assert (planned["right"], row["right"]) == (False, True)
