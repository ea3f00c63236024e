"""The Python side of the tab: definitions to edit, exercises, verdicts and stories.

The page's worker calls `answer` with a request in JSON. Everything here also runs outside a browser, as tests do.
"""

import inspect
import json
import pickle
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import llamaspec.reference
from llamaspec.learn.lab import built_in
from llamaspec.learn.lab.check import EXAMPLES, check, solution
from llamaspec.learn.lab.folder import ALL, KERNEL, kernel, narrowings
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.reports.listing import describe
from llamaspec.verify.reports.report import counterexample

# Ops of a plain Llama: each definition below has a contract, and is a step of the built-in model.
OPS = ("rmsnorm", "softmax", "rope_halves", "attention_weights", "swiglu", "linear", "embedding", "add")
DRAWS, SECONDS = 200, 20.0  # limits for the verdict on an edited definition
EVERY = 10  # examples between two reports of progress

Send = Callable[[dict], object]  # sends a message to the page


def answer(request: str, send: Callable[[str], object]) -> None:
    """Do what the page asks for; `send` passes messages, in JSON, to the page."""
    fields = json.loads(request)

    def message(content: dict) -> None:
        send(json.dumps(content))

    REQUESTS[fields.pop("do")](**fields, send=message)


def contents(send: Send) -> None:
    """List the definitions and the exercises."""
    send(
        {
            "definitions": [{"op": op, "file": _path(op), "source": inspect.getsource(_module(op))} for op in OPS],
            "exercises": [
                {"number": exercise.number, "chapter": exercise.chapter, "title": exercise.title}
                for exercise in ALL.values()
            ],
        }
    )


def exercise(number: int, send: Send) -> None:
    """Send the kernel of an exercise, its contract, its hint and its solution."""
    chosen = ALL[number]
    lines = describe(CONTRACTS[chosen.op], []) if chosen.op else []
    lines += [f"This exercise draws only {name}={values}." for name, values in narrowings(chosen).items()]
    texts = {"hint": chosen.hint, "solution": "\n".join(solution(chosen)), "contract": "\n".join(lines)}
    send({"exercise": number, "title": chosen.title, "source": kernel(chosen), **texts})


def check_exercise(number: int, source: str, send: Send) -> None:
    """Check the source of an exercise's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / KERNEL).write_text(source, encoding="utf-8")
        try:
            result = check(ALL[number], Path(folder), progress=_progress(send, EXAMPLES), in_process=True)
            solved, lines = result.solved, [line for line in result.lines if line]
        except ImportError as error:
            solved, lines = False, [str(error)]
        send({"solved": solved, "lines": [line.replace(f"{folder}/", "") for line in lines]})


def verify_definition(op: str, source: str, send: Send) -> None:
    """Verify an edited definition: draw inputs in float32, and compare with the definition of the specification."""
    contract = CONTRACTS[op]
    try:
        with edited(_module(op).__name__, source) as changed:
            function = getattr(changed, op)
    except Exception as error:
        send({"solved": False, "lines": [f"{_path(op)} cannot be imported: {type(error).__name__}: {error}"]})
        return

    def candidate(*arguments: Any, **options: Any) -> Any:
        return _in_float32(function(*arguments, **options))

    report = verify(
        contract,
        Direct(candidate, name=f"{_path(op)}:{op}"),
        precision=precision("float32"),
        examples=DRAWS,
        seed=0,
        seconds=SECONDS,
        progress=_progress(send, DRAWS)(op),
    )
    send({"solved": report.outcome == "within bounds", "lines": counterexample(report, contract, advice=False)})


def tell(op: str, source: str, prompt: str, tokens: int, send: Send) -> None:
    """Continue `prompt` with the built-in model, whose definition has the edited `source`. Sends each token's text."""
    stored = built_in.exported()
    imported = False
    try:
        with edited(_module(op).__name__, source):
            llama, pieces = (import_module(f"llamaspec.reference.{name}") for name in ("llama", "sentencepiece_bpe"))
            model = pickle.loads(stored)  # parameters of the second copy
            imported = True
            ids = [model.start, *pieces.encode(prompt, model.vocabulary)]
            text, count, begin = pieces.decode(ids, model.vocabulary), 0, perf_counter()
            send({"text": text})
            for token in islice(llama.greedy(model.params, np.array(ids), config=model.config), tokens):
                if token in model.stops:
                    break
                ids.append(token)
                count += 1
                text, before = pieces.decode(ids, model.vocabulary), text
                send({"text": text.removeprefix(before), "tokens": count, "rate": count / (perf_counter() - begin)})
            send({"story": text})
    except Exception as error:
        failed = "The model stopped" if imported else f"{_path(op)} cannot be imported"
        send({"lines": [f"{failed}: {type(error).__name__}: {error}"]})


REQUESTS: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (contents, exercise, check_exercise, verify_definition, tell)
}


@contextmanager
def edited(name: str, source: str) -> Iterator[types.ModuleType]:
    """Import `llamaspec.reference` a second time, with `source` in the place of the module `name`.

    Inside the block, imports give the second copy; yields its edited module. The first copy is then restored.
    """
    package = "llamaspec.reference"
    first = {key: module for key, module in sys.modules.items() if key.startswith(package)}
    for key in first:
        del sys.modules[key]
    try:
        import_module(package)
        module = types.ModuleType(name)
        module.__file__ = str(first[name].__file__)
        sys.modules[name] = module
        exec(compile(source, module.__file__, "exec"), module.__dict__)
        yield module
    finally:
        for key in [key for key in sys.modules if key.startswith(package)]:
            del sys.modules[key]
        sys.modules.update(first)
        llamaspec.reference = first[package]  # an import sets this attribute, too


def _module(op: str) -> types.ModuleType:
    return sys.modules[CONTRACTS[op].definition.__module__]


def _path(op: str) -> str:
    """Return the file of an op's definition.

    >>> _path("rope_halves")
    'reference/rope.py'
    """
    return _module(op).__name__.removeprefix("llamaspec.").replace(".", "/") + ".py"


def _in_float32(result: Any) -> Any:
    """Round a definition's result, or each of several, as the contract expects for inputs in float32."""
    if isinstance(result, tuple):
        return tuple(_in_float32(part) for part in result)
    return result.astype(np.float32) if getattr(result, "dtype", None) == np.float64 else result


def _progress(send: Send, total: int) -> Callable[..., Callable[[int], None]]:
    def stage(*_: object) -> Callable[[int], None]:
        def done(examples: int) -> None:
            if examples % EVERY == 0:
                send({"examples": examples, "of": total})

        return done

    return stage
