"""Llama in JAX, and a verifier for kernels: the one name to import.

Generate text. `load` takes a Hugging Face directory, a GGUF file, a file of llama2.c, or `stories`, the model that
comes with the package:

    from llamaspec import SamplingOptions, load

    llama = load("stories")
    prompt = "Once upon a time"
    print(prompt, end="")
    for token in llama.generate(prompt, max_new_tokens=100, sampling=SamplingOptions(temperature=0.5), seed=7):
        print(token.text, end="", flush=True)
    print()

Look inside. `logits` takes ids, and gives a row for each:

    ids = llama.encode(prompt)
    likeliest = llama.logits(ids)[-1].argmax()
    print(llama.decode([*ids, int(likeliest)]))

Chat. Each `reply` computes the new tokens alone:

    from llamaspec import Chat

    chat = Chat(llama)
    for question in ("Tell me a story about a fox.", "What color is the fox?"):
        chat.make_room(question, answer=256)  # forgets the oldest turns, where the context is nearly full
        print("".join(token.text for token in chat.reply(question, seed=7)))

Verify a kernel, as a test that pytest finds:

    from llamaspec import contract

    @contract("softmax")
    def test_softmax(x):
        return my_kernels.softmax(x)

`python -m llamaspec` runs the command line. Importing this module is quick: JAX is imported by the first use of a name
that needs it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` would be imported before `main` answers Ctrl-C
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from model.chat.chat import Chat
    from model.llama import Llama, load
    from model.options import SamplingOptions
    from verify.pytest import contract

__all__ = ["Chat", "Llama", "SamplingOptions", "contract", "load"]

HOMES = {
    "Chat": "model.chat.chat",
    "Llama": "model.llama",
    "SamplingOptions": "model.options",
    "contract": "verify.pytest",
    "load": "model.llama",
}
LIBRARY = ("model", "pallas_kernels", "reference")  # packages that a model needs
ONLY_FOR = {  # further packages, by the word on the command line that needs them
    "bench": ("benchmarks",),
    "inspect": ("benchmarks",),
    "profile": ("benchmarks",),
    "serve": ("serving",),
    "train": ("training",),
    "verify": ("verify",),
    "--html": ("benchmarks",),
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'llamaspec' has no attribute {name!r}")
    from importlib import import_module

    home = HOMES[name]
    refuse_hidden("reference", "verify") if home.startswith("verify.") else refuse_hidden(*LIBRARY)
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def refuse_hidden(*packages: str) -> None:
    """Raise ImportError, in one line, where another file comes before one of our top-level modules or packages.

    Their names are plain words. Python looks for them in the folder of the script first, or in the current folder, and
    a person's own `model.py` there would be imported instead of our `model`.
    """
    from importlib.util import find_spec
    from pathlib import Path

    ours = Path(__file__).resolve().parent
    for name in packages:
        if name in sys.modules:
            found = getattr(sys.modules[name], "__file__", None)
        else:
            spec = find_spec(name)
            found = spec.origin if spec else None
        if found and Path(found).resolve() not in (ours / f"{name}.py", ours / name / "__init__.py"):
            place = Path(found)
            place = place.parent if place.name == "__init__.py" else place
            raise ImportError(f"{place} hides the {name} of llamaspec: rename it, or start Python in another folder")


def main() -> NoReturn:
    """Run the command line. See `cli.main` for exit codes."""
    try:
        import signal

        # `run` answers signals in its own way, once it and what it needs are imported. Ignored ones stay so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, leave)
        needed = [package for word in sys.argv[1:] for package in ONLY_FOR.get(word, ())]
        try:
            refuse_hidden("cli", "commands", *LIBRARY, *needed)
        except ImportError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        from cli import main as run

        run()
    except KeyboardInterrupt:  # while `signal` was imported
        leave()


def leave(*_: object) -> NoReturn:
    """End the process now, as one that Ctrl-C ended, with a terminal's next line begun."""
    try:
        if os.isatty(2):
            os.write(2, b"\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
