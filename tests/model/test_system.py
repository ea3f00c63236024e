"""Operating systems with fewer sources of information than Linux: without /proc, /sys and glibc, as on macOS."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from llamaspec.model import system
from tests.support.families import FAMILIES, write_checkpoint
from tests.support.processes import REPOSITORY, run_python
from tests.support.waiting import PATIENCE

FILES = ("MEMORY", "PROCESSORS", "DRIVER", "MAPPINGS")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide what only Linux and glibc have: files, control groups, CPU affinity and functions of libc."""
    for name in FILES:
        monkeypatch.setattr(system, name, tmp_path / name)
    monkeypatch.setattr(system, "CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
    monkeypatch.setattr(system, "CACHES", str(tmp_path / "{}"))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(system, "_libc", lambda function: None)


def test_without_linux_everything_has_a_plain_form(hidden):
    assert system.usable_cpus() == list(range(os.cpu_count() or 1))
    assert system.processor() == system.platform.machine()
    assert system.nvidia_driver() is None
    assert system.last_level_cache_bytes() is None
    assert system.available_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system.return_freed_memory()
    system.return_blocks_when_freed()
    system.forget_code(Path(jaxlib.__file__).parent)


def test_on_linux_there_is_more_to_say():
    assert set(system.usable_cpus()) == os.sched_getaffinity(0)
    assert system.available_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("1000", "400", 600), ("1000", "1400", 0), ("max", "400", None)]
)
def test_a_control_groups_limit_counts(limit: str, used: str, expected: int | None, monkeypatch, tmp_path):
    (tmp_path / "max").write_text(f"{limit}\n")
    (tmp_path / "current").write_text(f"{used}\n")
    monkeypatch.setattr(system, "CGROUPS", ())
    unlimited = system.available_bytes()
    monkeypatch.setattr(system, "CGROUPS", ((tmp_path / "max", tmp_path / "current"),))
    actual = system.available_bytes()
    assert actual == expected if expected is not None else actual > unlimited / 2


def test_a_driver_is_read_from_its_own_words(monkeypatch, tmp_path):
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (builder)\n"
    (tmp_path / "version").write_text(version)
    monkeypatch.setattr(system, "DRIVER", tmp_path / "version")
    assert system.nvidia_driver() == "570.133.20"


TELL = """
from llamaspec import load
llama = load("stories", context=64)
print("".join(token.text for token in llama.generate("Once upon a time", seed=7, max_new_tokens=8)))
"""
# The names that other systems lack are deleted before any of our modules is imported.
ELSEWHERE = """
import mmap, os
from pathlib import Path
del os.sched_getaffinity, mmap.MADV_HUGEPAGE
from llamaspec.model import system
for name in ("MEMORY", "PROCESSORS", "DRIVER", "MAPPINGS"):
    setattr(system, name, Path("/nowhere"))
system.CGROUPS, system.CACHES, system._libc = (), "/nowhere/{}", lambda function: None
"""


@pytest.mark.slow  # 11 s
def test_a_model_tells_the_same_without_linux():
    here, elsewhere = run_python(TELL), run_python(ELSEWHERE + TELL)
    assert elsewhere.code == 0, elsewhere.err
    assert elsewhere.out == here.out != ""


COMMANDS = """
import sys
from llamaspec import cli
for line in ("inspect", "tokens Once", "doctor", "lab list", "trace Once --layer 0",
             "verify add --candidate llamaspec.reference.add:add --arrays numpy --examples 3 --seed 1"):
    sys.argv[1:] = line.split()
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, line
"""


@pytest.mark.slow  # 17 s
def test_commands_run_without_linux():
    done = run_python(ELSEWHERE + COMMANDS)
    assert done.code == 0, done.err
    assert "within bounds add float32" in done.out and "ready" in done.out and "norm_logits" in done.out


ONLY_LINUX = re.compile(r"""["']/(proc|sys)/|\bsched_\w+|\bCDLL\b|\bMADV_HUGEPAGE\b|\bCLOCK_BOOTTIME\b""")
LIBRARY = ("reference", "verify", "pallas_kernels", "model", "serving", "training", "learn", "commands")


def test_what_depends_on_linux_is_in_one_file():
    files = [
        *(path for folder in LIBRARY for path in (REPOSITORY / folder).rglob("*.py")),
        *(REPOSITORY / "llamaspec").glob("*.py"),
    ]
    matches = {path.relative_to(REPOSITORY).as_posix() for path in files if ONLY_LINUX.search(path.read_text())}
    # clock.py runs in the Python of a candidate, which cannot import our modules. It calls the driver of CUDA, if any.
    assert matches == {"model/system.py", "verify/candidates/clock.py"}


SHRINKS = """
import os, sys
import numpy as np
from llamaspec.commands.interrupt import answered_at_once
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.staging import new_file
with answered_at_once(), new_file("out") as staged:
    array = MappedFile("weights").array(np.dtype("u1"), (1 << 20,), 0)
    os.truncate("weights", 5000)
    {}
"""


@pytest.mark.parametrize("touch", ["array.sum()", "bytes(array[8192:])", "array.copy()", "array.data.tobytes()"])
def test_a_file_that_becomes_shorter_while_it_is_copied_is_an_error(tmp_path, touch):
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    done = in_a_process(SHRINKS.format(touch), tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("error: weights: .*cut short.*\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


GOES_ON = """
import os, sys
import numpy as np
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.mapped import MappedFile, refused_if_cut_short
array = MappedFile("weights").array(np.dtype("u1"), (1 << 20,), 0)
try:
    with refused_if_cut_short():
        os.truncate("weights", 5000)
        {}
except CheckpointError as error:
    print(error)
with refused_if_cut_short():  # what is lost stays readable, and is no news
    print(array[:5000].min(), array[8192:].max())
print(MappedFile("weights").size)
"""


@pytest.mark.parametrize("touch", ["array.sum()", "raise ValueError(array[-1])"])
def test_a_program_outlives_a_file_that_becomes_shorter(tmp_path, touch):
    (tmp_path / "weights").write_bytes(b"\1" * (1 << 20))
    done = in_a_process(GOES_ON.format(touch), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    refused = "weights: was cut short while it was read: 5,000 bytes are left of 1,048,576"
    assert done.stdout.splitlines() == [refused, "1 0", "5000"]


@pytest.mark.parametrize("within", ["with refused_if_cut_short():", "if True:"])
def test_a_bus_error_of_another_file_ends_the_process_as_ever(tmp_path, within):
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    code = f"""
import mmap, os
from llamaspec.model.checkpoints.mapped import refused_if_cut_short
file = open("weights", "rb")
others = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
with refused_if_cut_short():
    pass
os.truncate("weights", 0)
{within}
    others[-1]
"""
    assert in_a_process(code, tmp_path).returncode == -signal.SIGBUS


LOADS = """
import os, sys
from llamaspec import load
def shorten(stage, share):
    if stage == "reading weights":
        os.truncate("model.safetensors", 100)
try:
    load(".", context=8, progress=shorten)
except ValueError as error:
    print(error)
"""


def test_loading_a_file_that_becomes_shorter_is_an_error_in_python(tmp_path):
    shutil.copy(REPOSITORY / "model" / "stories" / "tokenizer.model", tmp_path)
    write_checkpoint(tmp_path, FAMILIES["llama-2"] | {"vocab_size": 1024})
    done = in_a_process(LOADS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search("cut short.*100 bytes", done.stdout)


def in_a_process(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        **{"cwd": folder, "env": os.environ | {"PYTHONPATH": str(REPOSITORY)}, "capture_output": True, "text": True},
        timeout=PATIENCE,
    )
