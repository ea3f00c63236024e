"""Ctrl-C at any moment ends a command within a second, prints at most one line, and leaves no half-written file."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.input import create_pipe_input

from llamaspec.commands import chat, interrupt
from llamaspec.commands.interrupt import first_handled_by, unechoed
from llamaspec.learn.lab.folder import ALL, KERNEL, function_of
from llamaspec.learn.lab.folder import write as write_exercise
from tests.commands.terminals import CTRL_C, CTRL_Z, at_terminal
from tests.support.processes import REPOSITORY
from tests.support.waiting import (
    PATIENCE,
    main_thread_seconds,
    processes_in,
    session_lives,
    session_seconds,
    until,
    wait_for_end,
)

AT_ONCE = 2.0  # processor seconds of the main thread, which a busy machine does not increase
# Start a command with Python's handler of SIGINT, as a shell does in the foreground, even if the test process ignores
# SIGINT. Before `main`, Ctrl-C raises Python's own KeyboardInterrupt; `begun` says when that is over.
START = """
import os, signal, llamaspec
signal.signal(signal.SIGINT, signal.default_int_handler)
open("../begun", "w").close()
llamaspec.main()
"""
# A shell starts a command in the background with SIGINT ignored, before Python begins.
IN_BACKGROUND = """trap '' INT; exec "$@" """


def interrupted(
    *arguments: str, after: float, cwd: Path, number: int = signal.SIGINT, background: bool = False
) -> tuple[int, float, str]:
    """Run a command with an empty cache, and send it a signal after `after` seconds of processor time.

    The signal `number` goes to the command's process group. Return the exit status, the main thread's processor seconds
    after the signal, and stderr.
    """
    (cwd / "work").mkdir()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(cwd / "cache")}
    command = [sys.executable, "-c", START, *arguments]
    if background:
        lines = [line for line in START.splitlines() if "signal.signal" not in line]
        command = ["sh", "-c", IN_BACKGROUND, "sh", sys.executable, "-c", "\n".join(lines), *arguments]
    process = subprocess.Popen(
        command,
        **{"cwd": cwd / "work", "env": environment, "start_new_session": True, "text": True},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            until(lambda: (cwd / "begun").exists() or not session_lives(process.pid))
            until(lambda: session_seconds(process.pid) >= after or not session_lives(process.pid))
            before = main_thread_seconds(process.pid)
            os.killpg(process.pid, number)
            seconds = wait_for_end(process) - before
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the group still exists, since no process has waited for its leader
        _, stderr = process.communicate()
    return process.returncode, seconds, stderr


COMMANDS = {
    "generate": (["generate", "Once", "--seed=1", "--max-new-tokens=900"], (0.4, 1.0, 3.0, 6.0)),
    "convert": (["convert", "stories", "out", "--quantize=awq", "--calibration=text"], (0.5, 2.0, 5.0)),
    "logits": (["logits", "--prompt=Once", "--out=out.npy"], (0.6, 2.5)),
    "eval": (["eval", "--text=text"], (0.5, 3.0)),
    "verify": (["verify", "--seed=1"], (0.8, 2.0)),
    "verify one": (["verify", "softmax", "--seed=1"], (1.0, 2.5)),
    "verify a model": (["verify", "--model=stories", "--seed=1"], (2.0, 4.0)),
    "train": (["train", "--out=out"], (1.0, 4.0)),
    "bench": (["bench", "--json=out.json"], (1.5, 4.0)),
    "doctor": (["doctor"], (0.4, 1.0)),
}


FIRST = [(name, earliest) for name, (_, (earliest, *_)) in COMMANDS.items()]  # the cases that `make test` runs
LATER = [(name, after) for name, (_, (_, *moments)) in COMMANDS.items() for after in moments]


@pytest.mark.sampled(10, first=True)  # the earliest of each command
@pytest.mark.parametrize(("name", "after"), [*FIRST, *LATER])
def test_an_interrupt_is_answered_at_once(tmp_path, name, after):
    arguments, _ = COMMANDS[name]
    (tmp_path / "text").write_text("Once upon a time, there was a little fox. " * 200)
    arguments = [argument.replace("=text", f"={tmp_path / 'text'}") for argument in arguments]
    status, seconds, stderr = interrupted(*arguments, after=after, cwd=tmp_path)
    if status != 0:  # it may have ended before
        assert status == 130
        assert seconds < AT_ONCE
        assert not any(
            word in stderr for word in ("Traceback", "Error", "Interrupt", "Exception", "arning", "fault")
        ), stderr
    leftovers = {path.name for path in (tmp_path / "work").rglob("*")} if name != "train" else set()
    assert not any("partial" in name or name.startswith("out") for name in leftovers) or status == 0


IN_C = """
import ctypes, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
import llamaspec

class NeverComesBack:
    def find_spec(self, name, path=None, target=None):
        if name == "llamaspec.model.system":  # the first that is imported while signals are handled
            told, lock, mutex = threading.Lock(), ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(256)
            lock(mutex)
            told.acquire()
            threading.Thread(target=lambda: told.acquire() and print("held", flush=True), daemon=True).start()
            sys.setswitchinterval(1000)  # the other thread does not run before this one is in C
            told.release()
            lock(mutex)

sys.meta_path.insert(0, NeverComesBack())
llamaspec.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_that_is_in_c_for_ever(number):
    """A signal ends a command even while C code runs (such as XLA's compiler) and no Python handler can run."""
    with subprocess.Popen(
        [sys.executable, "-c", IN_C, "tokens", "Once"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == b"held\n"
            process.send_signal(number)
            assert process.wait(PATIENCE) == 128 + number
            assert process.stderr and process.stderr.read() == b""
            assert interrupt.PATIENCE <= 0.5  # of the promised second; no clock measures it here
        finally:
            process.kill()


@pytest.mark.sampled(1)  # 5 s
@pytest.mark.parametrize("after", [1.0, 5.0])
def test_a_request_to_end_is_answered_at_once(tmp_path, after):
    arguments = ["generate", "Once", "--seed=1", "--max-new-tokens=900"]
    status, seconds, stderr = interrupted(*arguments, after=after, cwd=tmp_path, number=signal.SIGTERM)
    assert stderr.strip() == ""
    if status != 0:  # it may have ended before
        assert status in (128 + signal.SIGTERM, -signal.SIGTERM)  # the latter during the first imports
        assert seconds < AT_ONCE


PHASES = [
    (["chat", "--seed=1"], ("starting JAX", "compiling")),
    (["trace", "Once"], ("starting JAX",)),
    (["inspect", "--plan"], ("measuring the machine",)),
    (["profile", "--trace=out.json"], ("compiling",)),
    (["serve", "--port=0"], ("starting JAX",)),
    (["xray", "Once", "--out=page"], ("telling",)),
    (["bench", "--suite=serve", "--json=out.json"], ("starting the server",)),
    (["doctor"], ("choosing ops",)),
    (["train", "--out=out"], ("starting JAX",)),
]


# This command waits at its end for Ctrl-C, so that the key cannot come too late.
WAITS_AT_ITS_END = """
import click, signal
invoke = click.Command.invoke

def pause_at_end(self, context):
    invoke(self, context)
    if not isinstance(self, click.Group):
        signal.pause()

click.Command.invoke = pause_at_end
"""


@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.parametrize(
    ("arguments", "phase"),
    [pytest.param(command, phase, id=f"{command[0]}-{phase}") for command, phases in PHASES for phase in phases],
)
def test_ctrl_c_ends_a_command_in_the_phase_that_it_shows(tmp_path, arguments, phase):
    with at_terminal(*arguments, cwd=tmp_path, first=WAITS_AT_ITS_END) as terminal:
        terminal.wait_for(phase)
        before = main_thread_seconds(terminal.process.pid)
        terminal.type(CTRL_C)
        assert wait_for_end(terminal.process) - before < AT_ONCE
        status, screen = terminal.wait()
    assert status == 130
    assert not any(word in screen for word in ("Traceback", "Error", "Interrupt", "Exception", "fault")), screen
    assert not list(tmp_path.iterdir())


HOLDS = """
import time
import numpy as np

def {}(x, *arguments, **settings):
    while {}:
        time.sleep(600)
    e = np.exp(x - np.maximum(x.max(-1, keepdims=True), np.float32(-1e30)))
    return e / np.maximum(e.sum(-1, keepdims=True), np.float32(1e-30))
"""
TIMED = 1013  # rows to time; no draw has this number


@pytest.mark.parametrize("phase", ["lab", "verify", "timed"])
def test_ctrl_c_ends_a_judge_whose_kernel_never_answers(tmp_path, phase):
    """Ctrl-C ends `verify` and `lab check` while a judged kernel hangs. No verdict, page or replay file is left."""
    if phase == "lab":
        write_exercise(ALL[1], tmp_path / "lab-01")
        file, arguments = tmp_path / "lab-01" / KERNEL, ["lab", "check", "1"]
    else:
        file = tmp_path / "mine.py"
        arguments = ["verify", ALL[1].op, f"--candidate=mine.py:{function_of(ALL[1])}", "--arrays=numpy"]
        arguments += ["--time", f"--at=rows={TIMED}", "--html=page.html", "--dtype=float32", "--examples=5", "--seed=1"]
    file.write_text(HOLDS.format(function_of(ALL[1]), f"len(x) == {TIMED}" if phase == "timed" else "True"))
    before = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    try:
        with at_terminal(*arguments, cwd=tmp_path) as terminal:
            terminal.wait_for(f"{ALL[1].op} float32, timed" if phase == "timed" else f"{ALL[1].op} float32")
            terminal.type(CTRL_C)
            status, screen = terminal.wait()
        assert status == 130
        wrong = ("Traceback", "Error", "Interrupt", "hung", "not yet", "violated")
        assert not any(word in screen for word in wrong), screen
        assert {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} == before
        until(lambda: not processes_in(tmp_path))  # the kernel's process has ended too
    finally:
        for pid in processes_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


def test_what_is_typed_during_an_answer_is_not_shown_within_it(monkeypatch):
    """Keys typed during an answer are not echoed.

    The terminal's modes are restored even if a signal ends the process.
    """
    master, terminal_end = pty.openpty()
    with open(terminal_end) as stdin, open(master, "rb", buffering=0):
        monkeypatch.setattr(sys, "stdin", stdin)

        def echoes() -> bool:
            os.write(master, b"typed\n")
            assert stdin.readline() == "typed\n"  # the typed line is not lost
            has_echo = bool(select.select([master], [], [], 0)[0])
            if has_echo:
                os.read(master, 100)
            return has_echo

        assert echoes()
        with unechoed():
            assert not echoes()
            [give_back] = interrupt.AT_THE_END
            give_back()
            assert echoes()
            signal.raise_signal(signal.SIGCONT)  # Ctrl-Z, then `fg` in a shell that has set its own modes in between
            assert not echoes()
        assert echoes() and not interrupt.AT_THE_END


# A shell with one job, which is stopped during an answer. The shell exits with the job's status, or with 99 if the job
# stays stopped.
STOPS = """
import fcntl, os, signal, sys, termios
from llamaspec.commands.interrupt import answered_at_once, unechoed

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if not job:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    with answered_at_once(), unechoed():
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
os.waitpid(job, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
os.kill(job, signal.SIGTERM)
os.kill(job, signal.SIGCONT)
_, status = os.waitpid(job, os.WUNTRACED)
os.kill(job, signal.SIGKILL) if os.WIFSTOPPED(status) else None
sys.exit(99 if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""


def test_sigterm_ends_a_chat_that_ctrl_z_stopped():
    """SIGTERM ends a chat that Ctrl-Z stopped during an answer.

    Before the chat ends, it restores the terminal's modes, which could stop it again.
    """
    master, terminal_end = pty.openpty()
    with open(terminal_end) as stdin, open(master, "rb", buffering=0):
        done = subprocess.run(
            [sys.executable, "-c", STOPS], stdin=stdin, cwd=REPOSITORY, start_new_session=True, timeout=PATIENCE
        )
    assert done.returncode == 128 + signal.SIGTERM


# After some tokens the answer waits for Ctrl-C; otherwise it might be complete before the key comes.
WAITS_IN_ITS_ANSWER = """
import time
from llamaspec.commands import chat
polled, asked = [], chat._Pressed.__call__

def wait_until_pressed(self):
    polled.append(1)
    while len(polled) > 60 and not self._pressed:
        time.sleep(0.01)
    return asked(self)

chat._Pressed.__call__ = wait_until_pressed
"""


def test_ctrl_c_cancels_a_line_or_an_answer_but_never_the_chat(tmp_path):
    """In a chat, Ctrl-C cancels a half-typed line or stops an answer, but does not end the chat.

    Answers are wrapped between words, not inside them.
    """
    arguments = ("chat", "--temperature=0", "--backend=reference")
    with at_terminal(*arguments, cwd=tmp_path, columns=30, first=WAITS_IN_ITS_ANSWER) as terminal:
        terminal.wait_for(">")
        terminal.type(CTRL_C)
        terminal.wait_for("(type /exit or press Ctrl-D")
        terminal.type(f"half a line{CTRL_C}Tell me a story about a fox.\r")
        terminal.wait_for("There was once a quiet fox\ncalled Dot, who lived in a")
        terminal.type(CTRL_C)
        time.sleep(2 * interrupt.PATIENCE)  # at the prompt, where the watching thread must not end the chat
        terminal.type("/help\r")
        terminal.wait_for("stop an answer")
        terminal.type("exit\r")  # Ctrl-D would be lost if it came before the prompt
        status, screen = terminal.wait()
    assert status == 0
    assert "Traceback" not in screen and "error" not in screen
    answer = screen.partition("who lived in a")[2].partition("/help")
    assert answer[1] and len(answer[0]) < 600  # a whole story has 700 at least
    assert "Who was the story about?" in screen


def test_ctrl_c_between_prompts_does_not_end_the_chat():
    pressed = chat._Pressed(bool, prompts=True)
    pressed.press()
    with pressed.allowed():
        assert not pressed()
        pressed.press()
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            pressed.press()
    pressed.press()


def test_ctrl_c_ends_a_process_that_waits_for_questions():
    pressed = chat._Pressed(bool, prompts=False)
    with pressed.allowed():
        pressed.press()
        assert pressed()
    with pytest.raises(KeyboardInterrupt):
        pressed.press()


def test_signals_are_still_watched_for_after_a_prompt(monkeypatch, tmp_path):
    """After a prompt, the watcher thread handles signals again.

    Only this thread can answer SIGTERM while XLA compiles.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pipe, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.set_wakeup_fd(wake)
    try:
        with create_pipe_input() as keys, create_app_session(input=keys):
            keys.send_text("one\rtwo\r")
            lines = chat._terminal_lines()
            for line in ("one", "two"):
                assert next(lines) == line
                with first_handled_by(lambda number: None, [signal.SIGTERM]):
                    signal.raise_signal(signal.SIGTERM)
                assert select.select([pipe], [], [], 10)[0] and os.read(pipe, 1) == bytes([signal.SIGTERM])
    finally:
        signal.set_wakeup_fd(before)
        os.close(pipe)
        os.close(wake)


def test_a_signal_that_comes_twice_at_once_is_acted_on_once(monkeypatch):
    """Two signals at the same moment run the handler once.

    Earlier, `serve` began its shutdown twice and printed a traceback.
    """
    acted, handle = [], signal.signal

    def interrupted(number, handler):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGTERM)
        return handle(number, handler)

    with first_handled_by(acted.append, [signal.SIGINT, signal.SIGTERM]):
        monkeypatch.setattr(signal, "signal", interrupted)
        signal.raise_signal(signal.SIGTERM)
    assert acted == [signal.SIGTERM]


def test_ctrl_z_stops_a_chat_and_is_no_character_of_its_line(monkeypatch, tmp_path):
    """Ctrl-Z suspends a chat and adds no character to the typed line.

    The test replaces the suspension by a recorder.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stopped = []
    monkeypatch.setattr(Application, "suspend_to_background", lambda self: stopped.append(self.current_buffer.text))
    with create_pipe_input() as keys, create_app_session(input=keys):
        keys.send_text(f"half{CTRL_Z} a line\r")
        assert next(chat._terminal_lines()) == "half a line"
    assert stopped == ["half"]


def test_ctrl_c_ends_a_chat_whose_questions_come_from_a_file(tmp_path):
    """Ctrl-C ends a chat that reads its questions from a file. In a terminal, Ctrl-C would end only the answer."""
    command = [sys.executable, "-c", START, "chat", "--temperature=0", "--backend=reference"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"Tell me a story about a fox.\n" * 2)
        process.stdin.flush()
        assert process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)  # this closes stdin, the questions
    assert (process.returncode, stderr.strip()) == (130, b"")


def test_an_interrupt_that_is_ignored_stays_ignored(tmp_path):
    """A command that starts with SIGINT ignored keeps ignoring SIGINT; shells start background commands this way."""
    status, _, _ = interrupted("tokens", "Once", after=0.4, cwd=tmp_path, background=True)
    assert status == 0


WAITING_MODULE = """
import sys
print("held", flush=True)
sys.stdin.read()
sys.exit(7)
"""
STARTS = {
    "script": [str(Path(sys.executable).with_name("llamaspec"))],
    "llamaspec": [sys.executable, "-m", "llamaspec"],
    "cli": [sys.executable, "-m", "llamaspec.cli"],
    "file": [sys.executable, str(REPOSITORY / "cli.py")],
}
BEFORE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.{})
os.environ["PYTHONPATH"] = sys.argv[1]
os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def waiting_command(start: str, module: str, folder: Path, handler: str = "SIG_DFL") -> Iterator[subprocess.Popen[str]]:
    """Start a command that blocks while it imports `module`. SIGINT has the handler `handler` before Python starts."""
    (folder / f"{module}.py").write_text(WAITING_MODULE)
    with subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            BEFORE.format(handler),
            f"{folder}:{REPOSITORY}",
            *STARTS[start],
            "tokens",
            "Once",
        ],
        text=True,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("module", ["signal", "click"])  # the first module that `main` imports, and the next large one
@pytest.mark.parametrize("start", STARTS)
def test_an_interrupt_within_the_first_imports_is_silent(tmp_path, start, module):
    with waiting_command(start, module, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr and process.stderr.read() == ""


@pytest.mark.parametrize("start", STARTS)
def test_ignored_sigint_stays_ignored_during_the_first_imports(tmp_path, start):
    with waiting_command(start, "click", tmp_path, handler="SIG_IGN") as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE) == ("", "")
        assert process.returncode == 7


ENDED = """
import atexit, signal, sys, time, llamaspec
signal.signal(signal.SIGINT, {})

class AsJaxWould:
    def find_spec(self, name, path=None, target=None):
        if name == "llamaspec.model.system":  # the first that is imported while signals are handled
            sys.meta_path.remove(self)
            atexit.register(lambda: (print("the end", flush=True), time.sleep({})))  # as long as JAX's end may be

sys.meta_path.insert(0, AsJaxWould())
llamaspec.main()
"""
AFTER_ALL = """
import os, signal, llamaspec

class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)  # when Python has dropped its handlers

last = Last()
llamaspec.main()
"""


@pytest.mark.parametrize(
    ("handler", "seconds", "status"), [("signal.default_int_handler", 10 * PATIENCE, 130), ("signal.SIG_IGN", 1, 0)]
)
def test_an_interrupt_after_all_is_done_is_silent(handler, seconds, status):
    """Ctrl-C during Python's shutdown prints nothing and ends the process, unless SIGINT is ignored."""
    command = [sys.executable, "-c", ENDED.format(handler, seconds), "tokens", "Once"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stderr
        try:
            assert any(line == b"the end\n" for line in process.stdout)

            def ended() -> bool:
                process.send_signal(signal.SIGINT)  # again, because Python may miss a signal just before it sleeps
                return process.poll() is not None

            until(ended, pause=0.1)
            assert process.wait() == status
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_an_interrupt_in_the_last_instant_does_not_kill():
    command = [sys.executable, "-c", AFTER_ALL, "tokens", "Once"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=environment)
    assert (ended.returncode, ended.stderr) == (0, b"")
