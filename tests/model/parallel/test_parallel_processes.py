"""Several processes run one model: they print what a single process prints, and report a lost process in one line."""

import json
import os
import re
import signal
import socket
import string
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.parallel.processes import ProcessGroup, Watch
from llamaspec.model.parallel.reading import share_of
from tests.model.parallel.on_devices import COMPILED_FAST
from tests.support import tiny_tokenizers
from tests.support.processes import MEASURED, REPOSITORY, run_llamaspec
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.refusals import mentions
from tests.support.waiting import PATIENCE, held_port, listens, until

STORY = ("generate", "Once", "--seed", "7", "--context", "128")


def start(
    *arguments: str,
    port: int,
    processes: int = 2,
    which: Iterable[int] | None = None,
    timeout: float = PATIENCE,
    peaks: Path | None = None,
    first: str = "",
):
    """Start all `processes` processes of one command, which connect to each other at `port`.

    With `which`, start only the processes with these numbers. Each process runs the Python code `first` before the
    command. With `peaks`, each process writes its peak memory in KB to a file in that folder.
    """
    python = [sys.executable, "-c", f"{MEASURED * bool(peaks)}{first}\nfrom llamaspec import cli; cli.main()"]
    meeting = ("--coordinator", f"127.0.0.1:{port}", "--processes", str(processes), "--timeout", str(timeout))
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    return [
        subprocess.Popen(
            [*python, *([str(peaks / str(i))] if peaks else []), *arguments, *meeting, "--process", str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": COMPILED_FAST},
        )
        for i in which or range(processes)
    ]


@pytest.fixture
def started():
    """Return `start` with a free port; processes that still run at the end of the test are killed."""
    all = []

    def begin(*arguments, **options):
        all.extend(processes := start(*arguments, port=ports.enter_context(held_port()), **options))
        return processes

    with ExitStack() as ports:
        yield begin
        for process in all:
            process.kill()
            process.communicate()


def errors(process: subprocess.Popen) -> list[str]:
    _, err = process.communicate(timeout=PATIENCE)
    return [line for line in err.splitlines() if not line.startswith("float32 on CPU")]


@pytest.mark.slow  # 15 s
def test_two_processes_tell_the_text_of_one(started, run):
    """Two processes generate the same greedy text as one process."""
    request = (*STORY, "--max-new-tokens", "32", "--temperature", "0")
    processes = started(*request)
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    code, out, _ = run(*request)
    assert (code, outputs[0][0], outputs[1][0]) == (0, out, "")
    assert "2 devices in 2 processes" in outputs[0][1]


@pytest.mark.slow  # 30 s
def test_a_conversation_and_an_evaluation_are_those_of_one_process(started, run, tmp_path):
    """A chat and an evaluation on two processes print what one process prints.

    In the chat, only process 0 reads questions and writes a file.
    """
    questions, saved = "Tell me a story about a fox.\nWho was the story about?\n", tmp_path / "both.json"
    answers = ("--seed", "7", "--max-new-tokens", "24", "--context", "128")
    processes = started("chat", *answers)
    first, second = (
        process.communicate(text, timeout=PATIENCE)
        for process, text in zip(processes, (f"{questions}/save {saved}\n", "Never asked.\n"), strict=True)
    )
    assert [process.returncode for process in processes] == [0, 0], (first, second)
    done = run_llamaspec("chat", *answers, stdin=questions)
    assert (first[0], second[0]) == (done.out, "") and len(done.out) > 40
    assert len(json.loads(saved.read_text())) == 4
    assert f"4 messages to {saved}\n" in first[1] and str(saved) not in second[1]

    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little fox. She had a red kite.")
    request = ("eval", "stories", "--text", str(text), "--context", "16", "--json")
    processes = started(*request)
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    single, two = json.loads(run(*request)[1]), json.loads(outputs[0][0])
    assert not outputs[1][0] and two["tokens"] == single["tokens"]
    assert two["perplexity"] == pytest.approx(single["perplexity"], rel=1e-5)


@pytest.mark.slow  # 20 s
def test_two_processes_train_the_weights_that_two_devices_train(started, tmp_path):
    """Two processes, and two devices of one process, train the same bits of weights and of the optimizer's state.

    The bits can be equal because a sum of two numbers does not depend on their order. `test_parallel.py` checks the
    trained weights themselves.
    """
    text, tokenizer = tmp_path / "text", tmp_path / "tokenizer.bin"
    text.write_text("\n\n".join((string.ascii_lowercase * 2)[i : i + 20] for i in range(26)))
    tokenizer.write_bytes(tiny_tokenizers.llama2c())
    sizes = "--dim 16 --layers 1 --heads 2 --kv-heads 2 --head-dim 8 --ffn 32 --context 64 --steps 2 --batch 3"
    request = ("train", *sizes.split(), "--text", str(text), "--tokenizer", str(tokenizer), "--fsdp", "--devices", "2")
    processes = started(*request, "--out", str(tmp_path / "both"))
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert f"{tmp_path / 'both' / 'model'}\n" in outputs[0][1] and not outputs[1][1]
    (single,) = started(*request, "--out", str(tmp_path / "alone"), processes=1)
    _, err = single.communicate(timeout=PATIENCE)
    assert single.returncode == 0, err
    for name in ("step-00000002.safetensors", "model/model.safetensors"):
        single_file, two = (load_file(tmp_path / place / name) for place in ("alone", "both"))
        assert single_file.keys() == two.keys() and all(
            np.array_equal(single_file[key], two[key]) for key in single_file
        ), name


def stop_process(process: int) -> str:
    """Return Python code that makes one process hang forever in the middle of a generation."""
    return f"""
import sys, threading
from llamaspec.model.running import session
times, now = [], session.perf_counter

def held():
    times.append(now())
    if len(times) > 8 and sys.argv[-1] == "{process}":
        threading.Event().wait()
    return times[-1]

session.perf_counter = held
"""


@pytest.mark.sampled(1)  # 15 s each
@pytest.mark.parametrize("victim", [1, 0])
def test_the_end_of_one_process_ends_the_other_with_one_line(started, victim):
    processes = started(*STORY, "--max-new-tokens", "100", first=stop_process(victim))
    assert processes[0].stdout.read(6) == "Once u"  # the text has begun
    processes[victim].kill()
    lines = errors(processes[1 - victim])  # at once, without waiting for a timeout
    gone = f"error: process {victim} of 2 has ended"
    if victim == 0 and len(lines) > 1:  # a busy machine's JAX may report its lost coordinator before we do
        own_lines = [line for line in lines if not re.match(r"[IWEF]\d{4} ", line)]  # without JAX's log
        assert own_lines == [gone] or any("detected fatal errors" in line for line in lines), lines
    else:
        assert (lines, processes[1 - victim].returncode) == ([gone], 1)


# A line on standard input sets the timeout. Before that, a busy machine may be slow without an error.
TIMEOUT_IS_TOLD = """
import sys, threading
from llamaspec.model.parallel import processes

class Told(processes.Watch):
    def __init__(self, group):
        super().__init__(group)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        if line := sys.stdin.readline():
            self._group = self._group._replace(timeout=float(line))

processes.Watch = Told
"""


@pytest.mark.slow  # 20 s each
@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_that_hangs_is_noticed(started, victim):
    processes = started(*STORY, "--max-new-tokens", "100", first=stop_process(victim) + TIMEOUT_IS_TOLD)
    assert processes[0].stdout.read(6) == "Once u"
    processes[victim].send_signal(signal.SIGSTOP)
    processes[1 - victim].stdin.write("4\n")
    processes[1 - victim].stdin.flush()
    assert errors(processes[1 - victim]) == [f"error: process {victim} of 2 has not answered for 4 s"]
    assert processes[1 - victim].returncode == 1
    processes[victim].send_signal(signal.SIGCONT)
    assert (
        errors(processes[victim]) and processes[victim].returncode
    )  # with JAX's message, if JAX notices the lost process before we do


def ask_as_a_stranger(port: int) -> None:
    """Connect to process 0 once it listens, send an HTTP request, and wait until process 0 closes the connection."""
    until(lambda: listens(port))
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection, suppress(ConnectionResetError):
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert connection.recv(1) == b""


def test_processes_with_other_options_end_with_the_difference():
    """Processes with different options end with a message that names the different option.

    A port scan does not count as a process. In this test, each process is a thread.
    """
    equal, different = {"the command": "story", "--seed": "7"}, {"the command": "story", "--seed": "8"}

    def refusal(port: int, process: int, options: dict[str, str]) -> str:
        with pytest.raises(ValueError) as refused:
            Watch(ProcessGroup(f"127.0.0.1:{port}", 3, process, PATIENCE, options))
        return str(refused.value)

    with held_port() as port, ThreadPoolExecutor(3) as pool:
        first = pool.submit(refusal, port, 0, equal)
        ask_as_a_stranger(port)
        futures = [first, pool.submit(refusal, port, 1, equal), pool.submit(refusal, port, 2, different)]
    words = "the processes differ: --seed is 7 in process 0 and 8 in process 2"
    assert [future.result() for future in futures] == [words] * 3


def test_a_command_is_told_from_others_by_its_options(run, monkeypatch, tmp_path):
    """Processes compare their commands and options, except for process numbers, addresses, and settings of the output.

    The model is compared by the last part of its path. For `train`, the name of the output is compared too, because a
    resumed training reads it.
    """
    options_by_command = []

    def joined(group: ProcessGroup):
        options_by_command.append(group.settings)
        raise ValueError("enough")

    monkeypatch.setattr("llamaspec.model.parallel.processes.joined", joined)
    monkeypatch.setattr("llamaspec.commands.parallel.os.dup2", lambda *_: None)
    place = ("--processes", "2", "--process", "0", "--coordinator")
    once = ("generate", "Once", "--temperature", "0", "--model")
    monkeypatch.chdir(tmp_path)
    for options in (
        (*once, "a/m", *place, "h:1"),
        (*once, f"b/../../{tmp_path.name}/m", *place, "g:1", "--process", "1", "--timeout", "9", "--json", "--timings"),
        (*once, ".", *place, "h:1"),
        ("story", "Once", "--temperature", "0", "--model", "a/m", *place, "h:1"),
        ("logits", "--tokens", "1", "--out", "a.npy", *place, "h:1"),
        ("logits", "--tokens", "1", "--out", "b.npy", *place, "h:1"),
        ("train", "--out", "a", *place, "h:1"),
    ):
        assert run(*options)[0] == 1
    first, second, other_model, other_verb, logits, same_logits, train = options_by_command
    assert first == second and first["the command"] == "generate" and first["--temperature"] == "0.0"
    assert first["the version of jax"] == jax.__version__ and other_model["--model"] == tmp_path.name
    assert logits == same_logits and train["--out"] == "a"
    assert {name for name in first if first[name] != other_model[name]} == {"--model"}
    assert other_verb["the command"] == "story"


@pytest.mark.slow  # 10 s
def test_a_missing_process_is_named_by_its_number(started):
    (first,) = started(*STORY, timeout=5, which=[0])
    (line,) = errors(first)
    assert re.match(r"error: .*2 processes .*127\.0\.0\.1:", line)
    assert first.returncode == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--processes", "2"), "--coordinator --processes --process"),
        (("--coordinator", "h:1", "--processes", "2", "--process", "2"), "--process 2"),
        (
            ("--coordinator", "h:1", "--processes", "2", "--process", "0", "--devices", "3"),
            "3 devices 2 processes",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(run, options, words):
    code, _, err = run("generate", "Once", *options)
    assert code == 2 and mentions(err, words)


READS = """
import json, re, sys
from pathlib import Path
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.parallel.reading import share_of
from llamaspec.model.weights.loading import check_weights, load_params
import numpy as np
def read():
    return int(re.search(r"read_bytes: (\\d+)", Path("/proc/self/io").read_text())[1])
checkpoint = open_checkpoint(sys.argv[1])
part = share_of(checkpoint, device=int(sys.argv[2]), devices=4)
before = read()
check_weights(part)
load_params(part, dtype=np.dtype("bfloat16"), positions=8)
print(json.dumps(read() - before))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Write a model so large that a second copy of half of it would exceed the allowance of 400 MB."""
    # A device's part of a row of o or down is at least 4 KB, because the system reads whole pages.
    config = replace(SMALL, dim=1024, layers=2, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=64, context=64)
    folder = tmp_path_factory.mktemp("large") / "model"
    write_huggingface(random_checkpoint(config, seed=0, dtype=ml_dtypes.bfloat16), folder)
    return folder


@pytest.mark.slow  # 25 s
def test_a_process_reads_its_part_of_a_file(large):
    """A process reads only its part of the model file from disk; the test drops the file from the page cache first."""
    (file,) = large.glob("*.safetensors")
    assert file.stat().st_size > 400e6
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run(
        [sys.executable, "-c", READS, str(large), "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    if not read:
        pytest.skip("this file system reads without the disk")
    assert read <= 0.5 * file.stat().st_size


@pytest.mark.slow  # 20 s
def test_a_process_takes_the_memory_of_its_share(started, large, tmp_path):
    """The peak memory of each process is at most its share of the weights plus 400 MB."""
    share = share_of(open_checkpoint(large), device=0, devices=2)
    weights = 4 * sum(prod(tensor.shape) for tensor in share.tensors.values())
    request = ("logits", "--model", str(large), "--dtype", "float32", "--tokens", "1,2,3")
    processes = started(*request, "--out", str(tmp_path / "logits.npy"), peaks=tmp_path)
    outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for i in range(2):
        assert 1024 * int((tmp_path / str(i)).read_text()) < weights + 400e6 < 2 * weights
