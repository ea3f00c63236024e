"""Commands change settings of their process; the Python library does not."""

import os
from pathlib import Path

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from llamaspec.model.running.process import FRACTIONS, MEMORY, prepare_process
from tests.support.processes import run_python

SETTINGS = (*MEMORY, "TF_CPP_MIN_LOG_LEVEL", "TF_CPP_MAX_VLOG_LEVEL")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove our settings from the environment for the duration of a test."""
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # makes monkeypatch restore the variable later
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("debug", [False, True])
def test_memory_is_taken_on_demand_and_xla_is_quiet(bare, debug):
    prepare_process(debug=debug)
    environment = {name: os.environ.get(name) for name in SETTINGS}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": None if debug else "3", "TF_CPP_MAX_VLOG_LEVEL": None if debug else "0"}
    memory = dict(zip(MEMORY, ("false", "0.92", None), strict=True))  # the third name is the old name of the second
    assert environment == memory | quiet


@pytest.mark.parametrize("ahead", [None, "", "false", "False", "0", "true", "1", "no"])
@pytest.mark.parametrize("fraction", [None, *FRACTIONS])
@pytest.mark.parametrize("other_fraction", [None, ""])
def test_a_memory_fraction_is_set_only_with_on_demand_allocation(bare, ahead, fraction, other_fraction):
    """A command sets a memory fraction only if JAX allocates on demand and the user has set no fraction.

    The test lets JAX's own code read the environment. That code refuses two fractions, and treats every value except
    for false and 0 as a request to preallocate memory.
    """
    for name in FRACTIONS if other_fraction == "" else ():
        bare.setenv(name, "")
    if ahead is not None:
        bare.setenv(MEMORY[0], ahead)
    if fraction:
        bare.setenv(fraction, "0.5")
    prepare_process()
    options = generate_pjrt_gpu_plugin_options()
    on_demand = ahead not in ("true", "1", "no")
    assert options["preallocate"] is not on_demand
    assert options.get("memory_fraction") == (0.5 if fraction else 0.92 if on_demand else None)


def test_a_users_own_settings_win(bare):
    for name in SETTINGS:
        bare.setenv(name, "1")
    prepare_process()
    assert [os.environ[name] for name in SETTINGS] == ["1"] * len(SETTINGS)


def test_to_import_and_load_leaves_the_environment_as_it_is():
    done = run_python("""
import os
before = dict(os.environ)
import warnings
show = warnings.showwarning
from llamaspec import load
llama = load("stories", context=16)
added = {name: value for name, value in os.environ.items() if before.get(name) != value}
import jax
print(sorted(added), jax.config.jax_compilation_cache_dir, warnings.showwarning is show)
""")
    assert done.code == 0, done.err
    # JAX sets its own log level at import.
    assert done.out.replace("'TF_CPP_MIN_LOG_LEVEL'", "").replace("'TPU_SKIP_MDS_QUERY'", "") == "[] None True\n", done


COMMAND = """
import os, sys
from llamaspec import cli
sys.argv[:] = ["llamaspec", *sys.argv[1:]]
try:
    cli.main()
finally:
    names = ("XLA_PYTHON_CLIENT_PREALLOCATE", "TF_CPP_MIN_LOG_LEVEL")
    print(*map(os.environ.get, names), file=sys.stderr)
"""


@pytest.mark.slow  # 3 to 10 s each
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_a_command_prepares_its_process_before_jax_is_imported(bare, tmp_path, debug):
    """A command sets the environment before it imports JAX, because JAX reads its log level when it is imported.

    Here the command is `eval`, which imports JAX while it reads the text.
    """
    text = tmp_path / "text"
    text.write_text("Once upon a time")
    done = run_python(COMMAND, "eval", "stories", "--text", str(text), *debug)
    assert done.code == 0, done
    assert done.err.splitlines()[-1] == ("false 1" if debug else "false 3")


COMPILE = """
import os
from pathlib import Path
from llamaspec.model.running.process import keep_compiled, prepare_process
prepare_process()
keep_compiled(Path(sys.argv[1]))
import jax, jax.numpy as jnp
def program(x):
    return jnp.sin(x) @ x
print(jax.jit(program)(jnp.eye(3)).sum())
"""


def entries(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in folder.glob("jit_program-*")}


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_program_that_was_cut_short_is_replaced_in_silence(tmp_path: Path, length: int):
    first = run_python(COMPILE, str(tmp_path))
    complete = entries(tmp_path)
    assert (first.code, first.err, len(complete)) == (0, "", 1), first
    (entry,) = tmp_path.glob("jit_program-*")
    entry.write_bytes(entry.read_bytes()[:length])
    again = run_python(COMPILE, str(tmp_path))
    assert (again.code, again.out, again.err) == (0, first.out, ""), again
    assert entries(tmp_path).keys() == complete.keys()
    assert abs(entry.stat().st_size - sum(complete.values())) < 100  # the length is the same up to the stored time


def test_other_warnings_are_shown(tmp_path: Path):
    done = run_python(COMPILE + "import warnings\nwarnings.warn('of something else')", str(tmp_path))
    assert done.err.count("\n") >= 1 and "UserWarning: of something else" in done.err
