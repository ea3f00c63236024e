"""The command line: a table of verbs, each imported when it runs, and exit codes.

stdout carries only the result. Progress and statistics go to stderr, and an error is one line. The module of a verb
imports its libraries when the verb runs, so `--help` answers at once.
"""

from __future__ import annotations

if __name__ == "__main__":  # before all other imports, because they take time
    from llamaspec.start import leave_at_interrupt

    leave_at_interrupt()

import os
import shutil
import sys
from typing import NoReturn

import click

from llamaspec.commands.interrupt import answered_at_once
from llamaspec.commands.output import fail, one_line
from llamaspec.commands.verbs import Entry, ReaderGone, Verbs

WIDEST = 100  # columns of help
USE, LOOK, MAKE, TRUST = "Use a model", "Look into a model", "Make a model", "Trust it"
VERBS = {
    "generate": Entry(USE, "generate", "Continue PROMPT with a model."),
    "story": Entry(USE, "generate", "Tell a new story, or continue PROMPT as a story."),
    "chat": Entry(USE, "chat", "Talk with a model."),
    "serve": Entry(USE, "serve", "Serve a model to many clients: OpenAI's API, and a chat page."),
    "inspect": Entry(LOOK, "inspect", "Show what a checkpoint contains, and the memory and time that it needs."),
    "tokens": Entry(LOOK, "tokens", "Print the ids of a text, or the text of ids."),
    "trace": Entry(LOOK, "trace", "Follow one token of TEXT through a model, op by op."),
    "xray": Entry(LOOK, "xray", "Write a web page that shows TEXT on its way through a model."),
    "lab": Entry(LOOK, "lab", "Find the bug in each of forty broken kernels, then write a Llama yourself."),
    "logits": Entry(LOOK, "logits", "Write the logits after each token to a NumPy file."),
    "eval": Entry(LOOK, "evaluate", "Measure how well a model predicts a text.", name="evaluate"),
    "convert": Entry(MAKE, "convert", "Convert a checkpoint to another format, or quantize it."),
    "train": Entry(MAKE, "train", "Train a model from scratch, on your text or on generated stories."),
    "tune": Entry(MAKE, "tune", "Fine-tune a model on your examples."),
    "verify": Entry(TRUST, "verify", "Check ops against the reference, each within a proven bound."),
    "prove": Entry(TRUST, "prove", "Prove how TEXT continues, with an interval around each exact logit."),
    "conform": Entry(TRUST, "conform", "Judge whether the server at URL computes the model that it claims to serve."),
    "bench": Entry(TRUST, "bench", "Measure how close a model comes to the limits of this machine."),
    "profile": Entry(TRUST, "profile", "Show the time that each op takes, in a prompt and in a decode step."),
    "doctor": Entry(TRUST, "doctor", "Diagnose MODEL, or describe this machine and the ops that it runs."),
}


@click.group(
    cls=Verbs,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
    subcommand_metavar="VERB [ARGS]...",
)
@click.version_option(package_name="llamaspec", prog_name="llamaspec")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks.")
def llamaspec():
    """An executable specification of Llama, and a fast implementation that is checked against it.

    MODEL is a GGUF file, a file of llama2.c (.bin), a Hugging Face directory, or owner/name if `hf download` put it in
    the cache of the Hub. Without MODEL, the small built-in model runs. The tokenizer comes from the model's file or
    folder, unless --tokenizer names another one. `llamaspec VERB --help` describes a verb.

    \b
    llamaspec story
    llamaspec generate "Once upon a time" --model Llama-3.2-1B.gguf
    llamaspec chat --model path/to/Llama-3.2-1B-Instruct
    """


def main() -> NoReturn:
    """Run the command line. Exits with 0: success; 1: failure; 2: wrong usage; 130: Ctrl-C; 128 + n: signal n.

    For `verify` and `conform`, 1 means a violation, and 2 means that an error prevented a verdict.
    """
    failed = 2 if next((word for word in sys.argv[1:] if not word.startswith("-")), "") in ("verify", "conform") else 1
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        fail("standard output is closed", failed)
    with answered_at_once() as interrupts:
        try:
            width = min(shutil.get_terminal_size().columns, WIDEST) - 2  # click would not go below 50
            llamaspec.main(prog_name="llamaspec", terminal_width=width, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        except (KeyboardInterrupt, click.Abort):  # click has printed a newline
            sys.exit(130)
        except Exception as error:
            if interrupts.status:  # for example, an interrupted import raises another error
                click.echo(err=True)
                sys.exit(interrupts.status)
            if isinstance(error, click.UsageError):
                hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
                fail(f"{error.format_message()}{hint}", 2)
            if isinstance(error, click.ClickException):
                fail(error.format_message(), failed)
            if isinstance(error, ReaderGone):
                # Otherwise Python prints an error when it flushes stdout.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(failed)
            if "--debug" in sys.argv:
                sys.excepthook(type(error), error, error.__traceback__)
                sys.exit(failed)
            fail(one_line(error), failed)
    sys.exit(0)


if __name__ == "__main__":
    main()
