"""Ways to pass a check without being right: each one is refused, and docs/cheats.md lists all of them.

The patterns come from published catalogs of reward hacks in generated kernels. Timing hacks are in
tests/verify/test_verify_timing.py.
"""

import itertools
import re
from inspect import unwrap
from pathlib import Path

import numpy as np
import pytest

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct, Worker
from llamaspec.verify.candidates.guard import Guarded, changes, snapshot
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.draws.draw import LAW
from llamaspec.verify.draws.drawing import uniform
from llamaspec.verify.judging import judge
from llamaspec.verify.judging.examination import Examination
from llamaspec.verify.judging.runner import _Search, verify
from tests.support.processes import REPOSITORY
from tests.support.waiting import PATIENCE
from tests.verify import test_verify_timing

PAGE = REPOSITORY / "docs" / "cheats.md"
CHEATS = r"""
import os, sys, threading, time

import numpy as np


def right(x):
    wide = x.astype(np.float32)
    top = wide.max(axis=-1, keepdims=True)
    e = np.exp(wide - np.where(np.isinf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0).astype(x.dtype)


KEPT, CALLS = {}, []


def zeros(x):
    return np.zeros_like(x)


def its_input(x):
    return x


def uninitialized(x):
    return np.full_like(x, np.nan)


def cached_by_shape(x):
    return KEPT.setdefault(x.shape, right(x))


def cached_by_address(x):
    return KEPT.setdefault(x.ctypes.data, right(x))


def cached_by_first_number(x):
    return KEPT.setdefault((x.shape, x[0, 0].tobytes()), right(x))


def cached_by_fingerprint(x):
    return KEPT.setdefault((x.shape, float(x.ravel()[::7].sum())), right(x))


def replays_answers_of_a_file(x):
    # the file holds the answers to the inputs of another seed
    if not KEPT:
        path = os.path.join(os.path.dirname(__file__), "answers.npz")
        KEPT.update(np.load(path))
    return KEPT.get(x.tobytes().hex()[:64], zeros(x))


def graph_of_the_first_inputs(x):
    # captured once for each shape; a replay reads the buffers of the first call
    return right(KEPT.setdefault(x.shape, x))


def several_calls_in_one_launch(x):
    # leaves the work to a later call, which computes a batch
    CALLS.append((x, np.zeros_like(x)))
    if len(CALLS) == 4:
        for late, out in CALLS:
            out[...] = right(late)
        CALLS.clear()
        return right(x)
    return CALLS[-1][1]


def kernel_never_launched(x):
    return np.empty_like(x) * np.nan if x.shape[-1] > 64 else right(x)


def in_turn(x, count):
    ring = KEPT.setdefault(x.shape, [np.empty_like(x) for _ in range(count)])
    ring.append(ring.pop(0))
    ring[0][:] = right(x)
    return ring[0]


def two_buffers(x):
    return in_turn(x, 2)


def three_buffers(x):
    return in_turn(x, 3)


def four_buffers(x):
    return in_turn(x, 4)


def one_buffer(x):
    out = KEPT.setdefault(x.shape, np.empty_like(x))
    out[...] = right(x)
    return out


def right_for_a_while(x):
    CALLS.append(1)
    return right(x) if len(CALLS) < 20 else zeros(x)


def writes_to_its_input(x):
    out = right(x)
    x[...] = out
    return out


def narrower(x):
    return right(x.astype(np.float16)).astype(np.float32)


def narrower_result(x):
    return right(x).astype(np.float16)


def one_shape(x):
    return right(x) if x.shape[-1] <= 1024 else zeros(x)


def later(x):
    out = np.zeros_like(x)
    fill = lambda: (time.sleep(60), out.__setitem__(..., right(x)))
    threading.Thread(target=fill, daemon=True).start()
    return out


class Lazy(np.ndarray):
    def __array__(self, dtype=None, copy=None):
        return np.asarray(sys.modules["llamaspec.reference.softmax"].softmax(np.asarray(self)))


def lazy_subclass(x):
    return right(x).view(Lazy) * np.float32(1.001)


class Equal:
    def __init__(self, shape):
        self.shape = shape

    def __eq__(self, other):
        return True


def equal_to_everything(x):
    return Equal(x.shape)


def calls_the_definition(x):
    import llamaspec.reference.softmax
    return llamaspec.reference.softmax.softmax(x).astype(x.dtype) * np.float32(1.001)


def reads_the_judge(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if type(value).__name__ in ("Expected", "Contract", "Examination"):
                return value.value
        frame = frame.f_back
    return zeros(x)


def forges_a_reply(x):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"\x00" * 64)
        except OSError:
            pass
    return zeros(x)


def exits_with_0(x):
    os._exit(0)


def patches_numpy(x):
    import numpy
    numpy.abs = numpy.zeros_like
    numpy.allclose = lambda *arguments, **named: True
    return zeros(x)


def catches_and_falls_back(x):
    try:
        raise RuntimeError("out of shared memory")
    except RuntimeError:
        return x / x.sum(axis=-1, keepdims=True)
"""
# Function, kind of the finding, and the pattern's description in docs/cheats.md.
PATTERNS = [
    ("zeros", "value", "a constant instead of a result"),
    ("its_input", "value", "the input handed back"),
    ("uninitialized", "not finite", "memory that was never written"),
    ("cached_by_shape", "value", "the first result of a shape, kept"),
    ("cached_by_address", "value", "a result kept by the address of its input"),
    ("cached_by_first_number", "value", "a result kept by a part of its input"),
    ("cached_by_fingerprint", "value", "a result kept by a fingerprint of its input"),
    ("replays_answers_of_a_file", "value", "answers of an earlier run, read from a file"),
    ("graph_of_the_first_inputs", "value", "a graph replayed with the buffers of its capture"),
    ("several_calls_in_one_launch", "value", "several calls batched into one launch"),
    ("kernel_never_launched", "not finite", "a kernel that is never launched for some shapes"),
    ("one_buffer", "reused", "one output buffer for all calls"),
    ("two_buffers", "reused", "two output buffers in turn"),
    ("three_buffers", "reused", "three output buffers in turn"),
    ("four_buffers", "reused", "four output buffers in turn"),
    ("right_for_a_while", "value", "right while it is tested, wrong later"),
    ("writes_to_its_input", "inputs", "an input overwritten, so that both sides see the same"),
    ("narrower", "value", "computed in a narrower dtype"),
    ("narrower_result", "dtype", "returned in a narrower dtype"),
    ("one_shape", "value", "right only for the shapes of the benchmark"),
    ("later", "value", "a result that a thread writes after the call"),
    ("lazy_subclass", "value", "a subclass that computes when it is read"),
    ("equal_to_everything", "raised", "an object that is equal to everything"),
    ("calls_the_definition", "value", "the definition called, and scaled by 1.001"),
    ("reads_the_judge", "value", "the expected result looked for in the callers' frames"),
    ("forges_a_reply", "reply", "an answer written to the pipe of the judge"),
    ("exits_with_0", "crashed", "the process ended with status 0"),
    ("patches_numpy", "value", "NumPy's comparisons patched, in its own process"),
    ("catches_and_falls_back", "not finite", "a fallback behind a caught exception"),
]


@pytest.fixture(scope="module")
def cheats(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cheats") / "cheats.py"
    path.write_text(CHEATS)
    softmax, answers = CONTRACTS["softmax"], {}
    for draw in itertools.islice(uniform(softmax, None, {}, seed=1), 50):
        arguments = {name: value for name, value in draw.items() if name != LAW}
        x = softmax.arguments(precision=precision("float32"), **arguments)["x"]
        answers[x.tobytes().hex()[:64]] = softmax.definition(x)
    np.savez(path.with_name("answers.npz"), **answers)
    return path


@pytest.mark.parametrize(("function", "kind", "what"), PATTERNS, ids=[pattern[0] for pattern in PATTERNS])
def test_a_cheat_is_refused(cheats, function, kind, what):
    with Worker(f"{cheats}:{function}", arrays="numpy", timeout=PATIENCE) as worker:
        report = verify(
            CONTRACTS["softmax"], worker, precision=precision("float32"), examples=200, seed=0, shrink=False
        )
    assert report.outcome == "violated" and report.worst.finding
    assert report.worst.finding.kind in (kind, "not the same twice", "law"), report.worst.finding


def test_the_right_function_among_them_passes(cheats):
    with Worker(f"{cheats}:right", arrays="numpy", timeout=PATIENCE) as worker:
        report = verify(CONTRACTS["softmax"], worker, precision=precision("float32"), examples=60, seed=0)
    assert report.outcome == "within bounds"


def patches_the_definition():
    import llamaspec.reference.softmax

    llamaspec.reference.softmax.softmax = lambda x: np.zeros_like(x)


def patches_code():
    unwrap(judge._ratio).__code__ = (lambda error, bound: np.zeros_like(error)).__code__


def patches_a_class():
    Examination.violated = property(lambda self: False)  # type: ignore


def patches_a_method():
    unwrap(_Search._examine).__code__ = (lambda self, draw: None).__code__


@pytest.mark.parametrize(
    ("patch", "name"),
    [
        (patches_the_definition, "llamaspec.reference.softmax.softmax"),
        (patches_code, "llamaspec.verify.judging.judge._ratio.__code__"),
        (patches_a_class, "llamaspec.verify.judging.examination.Examination.violated"),
        (patches_a_method, "llamaspec.verify.judging.runner._Search._examine.__code__"),
    ],
)
def test_a_patched_judge_is_refused_in_a_test(patch, name):
    """If a candidate in the judge's process patches the judge's code, the patch is reported and undone."""
    before = snapshot()

    def patches(x):
        patch()
        return np.zeros_like(x)

    candidate = Guarded(Direct(patches), before)
    report = verify(CONTRACTS["softmax"], candidate, precision=precision("float32"), examples=9, seed=0, shrink=False)
    assert report.worst.finding and report.worst.finding[0] == "definition" and name in report.worst.finding[1]
    assert not changes(before)


def test_the_page_names_every_pattern_and_what_shows_it():
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(what, function, kind) for function, kind, what in PATTERNS]


def test_every_pattern_of_timing_is_shown_or_out_of_scope():
    """Each row of the second table in docs/cheats.md names a candidate or a test, or says "out of scope".

    The candidates and the tests are in test_verify_timing.py.
    """
    *_, table = PAGE.read_text(encoding="utf-8").partition("| pattern | test | outcome |\n|---|---|---|\n")
    rows = [[cell.strip(" `") for cell in row.split("|")[1:4]] for row in table.partition("\n\n")[0].splitlines()]
    outcomes = {name: outcome for _, name, outcome in rows if name}
    assert all(outcome.startswith("out of scope: not noticed") for _, name, outcome in rows if not name)
    assert {name for name, outcome in outcomes.items() if outcome.startswith("no time")} == {
        name for name, why in test_verify_timing.UNTIMED if name != "raises_if_large"
    }
    timed_names = [name for name, outcome in outcomes.items() if not outcome.startswith("no time")]
    assert timed_names and all(hasattr(test_verify_timing, name) for name in timed_names)
