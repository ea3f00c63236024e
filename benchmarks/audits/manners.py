"""Checks that commands behave well: clean stderr, memory on demand, one-line errors, and an immediate end on Ctrl-C.

python -m llamaspec.benchmarks.audits.manners [--shape tinyllama-1.1b] [--json FILE]

Runs commands as a user does, but with an empty cache folder. The commands run one at a time, with `--debug`, two at
once, while another process holds most of a GPU or nearly all of it, and with Ctrl-C at several moments. Prints the
result of each check. The exit status is 1 if any check fails.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import which
from threading import Event, Thread
from typing import Any, NamedTuple

import click

from llamaspec.benchmarks.common.random_model import write_random_model
from llamaspec.benchmarks.common.report import write_report
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.running.process import MEMORY
from llamaspec.model.system import nvidia_driver

ROOT = Path(__file__).parents[3]
# Lines that other libraries write: a line in the format of their logs, or a line that names such a library.
NOISE = re.compile(
    r"^[IWEF]\d{4} |^\d{4}-\d\d-\d\d .*: [IWEF] |^WARNING|Warning:|external/|/xla/|cuda_|CUDA_ERROR|cuBLAS"
    r"|bfc_allocator|stream_executor|Delay kernel|PJRT|pjrt|Traceback"
)
MOMENTS = (0.3, 0.8, 1.5, 2.5, 4.0, 6.0, 9.0)  # seconds from the start until Ctrl-C
AT_ONCE = 2.0  # seconds within which a command must end after Ctrl-C
MOST, NEARLY_ALL = 0.9, 0.97  # shares of a GPU that another process holds
PATIENCE = 120.0  # seconds for a command
HOLD = "import jax; jax.numpy.zeros(1).block_until_ready(); print('held', flush=True); input()"

Row = dict[str, Any]


def noise(stderr: str) -> list[str]:
    """List the lines that other libraries wrote.

    >>> noise("Llama on H100, 15M weights\\nE0000 00:00:17.1 cuda_timer.cc:87] Delay kernel timed out")
    ['E0000 00:00:17.1 cuda_timer.cc:87] Delay kernel timed out']
    """
    return [line for line in re.split(r"[\r\n]+", stderr) if NOISE.search(line)]


class CommandResult(NamedTuple):
    """The result of a command that has ended."""

    code: int
    out: str
    err: str
    seconds: float


class Runner:
    """Runs commands that share a cache folder."""

    def __init__(self, cache: Path):
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own_variables = {*MEMORY, "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_MAX_VLOG_LEVEL"}  # a user sets none
        inherited = {name: value for name, value in os.environ.items() if name not in own_variables}
        self.environment = {**inherited, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": paths}

    def begin(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start a command in a new process group."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-m", "llamaspec", *words]
        return subprocess.Popen(
            command, env={**self.environment, **more}, text=True, start_new_session=True, **pipes
        )  # fmt: skip

    def run(self, *words: str, typed: str = "") -> CommandResult:
        """Run a command to its end."""
        began = time.monotonic()
        with self.begin(*words) as process:
            out, err = ended(process, typed)
        return CommandResult(process.returncode, out, err, time.monotonic() - began)


def ended(process: subprocess.Popen[str], typed: str = "") -> tuple[str, str]:
    """Wait until a process ends, and kill it after `PATIENCE` seconds. Returns stdout and stderr."""
    try:
        return process.communicate(typed, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def quiet(name: str, done: CommandResult, *, more: Mapping[str, Any] | None = None) -> Row:
    """Judge a command that should exit with 0. Lines of other libraries on its stderr are a fault, too."""
    lines = noise(done.err)
    right = done.code == 0 and not lines
    row = {"check": name, "right": right, "exit": done.code, "seconds": round(done.seconds, 2), "noise": lines[:5]}
    return {**row, **({} if right else {"stderr": done.err[-1500:]}), **(more or {})}


def agreeing(row: Row, equal: bool) -> Row:
    """Compare two runs of the same command, which must print the same text.

    Returns the row of the check unchanged if `equal` is true, otherwise as a failed check.
    """
    return {**row, "right": row["right"] and equal, "same text": equal}


def refused(done: CommandResult, share: float) -> Row:
    """Judge a command that ran while another process held `share` of the GPU.

    The command should fail with a one-line error that says how much memory is missing.
    """
    lines = [line for line in re.split(r"[\r\n]+", done.err) if line.strip()]
    last = lines[-1] if lines else ""
    right = done.code != 0 and not noise(done.err) and last.startswith("error: ") and "GB" in last
    row = {"check": f"generate while a process holds {share:.0%} of the GPU", "right": right, "exit": done.code}
    return {**row, "seconds": round(done.seconds, 2), "stderr": lines[-6:]}


@contextmanager
def holding(share: float) -> Iterator[None]:
    """Let another process hold a share (0 to 1) of the GPU's memory inside this context."""
    inherited = {name: value for name, value in os.environ.items() if name not in MEMORY}  # JAX refuses both names
    environment = {**inherited, "XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_CLIENT_MEM_FRACTION": str(share)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environment, text=True, **pipes) as holder:
        assert holder.stdout
        answer = holder.stdout.readline()
        try:
            if not answer:
                raise ValueError(f"a process could not hold {share:.0%} of the GPU's memory")
            yield
        finally:
            holder.communicate("\n", timeout=PATIENCE)


@contextmanager
def memory_watched() -> Iterator[dict[str, float]]:
    """Measure the memory in use on the GPU, in GiB: `before` this context, and the `most` inside it.

    The result is empty if there is no nvidia-smi.
    """
    gigabytes: dict[str, float] = {}
    stop = Event()

    def memory_used() -> float:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
        )
        return float(output.stdout.split()[0]) / 1024

    def watch() -> None:
        while not stop.wait(0.2):
            gigabytes["most"] = max(gigabytes["most"], memory_used())

    if which("nvidia-smi") is None:
        yield gigabytes
        return
    gigabytes["before"] = gigabytes["most"] = memory_used()
    thread = Thread(target=watch)
    thread.start()
    try:
        yield gigabytes
    finally:
        stop.set()
        thread.join()


def isolated_commands(runner: Runner, model: str, text: Path) -> Iterator[Row]:
    """Run commands one at a time, and then two at the same time. Yields the row of each check."""
    story = ("story", "--seed", "7", "--max-new-tokens", "32")
    with memory_watched() as memory:
        done = runner.run(*story)
    yield quiet("story, nothing compiled", done, more={"GiB": memory, "stderr": done.err[-600:]})
    yield quiet("story, again", runner.run(*story))
    generate = ("generate", "Once upon a time", "--model", model, "--max-new-tokens", "32", "--seed", "1")
    for options in ([], ["--temperature", "0"], ["--quantize", "q8"], ["--quantize", "q4", "--json"]):
        yield quiet(" ".join(("generate", *options)), runner.run(*generate, *options))
    yield quiet("chat", runner.run("chat", "--seed", "7", "--max-new-tokens", "24", typed="Tell me a story.\nWho?\n"))
    yield quiet("eval", runner.run("eval", "--text", str(text)))
    done = runner.run("doctor")
    yield quiet("doctor", done, more={"said": done.out[:2500]})
    done = runner.run("--debug", *story)
    row = {"check": "story --debug", "right": done.code == 0, "exit": done.code, "lines of XLA": len(noise(done.err))}
    yield row
    processes = [runner.begin(*story) for _ in range(2)]
    began = time.monotonic()
    outputs = [ended(process) for process in processes]
    pair = [
        CommandResult(process.returncode, *streams, time.monotonic() - began)
        for process, streams in zip(processes, outputs, strict=True)
    ]
    for number, done in enumerate(pair):
        yield agreeing(quiet(f"story, one of two at once ({number})", done), done.out == pair[0].out)


def beside_another(runner: Runner, model: str) -> Iterator[Row]:
    """Run commands while another process holds most of the GPU, and while it holds nearly all of it.

    Yields the row of each check. In the second case, `generate` must run if `inspect --plan` says that the model fits
    in the rest of the memory (a small model on a large GPU does). Otherwise `generate` must refuse to run.
    """
    with holding(MOST):
        yield quiet(f"story while a process holds {MOST:.0%} of the GPU", runner.run("story", "--seed", "7"))
    with holding(NEARLY_ALL):
        plan = runner.run("inspect", model, "--plan", "--json")
        done = runner.run("generate", "Once", "--model", model, "--max-new-tokens", "4")
    yield quiet(f"inspect --plan while a process holds {NEARLY_ALL:.0%} of the GPU", plan)
    if plan.code == 0 and json.loads(plan.out)["memory"]["fits"]:
        yield quiet(f"generate while a process holds {NEARLY_ALL:.0%} of the GPU", done)
    else:
        yield refused(done, NEARLY_ALL)


def interrupted(runner: Runner, model: str, folder: Path) -> Iterator[Row]:
    """For each of `MOMENTS`, start a command with an empty cache, and send Ctrl-C that many seconds later.

    Yields the row of each check.
    """
    for moment in MOMENTS:
        words = ("generate", "Once upon a time", "--model", model, "--max-new-tokens", "900")
        with runner.begin(*words, XDG_CACHE_HOME=str(folder / f"cache-{moment}")) as process:
            time.sleep(moment)
            running = process.poll() is None
            if running:
                os.killpg(process.pid, signal.SIGINT)
            pressed = time.monotonic()
            out, err = ended(process)
            done = CommandResult(process.returncode, out, err, time.monotonic() - pressed)
        yield interruption(f"Ctrl-C after {moment} s", done, running=running)


def interruption(name: str, done: CommandResult, *, running: bool) -> Row:
    """Judge an interrupted command. A command that had already ended before Ctrl-C must have exited with 0."""
    code = 130 if running else 0
    right = done.code == code and done.seconds < AT_ONCE and not noise(done.err)
    row = {"check": name if running else f"{name}, too late: the command had ended", "right": right, "exit": done.code}
    return {**row, "seconds": round(done.seconds, 2), **({} if right else {"stderr": done.err[-800:]})}


def checks(shape: str, folder: Path) -> Iterator[Row]:
    """Run all checks, and yield their rows."""
    model = "stories"
    if shape != "stories":
        model = str(folder / "model")
        write_random_model(replace(SHAPES[shape], vocab=open_checkpoint("stories").config.vocab), Path(model))
    text = folder / "text"
    text.write_text("Once upon a time there was a fox who lived in a wood. One day the fox met a bear.\n")
    runner = Runner(folder / "cache")
    yield from isolated_commands(runner, model, text)
    yield from interrupted(runner, model, folder)
    if nvidia_driver():
        yield from beside_another(runner, model)
    else:
        yield {"check": "while a process holds the GPU", "skipped": "there is no NVIDIA GPU"}


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(["stories", *SHAPES]), default="stories", show_default=True)
@click.option("--json", "raw", type=click.Path(path_type=Path), help="File for the results of all checks.")
def main(shape: str, raw: Path | None):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in checks(shape, Path(folder)):
            rows.append(row)
            click.echo(json.dumps(row))
    if raw:
        write_report({"rows": rows}, raw)
    wrong = [row["check"] for row in rows if not row.get("right", True)]
    click.echo(json.dumps({"checks": len(rows), "wrong": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
