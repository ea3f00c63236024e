"""Commands on several devices: the examples in docs/parallel.md, and link speeds that `inspect --plan` uses."""

import json
import re

import pytest

from llamaspec.model.insight.machine import keep_link, keep_read_rate, kept_link, kept_read_rate
from llamaspec.model.insight.plan import Link
from tests.model.parallel.on_devices import COMMANDS, EARLY, documented_commands, results

# One process runs all commands of a test; two workers would run them twice.


@pytest.mark.slow  # 24 s
def test_the_commands_of_the_page_do_what_it_says(run):
    ran = dict(zip(documented_commands(), results("shown"), strict=True))
    assert {verb: result["code"] for verb, result in ran.items()} == dict.fromkeys(ran, 0), ran
    code, out, _ = run("generate", "Once upon a time", "--seed", "7", *EARLY)
    assert (code, ran["generate"]["out"]) == (0, out)
    assert "float32 on CPU, 2 devices" in ran["generate"]["err"]
    assert "within bounds" in ran["verify"]["out"]
    out = ran["bench"]["out"]
    assert re.search(r"^all-reduce over 2 devices: [\d,.]+ us per message, [\d,.]+ GB/s$", out, re.M)
    assert "stories, 2 devices: float32 on CPU, 2 devices\n" in out
    assert re.search(
        r"^  decoding +[\d,.]+ tokens/s after 504, [\d.]+ MB read by each device at [\d,.]+ GB/s$", out, re.M
    )
    assert re.search(r"^  sums +\d+% of a step", out, re.M)


@pytest.mark.slow  # 10 s
def test_what_is_measured_is_planned_with_and_what_cannot_be_is_refused():
    ran = dict(zip(COMMANDS, results("commands"), strict=True))
    out = ran["bench of one and two"]["out"]
    single, two = (float(mb) for mb in re.findall(r"after 20, ([\d.]+) MB read", out))
    assert "tiny, random weights q8, 1 device: float32 on CPU\n" in out
    assert "tiny, random weights q8, 2 devices: float32 on CPU, 2 devices\n" in out
    assert 1.5 < single / two <= 2.1  # norms are on both devices; the printed numbers are rounded

    before, after = (json.loads(ran[name]["out"]) for name in ("plan before", "plan"))
    assert before["link"]["alpha"] == 0 < after["link"]["alpha"]
    message = re.search(r"([\d,.]+) us per message", out)
    assert message and after["link"]["alpha"] * 1e6 == pytest.approx(float(message[1].replace(",", "")), abs=0.06)
    # Each of ten layers sums a float32 vector of 128 numbers twice: two messages of a ring, each with half of the
    # vector.
    message_seconds = after["link"]["alpha"] + 4 * 128 / 2 * after["link"]["beta"]
    assert after["work"][1]["seconds_of_sums"] == pytest.approx(10 * 2 * 2 * message_seconds)

    for name, words in {
        "bench of three": "4 heads cannot be cut into 3 equal parts: this model runs on 1, 2 or 4 devices",
        "bench of many sequences": "--batch does not work with --devices 2 or more",
        "alone": "--parallel context needs --devices",
        "growth": "--devices needs --suite decode or --suite collectives",
    }.items():
        assert ran[name]["code"] in (1, 2) and words in ran[name]["err"], name
        assert ran[name]["err"].count("\n") == 1 and not ran[name]["out"], name


def test_link_speeds_are_stored_by_the_number_of_devices(tmp_path):
    assert kept_link(tmp_path, 2) is None
    two, four = Link(1e-6, 1e-9), Link(2e-6, 1e-9)
    keep_link(tmp_path, 2, two)
    keep_read_rate(tmp_path, {"read": 5.0})
    keep_link(tmp_path, 4, four)
    assert (kept_link(tmp_path, 2), kept_link(tmp_path, 4), kept_link(tmp_path, 8)) == (two, four, None)
    assert kept_read_rate(tmp_path) == 5.0
