"""The files of an exercise: a kernel, its test, and what to do."""

import ast
import inspect
import re
import sys
from pathlib import Path

from llamaspec.learn.lab.broken import EXERCISES
from llamaspec.learn.lab.exercise import Broken, Exercise
from llamaspec.learn.lab.own import exercises as own_exercises
from llamaspec.model.checkpoints.staging import new_directory
from llamaspec.verify import mutant
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.reports.listing import describe

KERNEL, TEST, README = "kernel.py", "test_kernel.py", "README.md"
ALL: dict[int, Exercise] = {exercise.number: exercise for exercise in (*EXERCISES, *own_exercises(len(EXERCISES) + 1))}
HELPERS = ("bf16", "f16", "f32", "spans", "whole")  # of verify.mutant


def exercise(number: int) -> Exercise:
    """Look up an exercise. Raises ValueError for a number that there is not."""
    if number not in ALL:
        raise ValueError(f"there are exercises 1 to {len(ALL)}: got {number}")
    return ALL[number]


def name_of(number: int) -> str:
    """Name the folder of an exercise.

    >>> name_of(7)
    'lab-07'
    """
    return f"lab-{number:02d}"


def function_of(one: Exercise) -> str:
    """Name the function that is mended or written."""
    return one.op if isinstance(one, Broken) else one.name


def write(one: Exercise, folder: Path) -> None:
    """Make the folder of an exercise, whole or not at all. Raises CheckpointError where it is: it may hold work."""
    texts = {KERNEL: kernel(one), TEST: test(one), README: readme(one)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(folder) as staged:
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")


def kernel(one: Exercise, *, solved: bool = False) -> str:
    """Give the text of the kernel, as it is handed out or mended."""
    if not isinstance(one, Broken):
        return f'"""{one.title}"""\n\nimport numpy as np\n\n\n{one.skeleton}'
    source = one.implementation.text(None if solved else one.change)
    return f'"""{one.title}"""\n\n{_preamble(one, source)}\n\n{source}'


def _preamble(one: Broken, source: str) -> str:
    """Collect the imports, constants and functions of the module that the text of a kernel uses."""
    module = ast.parse(inspect.getsource(sys.modules[one.implementation.function.__module__]))
    named = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    kept: list[str] = []
    for node in reversed(module.body):  # what is used stands before its use
        defined = set()
        if isinstance(node, ast.Assign):
            defined = {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef) and node.name != one.op:
            defined = {node.name}
        if defined & named:
            kept.append(ast.unparse(node))
            named |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    helpers = [name for name in HELPERS if name in named]
    imports = ["import ml_dtypes"] if "ml_dtypes" in named else []
    imports += ["import numpy as np"]
    if helpers:
        imports += ["", f"from llamaspec.verify.mutant import {', '.join(helpers)}"]
    return "\n".join(imports) + "\n" + "".join(f"\n{text}\n" for text in reversed(kept))


def test(one: Exercise) -> str:
    """Give the text of a test for pytest, which says what `lab check` says."""
    function = function_of(one)
    if not one.op:
        return (
            f'"""Run by pytest in this folder."""\n\nfrom kernel import {function}\n\n'
            f"from llamaspec.learn.lab.folder import exercise\n\n\ndef test_{function}():\n"
            f"    assert exercise({one.number}).judge({function}) is None\n"
        )
    draws = "".join(f", {name}={list(values)!r}" for name, values in only(one).items())
    return (
        f'"""Run by pytest in this folder."""\n\nimport kernel\nfrom llamaspec.verify.pytest import contract\n\n\n'
        f'@contract("{one.op}", arrays="numpy", examples=1000{draws})\n'
        f"def test_{function}(*arguments, **options):\n    return kernel.{function}(*arguments, **options)\n"
    )


def only(one: Exercise) -> dict[str, list]:
    """Narrow the draws of the contract to those that the kernel is made for."""
    chosen = dict(one.only) if not isinstance(one, Broken) else one.implementation.only
    return {name: list(values) for name, values in chosen.items()}


def readme(one: Exercise) -> str:
    """Give the text that says what is wrong and what to do."""
    task = "One line of kernel.py is wrong. Find it." if isinstance(one, Broken) else "Fill in kernel.py."
    contract = "\n".join(describe(CONTRACTS[one.op], [])) if one.op else ""
    called = f"\nThe contract:\n\n```\n{contract}\n```\n" if contract else ""
    narrowed = [f"`{name}` is {' or '.join(map(str, values))}" for name, values in only(one).items()]
    if narrowed:
        called += f"\nHere only draws are made in which {' and '.join(narrowed)}.\n"
    if isinstance(one, Broken) and (helpers := [name for name in HELPERS if re.search(rf"\b{name}\b", kernel(one))]):
        called += "\nThe helpers of the kernel:\n\n" + "".join(f"- {_usage(name)}\n" for name in helpers)
    if not isinstance(one, Broken) and one.judge is not None:
        called += f"\nThe judge: {inspect.getdoc(one.judge)}\n"
    return (
        f"# Exercise {one.number}: {one.title}\n\n{task} In the folder above this one,\n"
        f"`llamaspec lab check {one.number}` judges it, `llamaspec lab hint {one.number}` helps,\n"
        f"`llamaspec lab solution {one.number}` tells.\n{called}"
    )


def _usage(helper: str) -> str:
    """Show how a helper of a kernel is called, and the first line of its docstring.

    >>> _usage("spans")
    '`spans(length, block)`: Cut a loop over `length` into blocks, the last one shorter.'
    """
    function = getattr(mutant, helper)
    arguments = ", ".join(inspect.signature(function).parameters)
    return f"`{helper}({arguments})`: {(inspect.getdoc(function) or '').splitlines()[0]}"
