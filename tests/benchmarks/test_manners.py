"""The script that looks for lines of XLA's on stderr: what it takes for one, and what it makes of a command."""

import doctest

from llamaspec.benchmarks.audits import manners
from llamaspec.benchmarks.audits.manners import Ended, agreeing, noise, quiet, refused


def test_examples():
    found = doctest.testmod(manners)
    assert found.attempted and not found.failed


def test_what_the_libraries_below_us_write_is_told_from_our_own_words():
    theirs = (
        "W1126 12:00:00.000000 1 cuda_executor.cc:1] no",
        "2026-11-26 12:00:00.1: E external/xla/x.cc:1] Out of memory",
        "WARNING:2026-11-26 12:00:00,1:jax._src.xla_bridge:1: no GPU",
        "lib/x.py:1: UserWarning: no",
        "Traceback (most recent call last):",
    )
    ours = ("compiling 50 %\rreading weights 3 %", "error: 2.2 GB of weights do not fit", "by kernels, norm_qkv by xla")
    assert noise("\n".join((*ours[:1], *theirs, *ours[1:]))) == [*theirs]


def test_a_command_that_fails_or_lets_a_line_of_theirs_through_is_not_right():
    line = "E0000 00:00:17.1 cuda_timer.cc:87] Delay kernel timed out"
    assert quiet("story", Ended(0, "text", "32 new in 0.1 s\n", 1.0))["right"]
    assert not quiet("story", Ended(1, "", "error: no\n", 1.0))["right"]
    found = quiet("story", Ended(0, "text", f"{line}\n32 new in 0.1 s\n", 1.0))
    assert (found["right"], found["noise"]) == (False, [line])


def test_two_at_once_are_right_only_if_they_say_the_same():
    row = quiet("story", Ended(0, "text", "", 1.0))
    assert agreeing(row, True)["right"] and not agreeing(row, False)["right"]
    assert not agreeing({**row, "right": False}, True)["right"]


def test_a_refusal_is_a_last_line_that_names_memory():
    line = "error: 1.95 GB of weights do not fit"
    assert refused(Ended(1, "", f"reading\r{line}\n", 1.0), 0.97)["right"]
    for code, said in ((0, line), (1, ""), (1, "killed"), (1, f"Traceback: no\n{line}")):
        assert not refused(Ended(code, "", said, 1.0), 0.97)["right"]
