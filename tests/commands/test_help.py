"""The example commands in help texts and in README are valid."""

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from llamaspec.cli import VERBS, llamaspec
from tests.support.processes import REPOSITORY, run_python

VERBS_WITH_EXAMPLES = {"chat", "convert", "eval", "generate", "inspect", "profile"}


def examples(text: str) -> list[str]:
    """List the lines of a string that are `llamaspec` commands."""
    return re.findall(r"^ *(llamaspec \w.*)$", text, re.MULTILINE)


def command(name: str) -> click.Command:
    subcommand = llamaspec.get_command(click.Context(llamaspec), name)
    assert subcommand
    return subcommand


def helps() -> Iterator[str]:
    yield llamaspec.help or ""
    yield from (command(name).help or "" for name in VERBS)


def example_lines() -> list[str]:
    pages = [*helps(), *(path.read_text() for path in (REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")))]
    return sorted({line for page in pages for line in examples(page)})


@pytest.mark.parametrize("line", example_lines())
def test_an_example_can_be_typed(line: str):
    """An example in a help text has valid option names, option values and number of arguments; no command runs."""
    _, name, *arguments = shlex.split(line.partition(" # ")[0])
    if not name.startswith("-"):
        command(name).make_context(name, arguments)


@pytest.mark.parametrize("name", VERBS)
def test_the_table_of_verbs_says_what_the_help_of_each_begins_with(name: str):
    assert command(name).name == name
    assert (command(name).help or "").splitlines()[0] == VERBS[name].summary


def test_help_of_all_imports_no_verb_and_nothing_heavy():
    script = "import sys; from llamaspec import cli\ntry: cli.main()\nfinally: print(*sys.modules)"
    loaded = run_python(script, "--help").out.splitlines()[-1].split()
    assert "llamaspec.commands.output" in loaded
    heavy = {
        "jax",
        "numpy",
        "llamaspec.verify",
        "rich",
        *(f"llamaspec.commands.{entry.file}" for entry in VERBS.values()),
    }
    assert heavy.isdisjoint(loaded)
    # `system` handles SIGBUS; `options` needs nothing outside the standard library.
    models = {name for name in loaded if name.startswith("llamaspec.model.")}
    assert models <= {"llamaspec.model.system", "llamaspec.model.options"}


def test_help_shows_how_it_is_typed():
    examples_shown = {line.split()[1] for page in helps() for line in examples(page)}
    assert examples_shown >= VERBS_WITH_EXAMPLES


def test_no_summary_of_an_exercises_command_is_cut():
    lab = command("lab")
    assert isinstance(lab, click.Group)
    page = lab.get_help(click.Context(lab, terminal_width=42)).partition("Commands:")[2]
    assert "..." not in page and "List the exercises by number, one per line." in " ".join(page.split())


@pytest.mark.parametrize("name", VERBS)
def test_help_fits_a_narrow_terminal(name: str):
    subcommand = command(name)
    lines = subcommand.get_help(
        click.Context(subcommand, info_name=f"llamaspec {name}", terminal_width=42)
    ).splitlines()
    assert max(map(len, lines)) <= 42


def test_an_unknown_option_in_an_example_is_detected():
    with pytest.raises(click.UsageError, match="No such option"):
        test_an_example_can_be_typed("llamaspec inspect --shapes llama-2-7b  # memory")


@pytest.mark.parametrize("width", [42, 78])
@pytest.mark.parametrize("name", VERBS)
def test_a_broken_example_is_what_a_shell_makes_whole(name: str, width: int):
    subcommand = command(name)
    page = subcommand.get_help(click.Context(subcommand, terminal_width=width))
    lines = page[: page.index("Options:")].splitlines()
    assert all(len(line) <= width for line in lines[1:])
    joined = [shlex.split(line) for line in examples("\n".join(lines).replace("\\\n", " "))]
    assert joined == [shlex.split(line) for line in examples(subcommand.help or "")]
