"""The published wheel works outside this repository: its list of files, and a text that its command generates."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

PACKAGES = (
    *("reference", "verify", "pallas_kernels", "model", "serving", "training", "judge", "learn"),
    *("commands", "benchmarks"),
)
NOT_PACKED = (*(f"benchmarks/{name}" for name in ("results/", "gates/", "audits/")), "learn/site/")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command with neither this repository nor its environment on any path; return its stdout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the source: setuptools would pack old files from an existing build folder."""
    folder = tmp_path_factory.mktemp("wheel")
    litter = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=litter)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages_and_the_command_and_nothing_else(wheel: Path):
    files = [
        path.relative_to(REPOSITORY) for name in PACKAGES for path in (REPOSITORY / name).rglob("*") if path.is_file()
    ]
    expected = {path.as_posix() for path in files if "__pycache__" not in path.parts} | {
        "cli.py",
        "__init__.py",
        "__main__.py",
        "start.py",
    }
    expected = {f"llamaspec/{name}" for name in expected if not name.startswith(NOT_PACKED)}
    assert {
        "llamaspec/reference/py.typed",
        "llamaspec/model/py.typed",
        "llamaspec/benchmarks/suites/gpu/suite.py",
    } <= expected

    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected


def write_wheel(folder: Path, packages: Iterable[str]) -> Path:
    """Write the wheel of a user's project with the given top-level packages; each package defines OWNER as "user"."""
    path = folder / "users-1.0-py3-none-any.whl"
    files = {f"{package}/__init__.py": 'OWNER = "user"\n' for package in packages}
    files["users-1.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: users\nVersion: 1.0\n"
    files["users-1.0.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [*files, "users-1.0.dist-info/RECORD"]
    files["users-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in record)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def test_a_users_packages_with_our_folder_names_stay_untouched(wheel: Path, tmp_path: Path):
    users = ("model", "reference", "verify")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "venv", "--no-input")
    install = (*pip, "install", "--no-deps", "--no-index", "--no-compile")
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")

    def installed() -> dict[str, bytes]:
        files = (path for path in site_packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(site_packages).as_posix(): path.read_bytes() for path in files}

    run(*install, write_wheel(tmp_path, users), cwd=tmp_path)
    before = installed()
    assert {f"{name}/__init__.py" for name in users} <= {*before}

    run(*install, wheel, cwd=tmp_path)
    outside = {name for name in {*installed()} - {*before} if not name.startswith("llamaspec")}
    assert outside == set() and installed().items() >= before.items()
    program = "import model, reference, verify, llamaspec, llamaspec.model, llamaspec.reference, llamaspec.verify\n"
    program += "print(model.OWNER, reference.OWNER, verify.OWNER, llamaspec.__version__, llamaspec.model.__name__)"
    printed = run(tmp_path / "venv/bin/python", "-c", program, cwd=tmp_path)
    assert printed.split() == ["user", "user", "user", wheel.name.split("-")[1], "llamaspec.model"]

    run(*pip, "uninstall", "--yes", "llamaspec", cwd=tmp_path)
    assert installed() == before


@pytest.mark.slow  # 43 s
def test_the_command_works_from_an_empty_environment(wheel: Path, tmp_path: Path, request: pytest.FixtureRequest):
    # This takes 26 s with pip's cache warm (2 cores, mostly unpacking). Only this test notices a dependency that only
    # the dev extra installs.
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "venv", "--no-input")
    run(*pip, "install", "--constraint", REPOSITORY / "constraints.txt", wheel, cwd=tmp_path)
    llamaspec = tmp_path / "venv/bin/llamaspec"

    version = wheel.name.split("-")[1]
    assert version in run(llamaspec, "--version", cwd=tmp_path)
    assert run(llamaspec, "doctor", cwd=tmp_path)

    data: Path = request.getfixturevalue("data")  # requested here, so that only this last part is skipped without data
    stories = data / "stories260K"
    text = run(
        *(llamaspec, "generate", "", "--temperature", "0", "--max-new-tokens", "5"),
        *("--model", stories / "stories260K.bin", "--tokenizer", stories / "tok512.model"),
        cwd=tmp_path,
    )
    expected = (stories / "greedy_200_steps.txt").read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert text[:-1] and expected.startswith(text[:-1])
