"""Facts of the tree: how docstrings open, how long files are, and that imports have no cycle."""

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache

from tests.support.processes import REPOSITORY

MEDIAN_LINES = 120
LONG = 350  # lines: a longer file needs a reason
REASONS = {
    "pallas_kernels/parts/integer_mma.py": "one product on the tensor cores' integers, for every form of codes",
    "tests/model/ops/test_ops_choice.py": "every reason for which an op is a kernel or is not",
    "tests/support/families.py": "one model of each family, as files",
    "tests/benchmarks/test_bench.py": "one command",
    "tests/benchmarks/test_bench_gpu.py": "one command, on a GPU",
    "tests/benchmarks/test_gpu_compile.py": "gates, on machine code written by hand",
    "tests/model/parallel/on_devices.py": "what a process with several devices computes: one table of cases each",
    "tests/commands/test_cli.py": "every command, as a person calls it",
    "tests/commands/test_interrupts.py": "Ctrl-C in every phase of every command",
    "tests/model/test_generation.py": "sessions on both backends held to the same laws",
    "tests/training/test_training.py": "one loop, from its data to its weights",
    "tests/model/quantize/test_calibration.py": "three methods held to the same laws",
    "tests/training/test_corpus.py": "one grammar, from its choices to its tokens",
    "tests/model/chat/test_chat.py": "conversations under every template",
    "tests/model/checkpoints/test_quantized_checkpoints.py": "four layouts held to the same laws",
    "tests/model/tokenizers/test_tokenizers.py": "four kinds of tokenizers held to the same laws",
    "tests/verify/test_verify_cli.py": "one command",
    "training/stories/lexicon.py": "words of the grammar: data",
    "training/stories/outside.py": "questions from outside the stories: data",
    "training/stories/phrases.py": "what people say: data",
    "training/stories/plots.py": "plots of the grammar: data",
    "verify/carried.py": "one proof, an operation of NumPy at a time",
    "verify/contracts/attention.py": "attention over sequences, caches and pages: one bound",
    "verify/running_error.py": "one proof, from a rounding to a whole block",
    "verify/worker.py": "one file, since it runs where nothing of this project is installed",
    "verify/mutants/attention.py": "wrong kernels of one op: data",
    "verify/mutants/fused.py": "wrong kernels of the fused ops: data",
    "verify/mutants/quantized.py": "wrong kernels of one op: data",
}
UNCLEAR = re.compile(r"(What|Of|Which|Where|Those|The same)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def sources() -> dict[str, str]:
    """Python files of the repository by path, without hidden and generated folders."""
    generated, ours = {"build", "dist", "__pycache__"}, []
    for folder, folders, files in REPOSITORY.walk():
        folders[:] = [name for name in folders if name not in generated and not name.startswith(".")]  # not entered
        ours += [folder / name for name in files if name.endswith(".py") and not name.startswith(".")]
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ours)}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree and the statements in it, whose expressions hold no docstring."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield from statements(node)


def unclear_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and first line of each docstring that opens with an unclear word."""
    for node in statements(parsed(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) and UNCLEAR.match(text):
            yield node.body[0].lineno, text.splitlines()[0]


def test_docstrings_open_with_a_verb_or_a_noun_phrase():
    assert [
        f"{path}:{at} {text}" for path, source in sources().items() for at, text in unclear_docstrings(source)
    ] == []


def test_an_unclear_docstring_is_seen():
    source = '"""What it is."""\nclass A:\n    """Those that count."""\n    def f():\n        """Whatever is."""'
    within = '\nif A:\n    try:\n        def g():\n            """Which is within."""\n    finally:\n        pass'
    assert [line for line, _ in unclear_docstrings(source + within)] == [1, 3, 9]


def module(path: str) -> str:
    """Name the module of a file, as it is imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith(("llamaspec", "tests", "docs")) else f"llamaspec.{name}"


def imported(source: str, modules: set[str]) -> Iterator[str]:
    """The modules of ours that a file imports when it is imported itself, apart from its functions."""
    for node in at_import(parsed(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in modules)
            case ast.ImportFrom(module=str(package), names=names, level=0):
                inside = [f"{package}.{alias.name}" for alias in names]
                yield from (name if name in modules else package for name in inside if {name, package} & modules)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case _:
                yield node
                yield from at_import(node)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of a graph, from one node back to itself; empty if there is none.

    >>> cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    ['b', 'c', 'b']
    """
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for other in sorted(graph.get(node, ())):
                if found := visit(other, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_imports_have_no_cycle():
    files = {module(path): source for path, source in sources().items()}
    assert cycle({name: {*imported(source, {*files})} - {name} for name, source in files.items()}) == []


def test_a_cycle_is_seen():
    files = {"a": "from a import b", "a.b": "import a.c", "a.c": "def f():\n    import a.b\nfrom a.b import x"}
    assert cycle({name: {*imported(source, {*files})} for name, source in files.items()}) == ["a.b", "a.c", "a.b"]


def test_half_of_the_files_are_short():
    assert statistics.median(source.count("\n") for source in sources().values()) < MEDIAN_LINES


def test_a_long_file_has_a_reason():
    long = {path for path, source in sources().items() if source.count("\n") > LONG}
    assert long == {*REASONS}
    assert all(REASONS.values())
