"""Judges functions of other projects, in a Python that has them, and writes the table of docs/found/kernels.md.

    # judge a function in every dtype
    python -m llamaspec.benchmarks.audits.others liger_kernel_ops:rmsnorm
    # judge all functions of a library, and add rows of JSON to LOG
    python -m llamaspec.benchmarks.audits.others liger_kernel_ops --log LOG
    # print a table of all rows in the logs
    python -m llamaspec.benchmarks.audits.others --table LOG LOG

Candidates run in this process, so its Python also needs NumPy, hypothesis, jaxtyping, ml_dtypes and click.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llamaspec.benchmarks.audits.others.rows import table
from llamaspec.benchmarks.audits.others.table import FOREIGN_JOBS
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.campaign import CandidateJob
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.candidates.worker import load
from llamaspec.verify.catalogue import contract_for
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.replay import Replay, digest, save
from llamaspec.verify.reports.report import counterexample


def choose_jobs(names: Sequence[str]) -> list[CandidateJob]:
    """Choose the jobs whose candidate's name contains one of `names`."""
    return [job for job in FOREIGN_JOBS if any(name in job.candidate for name in names)]


def judged(job: CandidateJob, *, examples: int, seed: int, replays: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield a row and the lines of the report for each dtype of a job. Writes a replay file for a violated contract."""
    contract, function = contract_for(job.op), load(job.candidate)
    for dtype in job.dtypes:
        candidate = Direct(function, arrays=job.arrays or "numpy", contiguous=True)
        report = verify(
            contract, candidate, precision=precision(dtype), examples=examples, seed=seed, seconds=90, only=job.only
        )
        row = {
            "op": job.op,
            "candidate": job.candidate,
            "dtype": dtype,
            "outcome": report.outcome,
            "share": max(report.worst.hard, report.nearest.hard),
            "examples": report.examples,
            "compared": report.compared,
        }
        if finding := report.worst.finding:
            draw = report.worst.draw
            replay = Replay(
                op=job.op,
                candidate=job.candidate,
                arrays=job.arrays or "numpy",
                dtype=dtype,
                draw=draw,
                inputs=digest(contract, dtype, draw),
                finding=f"{finding.kind}: {finding.message}",
            )
            row["replay"] = str(save(replay, replays))
        yield row, counterexample(report, contract)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m llamaspec.benchmarks.audits.others", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "names", nargs="*", help="names of candidates in benchmarks/audits/others/table.py, or parts of these names"
    )
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--replays", type=Path, default=Path("verify-replays"))
    parser.add_argument("--table", type=Path, nargs="+", metavar="LOG")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(options.table))
        return
    jobs = choose_jobs(options.names)
    if not jobs:
        parser.error("name a candidate of benchmarks/audits/others/table.py, such as torch_ops:softmax")
    warnings.simplefilter("ignore")
    for job in jobs:
        for row, lines in judged(job, examples=options.examples, seed=options.seed, replays=options.replays):
            print("\n".join(lines), flush=True)
            if options.log:
                with options.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
