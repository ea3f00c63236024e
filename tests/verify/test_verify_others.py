"""Contracts on other projects' code: the code passes, or docs/found.md describes the difference.

jax's functions and its Triton kernels run in this Python. Other libraries run in the first Python of
LLAMASPEC_OTHER_PYTHON (separated by colons) that has them; a clone is found through PYTHONPATH.
"""

import warnings

import numpy as np
import pytest

from llamaspec.benchmarks.audits.others.refused import REFUSED
from llamaspec.benchmarks.audits.others.rows import called, library_of, replay_of
from llamaspec.benchmarks.audits.others.table import ACCEPTED, FOREIGN_JOBS, GGUF, JAX, ONNXRUNTIME, TRITON
from llamaspec.reference.losses import cross_entropy
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.campaign import CandidateJob
from llamaspec.verify.candidates.candidate import Candidate, Direct, Worker
from llamaspec.verify.candidates.worker import load
from llamaspec.verify.catalogue import contract_for
from llamaspec.verify.judging.examination import examine
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports import replay as replays
from llamaspec.verify.reports.report import counterexample
from tests.support.processes import REPOSITORY
from tests.verify.other_pythons import python_with

REPLAYS = sorted((REPOSITORY / "docs" / "found").glob("*.json"))


def with_dtypes(jobs: list[CandidateJob]) -> list[tuple[CandidateJob, str]]:
    return [(job, dtype) for job in jobs for dtype in job.dtypes]


def assert_accepted(job: CandidateJob, dtype: str, candidate: Candidate, *, examples: int, shapes: int | None) -> None:
    contract = contract_for(job.op)
    report = verify(
        contract,
        candidate,
        precision=precision(dtype),
        examples=examples,
        seed=3,
        shapes=shapes,
        only=job.only,
        shrink=False,
    )
    assert report.outcome == "within bounds", "\n".join(counterexample(report, contract))


@pytest.fixture
def library(monkeypatch):
    """Return a function that starts candidates in a separate Python."""
    workers = []
    monkeypatch.chdir(REPOSITORY)  # the other Python finds the candidates there

    def start(function: str, arrays: str) -> Worker:
        name, _ = library_of(function)
        if not (python := python_with({"quanto": "optimum.quanto"}.get(name, name))):
            pytest.skip(f"needs a Python with {name}: set LLAMASPEC_OTHER_PYTHON")
        workers.append(Worker(function, arrays=arrays, python=python))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.mark.sampled(4)  # 1 s each
@pytest.mark.parametrize(("job", "dtype"), with_dtypes(JAX))
def test_functions_of_jax(job, dtype):
    assert_accepted(job, dtype, Direct(load(job.candidate), arrays="jax"), examples=10, shapes=2)


@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("job", "dtype"), with_dtypes(TRITON))
def test_triton_kernels_of_jax(job, dtype):
    assert_accepted(job, dtype, Direct(load(job.candidate), arrays="jax"), examples=3, shapes=1)


@pytest.mark.parametrize(("job", "dtype"), with_dtypes([*ONNXRUNTIME, *GGUF, *ACCEPTED]))
def test_other_libraries(library, job, dtype):
    assert_accepted(job, dtype, library(job.candidate, job.arrays), examples=60, shapes=None)


def test_an_op_whose_result_is_one_number_is_judged_in_this_process():
    """An op that returns a single number can be judged in this process, although its type checks expect arrays."""
    candidate = Direct(lambda *arguments: np.float32(cross_entropy(*arguments)), arrays="numpy")
    report = verify(contract_for("cross_entropy"), candidate, precision=precision("float32"), examples=3, seed=1)
    assert report.outcome == "within bounds"


@pytest.mark.parametrize("path", REPLAYS, ids=[path.stem for path in REPLAYS])
def test_every_replay_finds_its_fault_again(path, library):
    """Each replay file that docs/found.md names finds its fault again. Numbers may differ a little between machines."""
    saved = replays.load(path)
    contract = contract_for(saved.op)
    assert replays.digest(contract, saved.dtype, saved.draw) == saved.inputs
    if "jax_ops" in saved.candidate:
        candidate: Candidate = Direct(load(saved.candidate), arrays="jax")
    else:
        candidate = library(saved.candidate, saved.arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the Triton backend warns
        finding = examine(contract, candidate, precision(saved.dtype), saved.draw).finding
    assert finding is not None and finding.kind == saved.finding.partition(":")[0]


def test_every_replay_is_documented():
    text = (REPOSITORY / "docs" / "found.md").read_text(encoding="utf-8")
    text += (REPOSITORY / "docs" / "found" / "kernels.md").read_text(encoding="utf-8")
    assert REPLAYS and [path.name for path in REPLAYS if path.name not in text] == []


def test_every_function_that_was_judged_has_a_row_and_every_refusal_a_replay():
    """docs/found/kernels.md has a row for every judged function, and a replay file or a reason for each refusal."""
    text = (REPOSITORY / "docs" / "found" / "kernels.md").read_text(encoding="utf-8")
    there = {":".join(library_of(job.candidate)) for job in FOREIGN_JOBS}
    assert set(REFUSED) <= there
    for name in there:
        library, _, function = name.partition(":")
        assert called(library)[function]
        (row, *_) = [line for line in text.splitlines() if f"`{library}_ops:{function}`" in line]
        cell = f"{REFUSED[name][1]} ([replay]({replay_of(library, function)}))" if name in REFUSED else "|  |"
        assert cell in row
        assert (REPOSITORY / "docs" / "found" / replay_of(library, function)).exists() == (name in REFUSED)
    assert len(there) >= 60
