"""`chat`: a conversation at the terminal or line by line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.interrupt import handled_by, still_watched, unechoed
from llamaspec.commands.loading import cache_folder, checked_request, load, print_seed
from llamaspec.commands.options import BUILT_IN, Verb, generation_options, template_option
from llamaspec.commands.output import say, stream
from llamaspec.model.options import MAX_SEED, SAMPLING, check_max_new_tokens, check_seed

if TYPE_CHECKING:
    from llamaspec.model.chat.chat import Chat
    from llamaspec.model.chat.template import ChatTemplate
    from llamaspec.model.generation import Generation
    from llamaspec.model.parallel.processes import Watch
    from llamaspec.model.tokenizers.tokenizer import Tokenizer

COMMANDS = """\
/help         show this
/reset        start over
/system TEXT  start over, with TEXT as the
              system message
/regenerate   answer the last question again
/set          show the settings of answers
/set NAME VALUE, for example
     /set temperature 0.5
/save FILE    write the messages as JSON
/load FILE    continue the messages in FILE
/exit         leave; also quit and Ctrl-D
Ctrl-C        stop an answer"""
STORIES = """\
The built-in model tells stories and answers
questions about them. It knows nothing else.
  Tell me a story about a fox and a kite.
  Tell me a story about a mouse and a ball.
  Tell me a story about a girl and a cake.
  Tell me a story about a pig and a storm.
  Tell me a story about Anna and a carrot.
  Tell me a story about a bear who learns to
    swim.
  Tell me another story.
Once it has told one:
  Who was the story about?
  Where did Anna live? Who helped Anna?
  What did Anna want? How did Anna feel?"""


def named_values(stated: Iterable[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs. A VALUE that is not valid JSON is kept as a string. Raises click.BadParameter."""
    values = {}
    for pair in stated:
        name, equals, value = pair.partition("=")
        if not (name.isidentifier() and equals):
            raise click.BadParameter(f"expected NAME=VALUE, got {pair!r}")
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    return values


@click.command(cls=Verb)
@click.option("--system", metavar="TEXT", help="Begin the conversation with TEXT as the system message.")
@template_option
@click.option(
    "--template-option",
    "template_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=lambda _context, _option, stated: named_values(stated),
    help="Set a variable of the chat template, such as enable_thinking=false. May be repeated.",
)
@click.option("--thoughts", is_flag=True, help="Show the model's reasoning on stderr.")
@generation_options(512)
@click.pass_obj
def chat(
    watch: Watch | None,
    system: str | None,
    template: str | None,
    template_options: dict[str, Any],
    thoughts: bool,
    timings: bool,
    **options: Any,
):
    """Talk with a model.

    /help lists the commands, /exit leaves, and Ctrl-C stops an answer. If standard input is not a terminal, each line
    is a question, and Ctrl-C leaves. With several processes, only the first process reads questions.

    \b
    llamaspec chat
    llamaspec chat --model path/to/Llama-3.2-1B-Instruct --system "Answer in one sentence."
    llamaspec chat --model path/to/Qwen3-0.6B --template-option enable_thinking=false
    """
    from llamaspec.model.chat.chat import Chat
    from llamaspec.model.chat.template import check_options, find_template
    from llamaspec.model.running.start_clock import StartClock

    if sys.stdin is None:
        raise click.UsageError("standard input is closed")
    clock = StartClock.of_process()
    request = checked_request(options)
    templates: list[ChatTemplate] = []

    def examine(tokenizer: Tokenizer, places: list[str | Path]):
        templates.append(find_template(tokenizer, *places, template=template))
        try:
            check_options(templates[0], template_options)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--template-option") from None
        if templates[0].note:
            say(templates[0].note)

    llama = load(options, greedy=request["sampling"].greedy, clock=clock, examine=examine)
    conversation = Chat(llama, templates[0], system=system, options=template_options)
    print_seed(options, request)
    is_built_in = options["model"] == BUILT_IN and not Path(BUILT_IN).exists()
    typed, first = sys.stdin.isatty(), watch is None or watch.first
    if typed and first:
        say("Type /help for example questions." if is_built_in else "Type /help for commands, /exit to leave.")
    lines = _terminal_lines() if typed else (line.rstrip("\r\n") for line in sys.stdin)
    agree: Callable[[bool], int] = bool
    if watch:
        from llamaspec.model.parallel.processes import agreed as agree

        typed, lines = bool(agree(typed)), watch.shared(lines)
    interrupted = _Pressed(agree, prompts=first)
    commands = _Commands(conversation, request, sample=STORIES if is_built_in else "", watch=watch)
    # If the questions come from a file, Ctrl-C ends the whole chat, not only the answer.
    with handled_by(interrupted.press) if typed else nullcontext():
        for line in lines:
            if line.strip() in ("/exit", "quit", "exit"):
                return
            try:
                question = commands.run(line.strip()) if re.match(r"\s*/\w+(\s|$)", line) else line
                if question.strip():
                    started = perf_counter()
                    # With several processes, echo stays on: if another process fails, this one ends at once, and
                    # could not turn echo on again.
                    with unechoed() if watch is None else nullcontext():
                        answer = _answer(conversation, question, interrupted, commands.request, thoughts=thoughts)
                    if timings:
                        say(str(clock.with_first_token(answer.first_at - started)))
                    timings = False
            except ValueError as error:
                if not typed:
                    raise
                say(f"error: {error}")


class _Commands:
    """The commands of a chat, such as `/help`. `request` holds the arguments of `Chat.reply`, which `/set` changes.

    If several processes run the model, each of them runs each command, but only the first one writes files.
    """

    def __init__(self, conversation: Chat, request: dict[str, Any], *, sample: str, watch: Watch | None):
        self.request = request
        self._conversation, self._sample, self._watch = conversation, sample, watch

    def run(self, line: str) -> str:
        """Run a command. Return the question to ask next, which only `/regenerate` has.

        Raises ValueError for an unknown command.
        """
        name, _, argument = line.partition(" ")
        match name, argument.strip():
            case "/help", "":
                say(COMMANDS + (f"\n\n{self._sample}" if self._sample else ""))
            case "/reset", "":
                self._conversation.reset()
                say("started a new conversation")
            case "/system", text:
                self._conversation.instruct(text or None)
                say(f"started a new conversation with{'' if text else 'out'} a system message")
            case "/regenerate", "":
                return self._regenerate()
            case "/set", setting:
                self._set(*setting.split(maxsplit=1))
            case "/save" | "/load", "":
                raise ValueError(f"{name} needs the name of a file: {name} FILE")
            case "/save", file:
                self._save(file)
            case "/load", file:
                self._load(file)
            case "/help" | "/reset" | "/regenerate" | "/exit", _:
                raise ValueError(f"{name} takes no argument, got {argument.strip()!r}")
            case _:
                raise ValueError(f"unknown command {name}: /help lists the commands")
        return ""

    def _regenerate(self) -> str:
        question = self._conversation.take_back()["content"]
        if self.request["sampling"].greedy:
            say("(temperature 0: the answer is the same, unless a setting has changed)")
        else:
            self.request["seed"] = (self.request["seed"] + 1) % (MAX_SEED + 1)
            say(f"seed {self.request['seed']}")
        return question

    def _set(self, name: str = "", value: str = "") -> None:
        """Change a setting of the next answers, or show all settings. Raises ValueError for another name or value."""
        name = name.removeprefix("--").replace("-", "_")
        kinds = {**{option.name: option.kind for option in SAMPLING.values()}, "max_new_tokens": int, "seed": int}
        if name and name not in kinds:
            raise ValueError(f"/set knows no setting {name!r}, only {', '.join(map(_spelled, kinds))}")
        if name:
            try:
                number = kinds[name](value)
            except ValueError:
                raise ValueError(f"/set {_spelled(name)} needs a number, got {value!r}") from None
            if name in SAMPLING:
                self.request["sampling"] = replace(self.request["sampling"], **{name: number})
            else:
                self.request[name] = (check_seed if name == "seed" else check_max_new_tokens)(number)
        settings = {**asdict(self.request["sampling"]), **self.request}
        say(", ".join(f"{_spelled(setting)} {settings[setting]}" for setting in ([name] if name else kinds)))

    def _save(self, file: str) -> None:
        if self._watch and not self._watch.first:
            return
        from llamaspec.model.checkpoints.staging import new_file

        messages = self._conversation.messages
        with new_file(Path(file).expanduser()) as staged:
            staged.write_text(json.dumps(messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        say(f"wrote {len(messages)} messages to {file}")

    def _load(self, file: str) -> None:
        if self._watch:
            raise ValueError("/load works only in a chat that runs in a single process")
        from llamaspec.model.checkpoints.checkpoint import refused
        from llamaspec.model.checkpoints.strict_json import read_list

        path = Path(file).expanduser()
        messages = read_list(path)
        try:
            self._conversation.resume(messages)
        except ValueError as error:
            raise refused(path, str(error)) from None
        say(f"read {len(messages)} messages from {file}")


def _spelled(setting: str) -> str:
    return setting.replace("_", "-")


def _answer(
    conversation: Chat, question: str, interrupted: _Pressed, request: dict[str, Any], *, thoughts: bool
) -> Generation:
    """Print the answer to a question, and return the answer.

    Prints on stderr how many old turns were dropped to make room, and why an answer was cut.
    """
    if dropped := conversation.make_room(question, answer=request["max_new_tokens"]):
        turns = "the oldest turn was" if dropped == 1 else f"the {dropped} oldest turns were"
        say(f"({turns} dropped: the context of {conversation.context} tokens was nearly full)")
    with interrupted.allowed():
        answer = conversation.reply(question, interrupted=interrupted, **request)
        stream(answer, answer=True, wrap=True, thoughts=thoughts)
    if ending := _ending(answer, conversation.context):
        say(ending)
    return answer


def _ending(answer: Generation, context: int) -> str:
    """Return a line that says why an answer was cut. Returns an empty string for a complete answer."""
    if answer.finish_reason == "length":
        return f"(answer cut after {len(answer.ids)} tokens: raise --max-new-tokens for longer answers)"
    if answer.finish_reason == "context":
        return f"(answer cut: the context of {context} tokens is full)"
    return ""


def _terminal_lines() -> Iterator[str]:
    """Read lines from a terminal, with editing and a history, until Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.output import create_output

    folder = cache_folder()
    history = FileHistory(str(folder / "chat_history")) if folder else InMemoryHistory()
    session = PromptSession("> ", history=history, output=create_output(stdout=sys.stderr), enable_suspend=True)
    while True:
        try:
            with still_watched():
                line = session.prompt()
            yield line
        except KeyboardInterrupt:
            if not session.default_buffer.text.strip():
                say("(type /exit or press Ctrl-D to leave)")
        except EOFError:
            return


class _Pressed:
    """Records whether Ctrl-C was pressed during an answer. A second press in the same answer raises KeyboardInterrupt.

    Between answers, Ctrl-C is ignored if this process shows a prompt (`prompts`): the answer may have ended just before
    the press, and the prompt handles the key itself. A process without a prompt, which waits for the questions of
    another process, raises KeyboardInterrupt, so that the user can end it. `agree` combines the states of several
    processes, so that all stop after the same number of tokens.
    """

    def __init__(self, agree: Callable[[bool], int], *, prompts: bool):
        self._agree, self._prompts = agree, prompts
        self._answering = self._pressed = False

    def __call__(self) -> bool:
        return bool(self._agree(self._pressed))

    def press(self) -> None:
        if self._pressed or not (self._answering or self._prompts):
            raise KeyboardInterrupt
        self._pressed = self._answering

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside this context, let the first Ctrl-C set a flag instead of raising KeyboardInterrupt."""
        self._answering, self._pressed = True, False
        try:
            yield
        finally:
            self._answering = self._pressed = False
