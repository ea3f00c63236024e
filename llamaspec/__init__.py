"""Llama in JAX, and a verifier for kernels: the module that users import.

Generate text. `load` takes a Hugging Face directory, a GGUF file, a file of llama2.c, or `stories`, the model that
comes with the package:

    from llamaspec import SamplingOptions, load

    llama = load("stories")
    prompt = "Once upon a time"
    print(prompt, end="")
    for token in llama.generate(prompt, max_new_tokens=100, sampling=SamplingOptions(temperature=0.5), seed=7):
        print(token.text, end="", flush=True)
    print()

Look inside. `logits` takes token ids, and returns one row of logits for each id:

    ids = llama.encode(prompt)
    likeliest = llama.logits(ids)[-1].argmax()
    print(llama.decode([*ids, int(likeliest)]))

Chat. Each `reply` computes only the new tokens:

    from llamaspec import Chat

    chat = Chat(llama)
    for question in ("Tell me a story about a fox.", "What color is the fox?"):
        chat.make_room(question, answer=256)  # forgets the oldest turns if the context is nearly full
        print("".join(token.text for token in chat.reply(question, seed=7)))

Verify a kernel, as a test that pytest finds:

    from llamaspec import contract

    @contract("softmax")
    def test_softmax(x):
        return my_kernels.softmax(x)

`python -m llamaspec` runs the command line. Importing this module is quick: JAX is imported by the first use of a name
that needs it.
"""

# In a checkout, our packages are folders next to this one, and this folder has links to them. In a wheel, the packages
# are in this folder, without links.

from __future__ import annotations

from llamaspec.start import leave, leave_at_interrupt

TYPE_CHECKING = False  # importing `typing` takes time, and Ctrl-C would print a traceback during that time
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from llamaspec.model.chat.chat import Chat
    from llamaspec.model.llama import Llama, load
    from llamaspec.model.options import SamplingOptions
    from llamaspec.verify.pytest import contract

__version__ = "0.1.0"
__all__ = ["Chat", "Llama", "SamplingOptions", "contract", "load"]

HOMES = {
    "Chat": "llamaspec.model.chat.chat",
    "Llama": "llamaspec.model.llama",
    "SamplingOptions": "llamaspec.model.options",
    "contract": "llamaspec.verify.pytest",
    "load": "llamaspec.model.llama",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'llamaspec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def main() -> NoReturn:
    """Run the command line. See `cli.main` for exit codes."""
    try:
        leave_at_interrupt()
        from llamaspec.cli import main as run

        run()
    except KeyboardInterrupt:  # before `leave_at_interrupt` began
        leave()
