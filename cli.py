"""The command line: a table of verbs, each imported when it runs, and exit codes.

stdout carries the result alone; progress and statistics go to stderr; an error is one line. A verb's
file imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NamedTuple, NoReturn

import click

from commands.output import fail


class Entry(NamedTuple):
    """A verb in the table."""

    command: str  # the click command, as module:name
    summary: str  # the first sentence of its help


VERBS = {
    "bench": Entry("commands.bench:bench", "Measure this machine, and then how close a model comes to what it allows."),
    "chat": Entry("commands.chat:chat", "Talk with a model."),
    "convert": Entry(
        "commands.convert:convert",
        "Write checkpoint SRC as DST: a Hugging Face directory, or a file for llama2.c or llama.cpp (gguf).",
    ),
    "doctor": Entry("commands.doctor:doctor", "What is installed here, what would run, and what is missing."),
    "eval": Entry("commands.evaluate:evaluate", "Perplexity and bits per byte of a text; what a scheme costs."),
    "generate": Entry("commands.generate:generate", "Continue PROMPT; - reads it from standard input."),
    "inspect": Entry(
        "commands.inspect:inspect",
        "What is in a checkpoint, read from its header: hyperparameters, tensors, and the cost of a token.",
    ),
    "logits": Entry("commands.logits:logits", "Write what the model predicts after each token."),
    "profile": Entry("commands.profile:profile", "Where the time of a prompt and of a decoding step goes, by op."),
    "story": Entry("commands.generate:story", "Tell a story, from the beginning or on from PROMPT."),
    "tokens": Entry("commands.tokens:tokens", "The ids of TEXT, on one line."),
    "train": Entry(
        "commands.train:train", "Train a model from nothing, on stories that it writes itself or on a text."
    ),
    "verify": Entry(
        "commands.verify:verify",
        "Hold ops to the reference, each within a proven bound, on the inputs that break kernels.",
    ),
}


class Verbs(click.Group):
    """A group whose commands are imported when they are asked for; its own help reads the table alone."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].command.partition(":")
        return getattr(import_module(module), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="llamaspec", prog_name="llamaspec")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks.")
def llamaspec():
    """An executable specification of Llama, and the fast implementation that is proven against it.

    MODEL is a GGUF file, one of llama2.c (.bin) or a Hugging Face directory. The tokenizer is found
    inside or beside it, or named with --tokenizer.

    \b
    llamaspec generate "Once upon a time" --model stories260K.bin --tokenizer tok512.model
    llamaspec chat --model path/to/Llama-3.2-1B-Instruct
    """


def main() -> NoReturn:
    """Run the command line. 0: done; 1: the work failed; 2: wrong usage; 130: interrupted; 128 + n: by signal n."""
    import signal

    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        fail("standard output is closed", 1)
    for end in (signal.SIGTERM, signal.SIGHUP):  # as exceptions, so that a half-written file is removed
        signal.signal(end, lambda number, _: sys.exit(128 + number))
    try:
        llamaspec.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        fail(f"{error.format_message()}{hint}", 2)
    except click.ClickException as error:
        fail(error.format_message(), 1)
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again as it flushes
        sys.exit(1)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        fail(_one_line(error), 1)
    sys.exit(0)


def _one_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, ValueError | MemoryError | OSError | FloatingPointError):
        return text
    return f"{type(error).__name__}: {text} (a fault of llamaspec: --debug shows where)"


if __name__ == "__main__":
    main()
