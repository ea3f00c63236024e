"""Writes the files of an exercise: a kernel, its test, and a README with the task."""

import ast
import inspect
import re
import sys
from pathlib import Path

from llamaspec.learn.lab.broken import EXERCISES
from llamaspec.learn.lab.exercise import Broken, Exercise
from llamaspec.learn.lab.own import exercises as own_exercises
from llamaspec.verify import mutant
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.reports.listing import describe

KERNEL, TEST, README = "kernel.py", "test_kernel.py", "README.md"
ALL: dict[int, Exercise] = {exercise.number: exercise for exercise in (*EXERCISES, *own_exercises(len(EXERCISES) + 1))}
HELPERS = ("bf16", "e4m3", "f16", "f32", "spans", "full_spans")  # functions of verify.mutant that the kernels call


def exercise(number: int) -> Exercise:
    """Return the exercise with this number. Raises ValueError for an unknown number."""
    if number not in ALL:
        raise ValueError(f"expected the number of an exercise from 1 to {len(ALL)}, got {number}")
    return ALL[number]


def name_of(number: int) -> str:
    """Return the name of the folder of an exercise.

    >>> name_of(7)
    'lab-07'
    """
    return f"lab-{number:02d}"


def function_of(exercise: Exercise) -> str:
    """Return the name of the function to repair or to write."""
    return exercise.op if isinstance(exercise, Broken) else exercise.name


def write(exercise: Exercise, folder: Path) -> None:
    """Make the folder of an exercise, completely or not at all. Raises CheckpointError if the folder exists already."""
    from llamaspec.model.checkpoints.staging import new_directory  # here, since a browser tab writes no folders

    texts = {KERNEL: kernel(exercise), TEST: test(exercise), README: readme(exercise)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_directory(folder) as staged:
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")


def kernel(exercise: Exercise, *, solved: bool = False) -> str:
    """Return the source of kernel.py: the exercise, or its solution."""
    if not isinstance(exercise, Broken):
        return f'"""{exercise.title}"""\n\nimport numpy as np\n\n\n{exercise.skeleton}'
    source = exercise.implementation.text(None if solved else exercise.change)
    return f'"""{exercise.title}"""\n\n{_preamble(exercise, source)}\n\n{source}'


def _preamble(exercise: Broken, source: str) -> str:
    """Collect the imports, constants and functions of the kernel's module that `source` uses."""
    module = ast.parse(inspect.getsource(sys.modules[exercise.implementation.function.__module__]))
    named = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    imports: list[str] = []
    parts: list[str] = []
    for node in reversed(module.body):  # a name is defined before its use
        defined = set()
        if isinstance(node, ast.Assign):
            defined = {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef) and node.name != exercise.op:
            defined = {node.name}
        elif isinstance(node, ast.ImportFrom) and node.module != mutant.__name__:
            if names := [alias.name for alias in node.names if alias.name in named]:
                imports.append(f"from {node.module} import {', '.join(names)}")
        if defined & named:
            parts.append(ast.unparse(node))
            named |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    if helpers := [name for name in HELPERS if name in named]:  # the wrong line may use one that the module does not
        imports.append(f"from {mutant.__name__} import {', '.join(helpers)}")
    above = ["import numpy as np", *(["", *imports] if imports else [])]
    return "\n".join(above) + "\n" + "".join(f"\n{text}\n" for text in reversed(parts))


def test(exercise: Exercise) -> str:
    """Return the source of a pytest test that gives the same verdict as `lab check`."""
    function = function_of(exercise)
    if not exercise.op:
        return (
            f'"""Run by pytest in this folder."""\n\nfrom kernel import {function}\n\n'
            f"from llamaspec.learn.lab.folder import exercise\n\n\ndef test_{function}():\n"
            f"    assert exercise({exercise.number}).judge({function}) is None\n"
        )
    draws = "".join(f", {name}={list(values)!r}" for name, values in narrowings(exercise).items())
    return (
        f'"""Run by pytest in this folder."""\n\nimport kernel\nfrom llamaspec.verify.pytest import contract\n\n\n'
        f'@contract("{exercise.op}", arrays="numpy", examples=1000{draws})\n'
        f"def test_{function}(*arguments, **options):\n    return kernel.{function}(*arguments, **options)\n"
    )


def narrowings(exercise: Exercise) -> dict[str, list]:
    """Return the values that the kernel supports, by argument name.

    Arguments for which it supports all values of the contract are left out.
    """
    chosen = dict(exercise.only) if not isinstance(exercise, Broken) else exercise.implementation.only
    return {name: list(values) for name, values in chosen.items()}


def readme(exercise: Exercise) -> str:
    """Return the text of the README, which describes the fault and the task."""
    task = "One line of kernel.py is wrong. Find it." if isinstance(exercise, Broken) else "Fill in kernel.py."
    contract = "\n".join(describe(CONTRACTS[exercise.op], [])) if exercise.op else ""
    called = f"\nThe contract:\n\n```\n{contract}\n```\n" if contract else ""
    narrowed = [f"`{name}` is {' or '.join(map(str, values))}" for name, values in narrowings(exercise).items()]
    if narrowed:
        called += f"\nIn this exercise, the contract draws only these values: {' and '.join(narrowed)}.\n"
    if isinstance(exercise, Broken) and (
        helpers := [name for name in HELPERS if re.search(rf"\b{name}\b", kernel(exercise))]
    ):
        called += "\nThe helpers of the kernel:\n\n" + "".join(f"- {_usage(name)}\n" for name in helpers)
    if not isinstance(exercise, Broken) and exercise.judge is not None:
        called += f"\nHow your function is judged: {inspect.getdoc(exercise.judge)}\n"
    return (
        f"# Exercise {exercise.number}: {exercise.title}\n\n{task} In the folder above this one,\n"
        f"`llamaspec lab check {exercise.number}` checks it, `llamaspec lab hint {exercise.number}` prints a hint,\n"
        f"`llamaspec lab solution {exercise.number}` prints the solution.\n{called}"
    )


def _usage(helper: str) -> str:
    """Return how a helper of a kernel is called, with the first line of its docstring.

    >>> _usage("spans")
    '`spans(length, block)`: Cut range(`length`) into slices of `block` elements. The last slice may be shorter.'
    """
    function = getattr(mutant, helper)
    arguments = ", ".join(inspect.signature(function).parameters)
    return f"`{helper}({arguments})`: {(inspect.getdoc(function) or '').splitlines()[0]}"
