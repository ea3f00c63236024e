"""The program that looks for false alarms for hours: what it runs, and that it goes on where it was stopped."""

import json

import pytest

from benchmarks.no_false_alarms import EXAMPLES, finished, jobs
from verify.catalogue import CONTRACTS


def test_every_contract_is_held_to_right_implementations():
    assert {job.op for job in jobs("numpy")} == set(CONTRACTS)


@pytest.mark.parametrize("group", EXAMPLES)
def test_jobs_draw_what_their_contracts_have(group):
    found = jobs(group)
    assert found
    for job in found:
        assert set(job.only) <= set(CONTRACTS[job.op].draws)


def test_what_is_done_is_not_run_again(tmp_path):
    log = tmp_path / "log.jsonl"
    assert finished(log, examples=None) == set()
    rows = [("m:done", "within bounds", 200), ("m:fewer", "within bounds", 199), ("m:wrong", "violated", 200)]
    lines = [
        json.dumps(
            {"group": "kernels", "candidate": name, "dtype": "float32", "outcome": outcome, "examples": examples}
        )
        for name, outcome, examples in rows
    ]
    log.write_text("\n".join(lines) + "\n")
    assert finished(log, examples=None) == {("m:done", "float32")}
    assert finished(log, examples=100) == {("m:done", "float32"), ("m:fewer", "float32")}
