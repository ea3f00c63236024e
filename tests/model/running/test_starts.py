"""Start of a command: the times of its phases add up, and a second start loads stored programs without tracing."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from llamaspec.model.llama import load, load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.running import program_store
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.start_clock import StartClock
from llamaspec.model.system import process_age
from tests.support.processes import run_llamaspec, run_python
from tests.support.random_models import SMALL, random_checkpoint

PHASES = ["import", "device", "read", "compile", "upload", "first_token"]


@pytest.fixture
def traced() -> Iterator[list[str]]:
    """Yield a list that gets an entry for every function that JAX traces from now on."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            names.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_phases_add_up_to_the_whole_time(monkeypatch):
    times = iter([10.0, 12.0, 13.0, 17.0, 25.0])
    monkeypatch.setattr("llamaspec.model.running.start_clock.perf_counter", lambda: next(times))
    clock = StartClock(began=5.0)
    clock.begin("read")  # at 10
    clock.begin("compile")  # at 12
    with clock.parallel_work("compile"):  # from 13
        clock.begin("read")  # at 17
    clock.end(at=26.0)
    clock.end(at=34.0)  # no phase is running
    assert {phase: seconds for phase, seconds in clock.seconds.items() if seconds} == {
        "import": 5.0,
        "read": 2.0 + 9.0,
        "compile": 5.0,
    }
    assert clock.parallel == {"compile": 12.0}  # until 25
    assert clock.as_json()["total"] == sum(clock.seconds.values()) == 21.0


def test_a_process_knows_its_age():
    """A new process sleeps 0.3 s before it calls `process_age`; the result is at least 0.3 s.

    It is at most 0.02 s more than the time for which the calling process waited.
    """
    began = time.perf_counter()
    done = run_python(
        "import time; time.sleep(0.3); from llamaspec.model.system import process_age; print(process_age())"
    )
    assert 0.3 <= float(done.out) <= time.perf_counter() - began + 0.02
    assert process_age() > 0


# The time before the first import is part of the start; here it is long enough to show.
OLD = "from llamaspec import cli; from llamaspec.model import system; system.process_age = lambda: 1000.0; cli.main()"


def test_a_command_prints_its_phases_and_a_second_start_compiles_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = ["story", "--seed", "7", "--max-new-tokens", "12", "--timings"]
    starts, texts = [], []
    for _ in range(2):
        began = time.perf_counter()
        done = run_python(OLD, *request, "--json")
        wall = time.perf_counter() - began
        assert done.code == 0, done.err
        answer = json.loads(done.out)
        start = answer["start"]
        assert list(start) == [*PHASES, "total", "parallel"]
        assert start["total"] == pytest.approx(sum(start[phase] for phase in PHASES))
        assert start["import"] >= 1000 and start["total"] <= 1000 + wall
        assert all(start[phase] > 0 for phase in PHASES)
        assert f"first token after {start['total']:.2f} s: import {start['import']:.2f}, " in done.err
        starts.append(start)
        texts.append(answer["text"])
    assert texts[0] == texts[1]
    assert starts[0]["parallel"] == {} and starts[1]["parallel"].keys() == {"compile"}
    entries = sorted(path.name.partition("-")[0] for path in (tmp_path / "llamaspec" / "compiled").iterdir())
    assert entries == ["decode"]  # no file of JAX's cache; without a prompt, no prefill program


@pytest.mark.slow  # 5 s
def test_phases_are_said_only_where_they_are_asked_for(run):
    code, out, err = run("story", "--seed", "7", "--max-new-tokens", "2", "--json")
    assert code == 0 and "start" not in json.loads(out) and "import" not in err


@pytest.mark.slow  # 7 s
def test_chat_says_the_phases_of_its_first_answer():
    script = "Hello\nHello again\n"
    done = run_llamaspec("chat", "--seed", "7", "--max-new-tokens", "2", "--timings", stdin=script)
    assert done.code == 0, done.err
    assert done.err.count("first token after ") == 1


def loaded(folder: Path, **options) -> JaxBackend:
    backend = load_backend(random_checkpoint(SMALL, seed=0), RunOptions(context=32, compile_cache=folder, **options))
    assert isinstance(backend, JaxBackend)
    return backend


def numbers(backend: JaxBackend) -> list[bytes]:
    """Return the bits of the cache after a prompt."""
    cache = backend.extend(backend.start(), [3, 1, 4, 1, 5])
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache)]


def test_a_stored_program_is_neither_traced_nor_compiled_and_gives_the_same_bits(tmp_path: Path, traced: list[str]):
    first = numbers(loaded(tmp_path))
    assert len(traced) == 2 and all("prefill" in name or "decode" in name for name in traced)
    traced.clear()
    assert numbers(loaded(tmp_path)) == first == numbers(loaded(tmp_path / "another"))
    assert len(traced) == 2  # in the other folder
    cache = (backend := loaded(tmp_path)).start()
    backend.extend(cache, [3])
    assert cache.layers[0].k.is_deleted()  # like a compiled program, a stored program donates the cache


def test_load_keeps_programs_in_the_folder_that_it_is_given(tmp_path: Path, monkeypatch, traced: list[str]):
    jaxs: list[Path] = []
    monkeypatch.setattr(
        "llamaspec.model.llama.keep_compiled", jaxs.append
    )  # the real function would change all tests of this process
    texts = []
    for _ in range(2):
        llama = load("stories", context=32, compile_cache=tmp_path)
        texts.append("".join(token.text for token in llama.generate("Once", seed=1, max_new_tokens=4)))
        assert len(traced) == 2, traced  # only by the first
    assert jaxs == [tmp_path, tmp_path] and texts[0] == texts[1] and list(tmp_path.iterdir())


@pytest.mark.slow  # 11 s
def test_other_shapes_settings_and_environments_are_other_programs(tmp_path: Path, monkeypatch):
    def count() -> int:
        return len(list(tmp_path.glob("decode-*")))

    loaded(tmp_path, prompt=1)
    loaded(tmp_path, prompt=1, cache="int8")
    assert count() == 2
    loaded(tmp_path, prompt=1, kernels="xla")
    assert count() == 3
    with jax.default_matmul_precision("bfloat16"):
        loaded(tmp_path, prompt=1)
    assert count() == 4
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    loaded(tmp_path, prompt=1)
    assert count() == 5
    monkeypatch.setattr(program_store, "_source", lambda packages: "another version")
    loaded(tmp_path, prompt=1)
    assert count() == 6
    with jax.log_compiles():
        loaded(tmp_path, prompt=1)
    assert count() == 6


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize("length", [0, 40, -1])
def test_a_program_that_was_cut_short_is_compiled_anew(tmp_path: Path, traced: list[str], length: int):
    first = numbers(loaded(tmp_path))
    for path in (files := list(tmp_path.iterdir())):
        path.write_bytes(path.read_bytes()[:length])
    traced.clear()
    assert numbers(loaded(tmp_path)) == first
    assert len(traced) == 2 and sorted(tmp_path.iterdir()) == sorted(files)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    folder = tmp_path / "file"
    folder.write_text("no folder")
    assert numbers(loaded(folder))
    assert folder.read_text() == "no folder"


@pytest.mark.slow  # 6 s
def test_the_programs_that_were_not_used_for_longest_are_removed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(program_store, "MOST", 3)
    loaded(tmp_path)
    oldest = list(tmp_path.iterdir())
    for path in oldest:
        os.utime(path, (0, 0))
    loaded(tmp_path)  # uses it again
    for path in tmp_path.iterdir():
        assert path.stat().st_mtime > 0
    os.utime(oldest[0], (0, 0))
    loaded(tmp_path, cache="int8")
    assert len(list(tmp_path.iterdir())) == 3 and not oldest[0].exists()
