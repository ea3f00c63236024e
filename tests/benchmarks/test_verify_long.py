"""`benchmarks.audits.no_false_alarms` runs every group of contracts, and resumes an interrupted run."""

import json

import pytest

from llamaspec.benchmarks.audits import no_false_alarms
from llamaspec.benchmarks.audits.no_false_alarms import EXAMPLES, finished, jobs
from llamaspec.verify.catalogue import CONTRACTS


def test_every_contract_is_held_to_right_implementations():
    assert {job.op for job in jobs("numpy")} == set(CONTRACTS)


@pytest.mark.parametrize("group", EXAMPLES)
def test_jobs_draw_what_their_contracts_have(group):
    drawn_jobs = jobs(group)
    assert drawn_jobs
    for job in drawn_jobs:
        assert set(job.only) <= set(CONTRACTS[job.op].draws)


def test_finished_groups_do_not_run_again(tmp_path):
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


def test_it_runs_logs_and_goes_on(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    add_jobs = [job for job in jobs("numpy") if job.op == "add"]
    monkeypatch.setattr(no_false_alarms, "jobs", lambda group: add_jobs)
    log, rows = tmp_path / "log.jsonl", []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            no_false_alarms.main(["numpy", "--examples", "2", "--log", str(log)])
        assert ended.value.code == 0
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        assert [row["outcome"] for row in rows] == ["within bounds"] * len(rows)
        assert {row["candidate"] for row in rows} == {job.candidate for job in add_jobs}
        assert len({(row["candidate"], row["dtype"]) for row in rows}) == len(rows)  # none twice
    assert capsys.readouterr().out.count("within bounds") == len(rows)
