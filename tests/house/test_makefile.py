"""The Makefile finds a Python and creates .venv. Shell scripts stand in for interpreters and pip."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

MAKE = shutil.which("make")
pytestmark = pytest.mark.skipif(MAKE is None, reason="needs make")


class Machine:
    """A machine with only the programs that a test puts into PATH and HOME."""

    def __init__(self, folder: Path):
        self.home = folder
        self.bin = folder / "bin"

    def script(self, path: str, body: str) -> Path:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        return file

    def interpreter(
        self, path: str, version: tuple[int, int, int], without: str = "nothing", venv: str = "exit 1"
    ) -> Path:
        """Write a stand-in for Python with this path and version.

        It cannot import the module `without`. For `-m venv`, it runs the shell command `venv`.
        """
        claim = f"""
import sys
sys.version_info, sys.executable = {(*version, "final", 0)}, {str(self.home / path)!r}
sys.modules[{without!r}] = None
exec(sys.argv[2])
"""
        pretend = f'exec {shlex.quote(sys.executable)} -c {shlex.quote(claim)} "$@"'
        return self.script(path, f"case $1 in -m) {venv} ;; *) {pretend} ;; esac")

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "HOME": str(self.home), "PYTHON_PLACES": "", **environment}
        return subprocess.run([str(MAKE), "-s", *arguments], cwd=REPOSITORY, env=env, capture_output=True, text=True)

    def chosen(self, *arguments: str, **environment: str) -> str:
        run = self.make("python", *arguments, **environment)
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""
        return run.stdout

    def error(self, *arguments: str, **environment: str) -> str:
        """Run make, which must fail. Return the one line on stderr before make's own message."""
        run = self.make(*arguments, **environment)
        assert run.returncode != 0
        assert run.stdout == ""
        line, makes_own = run.stderr.splitlines()
        assert makes_own.startswith("make: ***")
        return line


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_failing_shim_is_skipped(machine: Machine):
    machine.script("bin/python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    machine.interpreter("bin/python3", (3, 11, 7))
    good = machine.interpreter("bin/python", (3, 13, 1))
    assert machine.chosen() == f"{good}\n"


@pytest.mark.parametrize(
    "path", [".pyenv/versions/3.12.1/bin/python3", ".local/share/uv/python/cpython-3.14/bin/python3"]
)
def test_pythons_of_version_managers_are_found(machine: Machine, path: str):
    machine.interpreter("bin/python3", (3, 11, 7))
    good = machine.interpreter(path, (3, 12, 1))
    assert machine.chosen() == f"{good}\n"


def test_pyenv_may_live_elsewhere(machine: Machine):
    good = machine.interpreter("elsewhere/my pyenv/versions/3.14.0/bin/python3", (3, 14, 0))
    assert machine.chosen(PYENV_ROOT=str(machine.home / "elsewhere/my pyenv")) == f"{good}\n"


def test_an_interpreter_without_venv_is_skipped(machine: Machine):
    bare = machine.interpreter("bin/python3.13", (3, 13, 0), without="ensurepip")
    assert f"{bare} (Python 3.13.0) has no venv or ensurepip" in machine.error("python", f"PYTHON={bare}")
    good = machine.interpreter("bin/python3.12", (3, 12, 0))
    assert machine.chosen() == f"{good}\n"


def test_a_python_newer_than_the_pins_is_the_last_resort(machine: Machine):
    newest = machine.interpreter("bin/python3", (3, 15, 0))
    assert machine.chosen() == f"{newest}\n"
    good = machine.interpreter(".pyenv/versions/3.12.1/bin/python3", (3, 12, 1))
    assert machine.chosen() == f"{good}\n"


def test_only_a_named_python_is_tried(machine: Machine):
    machine.interpreter("bin/python3.12", (3, 12, 1))
    named = machine.interpreter("my python", (3, 14, 2))
    old = machine.interpreter("old", (3, 11, 7))
    assert machine.chosen(f"PYTHON={named}") == f"{named}\n"
    assert machine.chosen(PYTHON=str(named)) == f"{named}\n"
    assert machine.error("python", f"PYTHON={old}") == (
        f"error: llamaspec needs Python 3.12 or newer, but PYTHON={old} is Python 3.11.7"
    )
    assert "PYTHON=nowhere does not run" in machine.error("python", "PYTHON=nowhere")


def test_without_python_one_line_says_what_to_do(machine: Machine):
    machine.interpreter("bin/python3", (3, 9, 2))
    line = machine.error("python")
    assert "no Python 3.12 or newer found" in line
    assert "python3 is Python 3.9.2" in line
    assert "make setup PYTHON=" in line


def test_make_story_uses_the_given_or_the_built_in_model(machine: Machine):
    def command(*arguments: str) -> list[str]:
        return machine.make("-n", "story", *arguments).stdout.replace("\\\n", "").split("llamaspec ")[1].split()

    assert command() == ["story"]
    assert command("MODEL=/m") == ["story", "--model", '"/m"']
    assert command("MODEL=/m", "TOKENIZER=/t") == ["story", "--model", '"/m"', "--tokenizer", '"/t"']
    assert command("SEED=7") == ["story", "--seed", "7"]


class Checkout:
    """A copy of the files that `make setup` reads, and a stand-in for Python that only records calls of pip."""

    def __init__(self, folder: Path):
        self.folder = folder / "checkout"
        self.calls = folder / "calls"
        self.broken = folder / "broken"  # if it exists, pip fails to install the package that it names (empty: any)
        shutil.copytree(REPOSITORY / ".ci", self.folder / ".ci")
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.folder)
        machine = Machine(folder)
        pip = machine.script(
            "pip",
            f'echo "$@" >>{self.calls}; sleep 0.1; [ -e {self.broken} ] || exit 0\n'
            f'case "$*" in *"$(cat {self.broken})"*) echo no such pin; exit 1 ;; esac',
        )
        venv = f"echo venv >>{self.calls}; mkdir -p $3/bin; cp {pip} $3/bin/python"
        self.python = machine.interpreter("python", (3, 12, 1), venv=venv)
        # If make runs these tests, its variables must not reach the make that a test starts.
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    def setup(self, at_once: int = 1, target: str = "setup") -> list[str]:
        """Run the target in `at_once` parallel makes.

        Return the recorded calls of pip and Python, and the created environments.
        """
        self.calls.write_text("")
        command = [str(MAKE), "-s", target, f"PYTHON={self.python}"]
        makes = [
            subprocess.Popen(command, cwd=self.folder, env=self.env, stderr=subprocess.PIPE, text=True)
            for _ in range(at_once)
        ]
        self.outputs = [make.communicate()[1] for make in makes]
        self.worked = all(make.returncode == 0 for make in makes)
        return [line.split(" --no-input ")[-1] for line in self.calls.read_text().splitlines()]


INSTALL = ["install -c constraints.txt setuptools", "install -c constraints.txt --no-build-isolation -e .[dev]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_setup_runs_once(checkout: Checkout):
    assert checkout.setup() == ["venv", *INSTALL]
    assert checkout.worked
    assert checkout.setup() == []
    assert checkout.outputs == [""]


def test_new_pins_are_installed_into_what_is_there(checkout: Checkout):
    checkout.setup()
    (checkout.folder / "constraints.txt").touch()
    assert checkout.setup() == ["-m pip --version", *INSTALL]
    assert checkout.setup() == []


def test_an_interrupted_setup_is_repeated(checkout: Checkout):
    checkout.broken.touch()
    assert checkout.setup() == ["venv", INSTALL[0]]
    assert not checkout.worked
    assert "no such pin" in checkout.outputs[0]

    checkout.broken.unlink()
    assert checkout.setup() == ["venv", *INSTALL]
    assert checkout.worked


@pytest.mark.skipif(
    shutil.which("flock") is None, reason="without flock (util-linux), set-ups do not wait for each other"
)
def test_two_parallel_setups_install_once(checkout: Checkout):
    assert checkout.setup(at_once=2) == ["venv", *INSTALL]
    assert checkout.worked


def test_the_kernels_tests_have_an_environment_with_the_oldest_jax(checkout: Checkout):
    venv, _, install, tests = checkout.setup(target="test-jax011")
    pins = ".venv-jax011/constraints.txt"
    assert (venv, install) == (
        "venv",
        f"install -c {pins} --no-build-isolation -e .[train] beartype pytest pytest-timeout pytest-xdist",
    )
    assert tests.startswith("-m pytest") and "tests/kernels" in tests
    default, newest, oldest = (
        {line for line in path.read_text().splitlines() if "==" in line}
        for path in (checkout.folder / pins, REPOSITORY / "constraints.txt", REPOSITORY / ".ci/jax011.txt")
    )
    assert oldest <= default
    assert {line.split("==")[0] for line in newest ^ default} == {"jax", "jaxlib"}
    assert checkout.setup(target="test-jax011") == [tests]


def test_the_site_is_built_in_an_environment_without_the_project(checkout: Checkout):
    checkout.setup()
    site = checkout.folder / "build/site"
    for folder in (site / "tab", site / "html"):  # two steps, which run at the same time, would write these folders
        folder.mkdir(parents=True)
    venv, _, install, stage, page, *parallel, check = checkout.setup(target="docs")
    tab, build = sorted(parallel)
    assert (venv, install) == ("venv", "install -c constraints.txt -r .ci/docs.txt")
    assert (stage, check) == ("-m llamaspec.learn.site stage build/site", "-m llamaspec.learn.site check build/site")
    assert page.startswith("-m llamaspec xray ") and page.endswith(" --out build/site/source/xray")
    assert tab == "-m llamaspec.learn.site tab build/site"
    assert build.startswith("-m mkdocs build --strict") and checkout.worked
    (site / "html/tab").rename(site / "tab")
    assert len(checkout.setup(target="docs")) == 5


@pytest.mark.parametrize(("target", "pins"), [("", "constraints.txt"), ("-jax011", ".ci/jax011.txt")])
def test_the_plugin_that_compiles_has_the_version_of_jax(checkout: Checkout, target: str, pins: str):
    *_, plugin, compiled = checkout.setup(target=f"test-gpu-compile{target}")
    (jax,) = (line for line in (REPOSITORY / pins).read_text().splitlines() if line.startswith("jax=="))
    version = jax.removeprefix("jax==")
    assert plugin.startswith(f"install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}")
    assert compiled.startswith("-m llamaspec.benchmarks.gates")
    assert checkout.worked


def test_each_card_is_compiled_for_in_a_process_of_its_own(checkout: Checkout):
    *_, first, second = checkout.setup(target="test-cards")
    gates = "-m llamaspec.benchmarks.gates --card"
    assert (first, second) == (f"{gates} rtx-3060 --sample", f"{gates} a100 --sample")
    assert checkout.worked


def test_without_the_plugin_gates_are_skipped_with_one_line(checkout: Checkout):
    checkout.broken.write_text("jax-cuda13-plugin")
    assert checkout.setup(target="test-gpu-compile")[-1].startswith("install --no-deps jax-cuda13-plugin")
    assert checkout.worked
    assert checkout.outputs[0].splitlines()[-1].startswith("test-gpu-compile: skipped")

    checkout.broken.write_text("setuptools")
    checkout.setup(target="test-gpu-compile")
    assert not checkout.worked


@pytest.mark.parametrize(
    ("user", "chromium", "apt_works", "calls", "message"),
    [
        (0, False, True, 2, ""),
        (0, False, False, 1, "ci: Chromium cannot be installed; tests of pages skip\n"),
        (0, True, True, 0, ""),
        (1000, False, True, 0, ""),
    ],
)
def test_ci_brings_a_browser_where_it_can(machine: Machine, user, chromium, apt_works, calls, message):
    log = machine.home / "calls"
    machine.script("bin/apt-get", f'echo "$@" >>{log}; echo loud; echo loud >&2; exit {int(not apt_works)}')
    machine.script("bin/id", f"echo {user}")
    machine.script("bin/make", 'echo "make $@"')
    machine.script("bin/dirname", 'echo "${1%/*}"')
    if chromium:
        machine.script("bin/chromium", "")
    env = {"PATH": str(machine.bin), "LLAMASPEC_DATA": ""}
    done = subprocess.run([str(shutil.which("bash")), REPOSITORY / ".ci/run"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "make ci\n", message)
    assert len(log.read_text().splitlines() if log.exists() else []) == calls
