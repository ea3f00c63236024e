"""Common test setup: JAX on the CPU, Hypothesis's profiles, and external data from LLAMASPEC_DATA only."""

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.shape_checks import check_shapes
from tests.support.browser import started_browser
from tests.support.strategies import EXAMPLES

check_shapes()

# JAX reads this when it is imported. Tests of the GPU set it for their processes.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# An interpreted kernel calls back into Python, which runs further JAX programs. If the kernel holds all of XLA's
# threads, as it can on two cores, those programs wait forever. NPROC sets the number of threads, by default one a core;
# with 1 the tests of whole models always hang, with 2 sometimes.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "0")
os.environ["NPROC"] = "16"
# NumPy's BLAS starts a thread per core in each process, and these threads wait for each other in busy loops: with two
# workers on two cores the references' products take twice the processor time. Workers and child processes inherit this.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A kernel refuses by an exception, and JAX then compares the file of each frame of the traceback with its own files.
# That was half of the time of tests with many refusals.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# `nohup make test &` starts this process with SIGINT ignored, but tests of Ctrl-C need Python's handler, here and in
# child processes.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` mostly waits for compilers, so LLVM optimizes little in it, also in child processes. XLA's own passes run
# as usual. `make test-all` optimizes everything.
if os.environ.get("HYPOTHESIS_PROFILE") == "brief":
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# Without bytecode files, a hundred processes (the workers, and those that tests start) would compile the same modules
# again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# We set no deadline, since the first call of every new shape compiles. We do not limit the time of draws either:
# Hypothesis uses a wall clock, and the machine may be busy. We skip Hypothesis's explain phase, which repeats a failure
# many more times. CI draws the same examples every time, so that a failure comes from the change and not from luck;
# other runs draw new examples.
settings.register_profile(
    "quick",
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    phases=set(Phase) - {Phase.explain},
)
settings.register_profile("brief", parent=settings.get_profile("quick"), max_examples=5)  # used by `make test`
settings.register_profile(
    "thorough", max_examples=500, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Collection creates a million objects that stay, and every pass of the garbage collector would visit them again.
gc.disable()
NEEDS_DATA = "needs outside data: set LLAMASPEC_DATA"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long and rarely finds anything; `make test-all` runs it")
    config.addinivalue_line(
        "markers", "sampled(count, first=False): all cases are slow except `count`, spread evenly or the first ones"
    )
    if config.getoption("dist", "no") == "no":  # this process collects and runs tests
        # While jaxtyping's hook imports a module of ours, Python compiles the modules that it imports, even if bytecode
        # exists. So we import the largest external packages before any of ours.
        for package in ("beartype", "jax.experimental.pallas.mosaic_gpu", "optax", "aiohttp.web"):
            if importlib.util.find_spec(package.partition(".")[0]):
                importlib.import_module(package)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the mark `slow` to the test cases that a mark `sampled` leaves out.

    In the test files, a comment after a mark `sampled` or `slow` states the processor time in seconds.
    """
    names = [item.nodeid.partition("[")[0] for item in items]
    totals, places = Counter(names), Counter()
    for item, name in zip(items, names, strict=True):
        sampled = item.get_closest_marker("sampled")
        if sampled and not is_sampled(places[name], totals[name], *sampled.args, **sampled.kwargs):
            item.add_marker(pytest.mark.slow)
        places[name] += 1


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def is_sampled(place: int, total: int, count: int, *, first: bool = False) -> bool:
    """Return whether the case at index `place` of `total` is one of the `count` cases that `make test` runs.

    >>> [is_sampled(place, 4, 2) for place in range(4)]
    [True, False, True, False]
    >>> [is_sampled(place, 4, 2, first=True) for place in range(4)]
    [True, True, False, False]
    """
    return (place if first else place * count % total) < count


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory) -> Path:
    """Use a temporary folder instead of the user's cache for compiled programs and command histories.

    Compilation takes most of the tests' time. So all pytest workers, and the commands that tests start, share one
    folder of compiled programs. JAX loads a program from this folder if another process has compiled it; results are
    the same bit for bit.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder, own_folder = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    compiled = (own_folder.parent if "PYTEST_XDIST_WORKER" in os.environ else own_folder) / "compiled"
    compiled.mkdir(exist_ok=True)
    (folder / "llamaspec").mkdir()
    (folder / "llamaspec" / "compiled").symlink_to(compiled)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX may have compiled during collection, and decided to keep nothing
    return folder


@pytest.fixture(scope="module")
def workers_stay() -> Iterator[None]:
    """Let the tests of a file reuse the processes that render chat templates, as a server does."""
    from llamaspec.model.chat.template_process import Workers

    workers = Workers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamaspec.model.chat.template.Workers", lambda: workers)
        patch.setattr("llamaspec.model.chat.template.closing", nullcontext)
        yield
    workers.close()


@pytest.fixture(scope="module")  # not longer: while it runs, no other test can run an event loop
def browser():
    """Start Chromium; skip the test if there is none."""
    with started_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder that LLAMASPEC_DATA names; skip the test if the variable is unset.

    The folder has models that we may not redistribute.
    """
    if not os.environ.get("LLAMASPEC_DATA"):
        pytest.skip(NEEDS_DATA)
    folder = Path(os.environ["LLAMASPEC_DATA"]).resolve()
    assert folder.is_dir(), f"LLAMASPEC_DATA names {folder}, which is no folder"
    return folder


@pytest.fixture
def tmp_path(tmp_path_factory) -> Path:
    """Return an empty folder with a name that does not contain the name of the test.

    Error messages begin with a file's path. pytest's own folder is named after the test and its case, so it often
    contains the words that the test expects in the message. The test would then pass even if the message itself lacks
    them.
    """
    return tmp_path_factory.mktemp("case")


@pytest.fixture
def unchecked(monkeypatch) -> None:
    """Turn off run-time checks of shapes, so that our own code must refuse an argument.

    Users do not have these checks.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if NEEDS_DATA in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} skipped without outside data: LLAMASPEC_DATA is unset")


@pytest.fixture
def run(monkeypatch, capfd, tmp_path_factory, caches):
    """Return a function that runs a command in this process, and returns the exit code, stdout and stderr.

    Each test gets new caches, but all tests share the folder of compiled programs.
    """
    from llamaspec import cli  # not sooner: see pytest_configure

    own, shared = (folder / "llamaspec" for folder in (tmp_path_factory.mktemp("cache"), caches))
    own.mkdir()
    (own / "compiled").symlink_to(shared / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own.parent))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["llamaspec", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return run
