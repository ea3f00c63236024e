"""Checks that contracts raise no false alarms: right implementations must pass thousands of random inputs per op.

    python -m llamaspec.benchmarks.audits.no_false_alarms numpy xla onnxruntime kernels --seed 1 --python PYTHON

        numpy         the right float32 implementations that mutants are made from
        xla           jax's functions and our XLA ops on a CPU, in float32 and bfloat16, with at most 64 shapes each
        onnxruntime   onnxruntime and gguf, in the Python at the path PYTHON, within their documented domains
        kernels       our kernels, in the interpreter

Each op and dtype adds a line of JSON to a log in benchmarks/results/raw/. A run skips the ops and dtypes that its log
already has, so you can stop a campaign and continue later. `python -m llamaspec.benchmarks.summary` makes a summary.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llamaspec.benchmarks.audits.others.table import GGUF, JAX, ONNXRUNTIME
from llamaspec.benchmarks.common.report import RAW
from llamaspec.model.candidates.table import CANDIDATES
from llamaspec.verify.campaign import Campaign, CandidateJob, run
from llamaspec.verify.catalogue import IMPLEMENTATIONS
from llamaspec.verify.judging.runner import unseen

LOG = RAW / "no-false-alarms.jsonl"
EXAMPLES = {"numpy": 10_000, "xla": 10_000, "onnxruntime": 10_000, "kernels": 200}
KERNEL_SHAPES = 8  # few, because the interpreter takes seconds for each shape


def jobs(group: str) -> list[CandidateJob]:
    """List the candidates of a group, each with its op, as jobs for the verifier."""
    match group:
        case "numpy":
            return [CandidateJob(op, i.name, arrays="numpy", only=i.only) for op, i in IMPLEMENTATIONS.items()]
        case "xla":
            return [*JAX, *_own_jobs(kernel=False)]
        case "onnxruntime":
            return [*ONNXRUNTIME, *GGUF]
        case _:
            return _own_jobs(kernel=True)


def _own_jobs(*, kernel: bool) -> list[CandidateJob]:
    shapes = KERNEL_SHAPES if kernel else None
    return [
        CandidateJob(c.op, c.function, dtypes=c.dtypes, only=c.only, shapes=shapes)
        for c in CANDIDATES
        if c.kernel == kernel
    ]


def rows(group: str, done: set[tuple[str, str]], *, seed: int, examples: int, python: str) -> Iterator[dict[str, Any]]:
    """Run the ops and dtypes of a group, except those in `done`. Yields a row after each one."""
    python = python if group == "onnxruntime" else sys.executable
    dtypes = ("float32",) if group in ("numpy", "onnxruntime") else ("float32", "bfloat16")
    where = {
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "versions": versions(sys.executable),
    }
    if python != sys.executable:
        where["versions of the candidate"] = versions(python)
    for job in jobs(group):
        for dtype in job.dtypes or dtypes:
            if (job.candidate, dtype) in done:
                continue
            campaign = Campaign(
                seed=seed, dtypes=(dtype,), python=python, examples=examples, seconds=math.inf, timeout=600.0
            )
            [(report, lines)] = run([job], campaign, progress=unseen)
            yield {
                "group": group,
                "op": report.op,
                "candidate": report.candidate,
                "dtype": dtype,
                "outcome": report.outcome,
                "examples": report.examples,
                "seed": seed,
                "seconds": round(report.seconds, 1),
                "of the bound": round(report.worst.hard, 3),
                "of the alarm": round(report.worst.alarm, 3),
                "lines": lines[1:],
                "ended": datetime.now(UTC).isoformat(timespec="seconds"),
                **where,
            }


LIBRARIES = ("llamaspec", "numpy", "hypothesis", "jax", "onnxruntime", "gguf")
ASK = """
import json, platform
from importlib import metadata
found = {"python": platform.python_version()}
for name in %r:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str) -> dict[str, str]:
    """Look up the versions of a Python and of its libraries."""
    answer = subprocess.run([python, "-c", ASK % (LIBRARIES,)], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def finished(log: Path, *, examples: int | None) -> set[tuple[str, str]]:
    """Return the pairs of candidate and dtype that need no further run.

    For such a pair, the log already has a run with at least `examples` random inputs, all of them within bounds. If
    `examples` is None, the minimum is the number for the row's group.
    """
    if not log.exists():
        return set()
    logged = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {
        (row["candidate"], row["dtype"])
        for row in logged
        if row["outcome"] == "within bounds" and row["examples"] >= (examples or EXAMPLES[row["group"]])
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m llamaspec.benchmarks.audits.no_false_alarms", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("groups", nargs="+", choices=EXAMPLES, metavar="|".join(EXAMPLES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--examples", type=int, help="draws per op and dtype (default: 10,000, or 200 for kernels)")
    parser.add_argument("--python", default=sys.executable, help="path of a Python that has onnxruntime and gguf")
    parser.add_argument("--log", type=Path, default=LOG)
    options = parser.parse_args(arguments)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for group in options.groups:
        done = finished(options.log, examples=options.examples)
        examples = options.examples or EXAMPLES[group]
        for row in rows(group, done, seed=options.seed, examples=examples, python=options.python):
            with open(options.log, "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
            print(f"{row['outcome']:14}{row['op']} {row['dtype']}  {row['candidate']}  {row['seconds']} s", flush=True)
            print("".join(f"{line}\n" for line in row["lines"]), end="", flush=True)
            wrong += row["outcome"] != "within bounds"
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
