"""Imports go one way: reference <- verify; pallas_kernels <- model <- serving, training, judge, learn <- commands.

The tests parse the source files, and run no code of the project.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.processes import REPOSITORY

PACKAGES = (
    *("reference", "verify", "pallas_kernels", "model", "serving", "training", "judge", "learn"),
    *("commands", "cli", "tests", "benchmarks"),
)
HEAVY = ("jax", "jaxlib", "numpy", "ml_dtypes", "hypothesis", "rich", "prompt_toolkit")


class Rule(NamedTuple):
    """A rule about imports in the files at or under `place`. A module name in the rule includes all its submodules."""

    place: str
    only: tuple[str, ...] = ()  # the only allowed imports; empty: any
    never: tuple[str, ...] = ()
    but: tuple[str, ...] = ()  # exceptions to `never`
    beside: tuple[str, ...] = ()  # files exempt from the rule
    at_once: bool = False  # True: the rule ignores imports inside functions


BENCHMARKS = ("benchmarks",)

# The parts of verify/, in order. Each imports only earlier ones: a contract never imports code that judges.
VERIFY = (
    *("bounds", "proof", "contract", "draws", "candidates", "mutant", "contracts", "mutants", "declare", "loose"),
    *("judging", "reports", "catalogue", "algebra", "adapt", "campaign", "kernelbench", "pytest"),
)


JAXPRS = ("equality", "jaxprs", "kernels")  # the files of verify/algebra that import jax


def _room(name: str) -> str:
    return f"verify/{name}.py" if (REPOSITORY / f"verify/{name}.py").is_file() else f"verify/{name}/"


RULES = [
    Rule("reference/", only=("reference", "numpy", "ml_dtypes", "jaxtyping", "regex", *sys.stdlib_module_names)),
    Rule(
        "verify/",
        only=(
            "verify",
            "reference",
            "hypothesis",
            "numpy",
            "ml_dtypes",
            "jaxtyping",
            "flint",
            *sys.stdlib_module_names,
        ),
        beside=tuple(f"verify/algebra/{name}.py" for name in JAXPRS),
    ),
    # These read a candidate's jaxpr. `verify` imports them only in the process of `verify.algebra.separate`.
    *(Rule(f"verify/algebra/{name}.py", only=("verify", "jax", "numpy", *sys.stdlib_module_names)) for name in JAXPRS),
    *(Rule(_room(name), never=tuple(f"verify.{later}" for later in VERIFY[n:])) for n, name in enumerate(VERIFY, 1)),
    # The candidate's Python runs these files; it has NumPy, but not this project.
    Rule("verify/candidates/worker.py", only=("numpy", *sys.stdlib_module_names)),
    Rule("verify/candidates/clock.py", only=("numpy", *sys.stdlib_module_names)),
    Rule("verify/candidates/kernelbench_calls.py", only=("numpy", *sys.stdlib_module_names)),
    Rule("pallas_kernels/", never=tuple(name for name in PACKAGES if name != "pallas_kernels")),
    Rule("model/", never=("cli", "commands", "verify", "tests", "benchmarks", "serving", "training", "judge", "learn")),
    Rule("training/", never=("cli", "commands", "verify", "tests", "benchmarks", "serving", "judge", "learn")),
    Rule("judge/", never=("cli", "commands", "tests", "benchmarks", "serving", "training", "learn")),
    # A drawing runs the scheduler and imports nothing that computes a model.
    Rule(
        "learn/",
        never=("cli", "commands", "tests", "benchmarks", "serving", "training", "judge"),
        but=("serving.request", "serving.scheduler"),
    ),
    Rule("serving/", never=tuple(name for name in PACKAGES if name not in ("reference", "model", "serving"))),
    # The scheduler's decisions need no device.
    Rule("serving/request.py", never=("jax", "jaxlib")),
    Rule("serving/pages.py", never=("jax", "jaxlib")),
    Rule("serving/scheduler.py", never=("jax", "jaxlib")),
    Rule(
        "model/",
        never=("reference",),
        # These hold constants, tables and formats, not layers.
        but=(
            *("reference.config", "reference.rope", "reference.byte_bpe", "reference.quantizers"),
            "reference.collectives",
        ),
        beside=("model/running/reference_backend.py",),
    ),
    # The model and its ops are written for one device, and run unchanged on several.
    Rule("model/forward.py", never=("model.parallel",)),
    Rule("model/ops/", never=("model.parallel",)),
    Rule("model/checkpoints/", never=("jax", "jaxlib")),  # files are read into NumPy arrays for any backend
    Rule("model/tokenizers/", never=("jax", "jaxlib")),
    Rule("benchmarks/", never=("cli", "commands", "tests")),
    # common <- suites <- audits, and common <- gates. `benchmarks.summary` reads the results of all.
    Rule("benchmarks/common/", never=BENCHMARKS, but=("benchmarks.common",)),
    Rule("benchmarks/suites/", never=BENCHMARKS, but=("benchmarks.common", "benchmarks.suites")),
    Rule("benchmarks/gates/", never=BENCHMARKS, but=("benchmarks.common", "benchmarks.gates")),
    Rule(
        "benchmarks/audits/",
        never=BENCHMARKS,
        but=("benchmarks.common", "benchmarks.suites", "benchmarks.audits"),
    ),
    Rule("commands/", never=("cli", "tests")),
    # The package itself: users' names from two packages, and the command line.
    Rule(
        "llamaspec/",
        only=(
            *("main", "start", "cli", "model.chat.chat", "model.llama", "model.options", "verify.pytest"),
            *sys.stdlib_module_names,
        ),
    ),
    Rule("llamaspec/", only=("main", "start", *sys.stdlib_module_names), at_once=True),
    Rule("llamaspec/start.py", only=tuple(sys.stdlib_module_names)),
    # `llamaspec --help` and `llamaspec VERB --help` answer at once.
    Rule(
        "commands/",
        never=(*HEAVY, *(name for name in PACKAGES if name != "commands")),
        but=("model.options",),  # model.options imports nothing else, by the next rule
        at_once=True,
    ),
    Rule("model/options.py", only=tuple(sys.stdlib_module_names)),
    # The table of weights and the families describe a model for every reader of it, so they do not need JAX.
    Rule("model/tensors.py", only=("reference.config", "numpy", "jaxtyping", *sys.stdlib_module_names)),
    Rule("model/famil", only=("model", "reference", *sys.stdlib_module_names)),
    Rule("model/famil", never=("model",), but=("model.family", "model.families", "model.tensors")),
    Rule(
        "cli.py",
        never=(*HEAVY, *(name for name in PACKAGES if name not in ("cli", "commands"))),
        at_once=True,
    ),
]


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def for_typing(node: ast.AST) -> bool:
    """Return whether only type checkers read a statement: `if TYPE_CHECKING:` without an else."""
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree: ast.AST, skip: Callable[[ast.AST], bool] = lambda node: False) -> Iterator[tuple[int, str]]:
    """Yield the line and full name of each import, even inside functions. Skip nodes for which `skip` returns True.

    The name of a relative import begins with its dots.
    """
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                package = "." * level + (f"{module}." if module else "")
                yield from ((node.lineno, package + alias.name) for alias in names)
            case _ if not skip(node):
                yield from imports(node, skip)


def runs_later(node: ast.AST) -> bool:
    """Return whether a statement's imports run later than the import of its module, for example in a function."""
    return isinstance(node, FUNCTIONS) or for_typing(node)


def among(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def short_imports(source: str, rule: Rule) -> Iterator[tuple[int, str]]:
    """Yield the imports that a rule applies to; our own modules appear without the prefix `llamaspec.`."""
    for line, name in imports(ast.parse(source), runs_later if rule.at_once else lambda node: False):
        yield line, name.removeprefix("llamaspec.")


def violations(path: str, source: str) -> list[str]:
    """List the forbidden imports of a file; `path` is relative to the repository's root, with slashes.

    >>> violations("model/forward.py", "from llamaspec import cli")
    ['model/forward.py:1 imports cli']
    """
    return sorted(
        f"{path}:{line} imports {name}"
        for rule in RULES
        if path.startswith(rule.place) and path not in rule.beside
        for line, name in short_imports(source, rule)
        if (rule.only and not among(name, rule.only)) or (among(name, rule.never) and not among(name, rule.but))
    )


def own_files() -> list[str]:
    """List every Python file of the project, without the links in llamaspec/."""
    files = [path.relative_to(REPOSITORY).as_posix() for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")]
    package = [
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "llamaspec").glob("*.py")
        if not path.is_symlink()
    ]
    return [*files, "cli.py", *package]


def test_imports_run_one_way():
    files = own_files()
    assert {"reference/rope.py", "tests/house/test_architecture.py", "cli.py", "llamaspec/start.py"} <= set(files)
    assert [
        wrong for file in files for wrong in violations(file, (REPOSITORY / file).read_text(encoding="utf-8"))
    ] == []


def module_name(path: str) -> str:
    """Return the import name of a file.

    >>> module_name("model/ops/__init__.py"), module_name("llamaspec/__init__.py"), module_name("cli.py")
    ('llamaspec.model.ops', 'llamaspec', 'llamaspec.cli')
    """
    parts = ("llamaspec", *Path(path).with_suffix("").parts)
    return ".".join(parts[path.startswith("llamaspec/") :]).removesuffix(".__init__")


def circle(sources: Mapping[str, str]) -> list[str]:
    """Find a circle of modules that import each other, even if only inside functions. Return [] if there is none.

    `sources` maps import names to source code. Imports that only type checkers see do not count.

    >>> circle({"a": "import b", "b": "def f():\\n    from a import f"})
    ['a', 'b', 'a']
    """
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for _, target in imports(ast.parse(source), for_typing):
            # `from package import name` imports the module `package.name` if there is one, else `package`.
            module = target if target in sources else target.rpartition(".")[0]
            if module in sources and module != name:
                graph[name].add(module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    sources = {module_name(file): (REPOSITORY / file).read_text(encoding="utf-8") for file in own_files()}
    assert {"llamaspec.cli", "llamaspec", "llamaspec.model.ops.gpu", "llamaspec.start"} <= set(sources)
    assert circle(sources) == []


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "import b", "b": "import c", "c": "import a"},
        {"a": "def f():\n    import b", "b": "def g():\n    if True:\n        from a import f"},
        {"p": "from p.m import x", "p.m": "from p import y"},
    ],
)
def test_a_circle_is_seen(sources):
    first, *_, last = circle(sources)
    assert first == last


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "import b", "b": "import c", "c": ""},
        {"a": "import b", "b": "if TYPE_CHECKING:\n    from a import f"},
        {"p": "", "p.m": "from p import n", "p.n": "import p"},
    ],
)
def test_no_circle_is_made_up(sources):
    assert circle(sources) == []


def test_only_the_command_that_trains_it_knows_the_corpus_of_the_built_in_model():
    files = [path for name in PACKAGES if name != "tests" for path in (REPOSITORY / name).rglob("*.py")]
    importing = {
        path.relative_to(REPOSITORY).as_posix()
        for path in files
        if path.parent != REPOSITORY / "training" / "stories"
        for _, name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if among(name, ("llamaspec.training.stories",))
    }
    assert importing == {"commands/train.py"}


def test_the_rooms_of_verify_are_all_in_order():
    rooms = {
        path.stem
        for path in (REPOSITORY / "verify").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert rooms - {"__init__"} == {*VERIFY}


def test_everything_of_ours_is_imported_by_one_name():
    """Imports use the prefix `llamaspec`.

    Without the prefix, Python would load a module twice: as `llamaspec.reference.rope` and as `reference.rope`.
    """
    short = {*PACKAGES} - {"tests"}
    for path in (
        path
        for name in PACKAGES
        for path in (*(REPOSITORY / name).rglob("*.py"), REPOSITORY / f"{name}.py")
        if path.is_file()
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert short.isdisjoint(name.partition(".")[0] for name in named), f"{path}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("reference/rope.py", "import jax.numpy as jnp"),
        ("reference/rope.py", "from llamaspec.model.llama import load"),
        ("reference/rope.py", "from .config import Config"),  # a relative import hides its target
        ("reference/rope.py", "def f():\n    if True:\n        import jax"),
        ("verify/contracts.py", "from llamaspec.pallas_kernels import rmsnorm"),
        ("verify/draws/draw.py", "from llamaspec.verify.judging.examination import Examination"),
        ("verify/contract.py", "from llamaspec.verify.contracts import softmax"),
        ("verify/judging/runner.py", "def f():\n    from llamaspec.verify.reports.report import counterexample"),
        ("verify/candidates/worker.py", "from llamaspec.verify.candidates.process import Process"),
        ("pallas_kernels/rmsnorm.py", "from llamaspec.reference.rmsnorm import rmsnorm"),
        ("model/forward.py", "from llamaspec import reference"),
        ("model/forward.py", "from llamaspec.reference import rmsnorm"),
        ("model/forward.py", "from llamaspec.reference.configuration import Config"),
        ("model/running/reference_backend.py", "from llamaspec import cli"),
        ("benchmarks/suites/gpu/suite.py", "from tests.support.strategies import Noise"),
        ("model/checkpoints/gguf/read.py", "from jax import numpy as jnp"),
        ("commands/chat.py", "import jax"),
        ("commands/chat.py", "from llamaspec.model.llama import load"),
        ("commands/chat.py", "def chat():\n    from llamaspec import cli"),
        ("model/llama.py", "from llamaspec.commands.progress import progress_bar"),
        ("model/tensors.py", "import jax"),
        ("model/tensors.py", "from llamaspec.model.weights.params import Params"),
        ("model/families/qwen3_moe.py", "import jax"),
        ("model/family.py", "from llamaspec.model.weights.params import Params"),
        ("model/llama.py", "from llamaspec.serving.request import Request"),
        ("serving/engine.py", "from llamaspec.pallas_kernels.attention_paged import attention_paged"),
        ("serving/scheduler.py", "import jax.numpy as jnp"),
        ("benchmarks/common/report.py", "from llamaspec.benchmarks.suites.gpu.suite import SuitePart"),
        ("benchmarks/suites/model_bench.py", "from llamaspec.benchmarks.audits.peers import markdown"),
        ("benchmarks/suites/model_bench.py", "def f():\n    from llamaspec.benchmarks.gates.sass import SassListing"),
        ("benchmarks/gates/checks.py", "from llamaspec.benchmarks.suites.gpu.suite import SuitePart"),
        ("benchmarks/audits/peers.py", "from llamaspec.benchmarks.gates.sass import SassListing"),
        ("benchmarks/common/report.py", "from llamaspec.benchmarks import summary"),
        ("llamaspec/__init__.py", "def main():\n    from llamaspec.serving.engine import BatchingEngine"),
        ("llamaspec/__init__.py", "from llamaspec.model.llama import load"),
        ("cli.py", "import numpy as np"),
        ("cli.py", "try:\n    from llamaspec.model.llama import load\nexcept ImportError:\n    pass"),
        ("cli.py", "class Command:\n    import jax"),
        ("cli.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import jax"),
    ],
)
def test_a_violation_is_seen(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("reference/rope.py", "import math\nimport numpy as np\nfrom llamaspec.reference import config"),
        (
            "model/forward.py",
            "import jax\nfrom llamaspec.reference.rope import Scaling\nfrom llamaspec.reference import config",
        ),
        ("model/running/reference_backend.py", "from llamaspec.reference.llama import forward"),
        ("cli.py", "import click\ndef main():\n    import jax\n    from llamaspec.model.llama import load"),
        ("cli.py", "if TYPE_CHECKING:\n    from llamaspec.model.llama import Llama"),
        ("serving/engine.py", "import jax\nfrom llamaspec.model.options import SamplingOptions"),
        ("cli.py", "from llamaspec.commands.output import fail"),
        (
            "commands/chat.py",
            "import click\nfrom llamaspec.commands.output import write\ndef chat():\n"
            "    from llamaspec.model.llama import load",
        ),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert violations(path, source) == []
