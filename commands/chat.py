"""`chat`: a conversation at the terminal or line by line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.interrupt import handled_by, still_watched, unechoed
from llamaspec.commands.loading import cache_folder, checked_request, load, print_seed
from llamaspec.commands.options import BUILT_IN, Verb, generation_options, template_option
from llamaspec.commands.output import say, stream

if TYPE_CHECKING:
    from llamaspec.model.chat.chat import Chat
    from llamaspec.model.chat.template import ChatTemplate
    from llamaspec.model.generation import Generation
    from llamaspec.model.parallel.processes import Watch
    from llamaspec.model.tokenizers.tokenizer import Tokenizer

COMMANDS = """\
/help         show this
/reset        begin anew
/system TEXT  begin anew, with TEXT as the
              system message
/save FILE    write what was said, as JSON
/exit         leave, as quit and Ctrl-D do
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
    """Read each NAME=VALUE, where VALUE is JSON, or a text as it stands. Raises click.BadParameter."""
    import json

    values = {}
    for each in stated:
        name, equals, value = each.partition("=")
        if not (name.isidentifier() and equals):
            raise click.BadParameter(f"{each!r} is not NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    return values


@click.command(cls=Verb)
@click.option("--system", metavar="TEXT", help="Tell the model TEXT before the conversation.")
@template_option
@click.option(
    "--template-option",
    "template_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=lambda _context, _option, stated: named_values(stated),
    help="Set a switch of the chat template, such as enable_thinking=false. Repeat it for more.",
)
@click.option("--thoughts", is_flag=True, help="Show what gpt-oss thinks before it answers, on stderr.")
@generation_options(512)
@click.pass_obj
def chat(
    others: Watch | None,
    system: str | None,
    template: str | None,
    template_options: dict[str, Any],
    thoughts: bool,
    timings: bool,
    **options: Any,
):
    """Talk with a model.

    /help lists what else can be typed, /exit leaves, and Ctrl-C stops an answer. When standard input
    is no terminal, each of its lines is a question, and Ctrl-C leaves. Of several processes, the first
    one asks.

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
    found: list[ChatTemplate] = []

    def examine(tokenizer: Tokenizer, places: list[str | Path]):
        found.append(find_template(tokenizer, *places, template=template))
        try:
            check_options(found[0], template_options)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--template-option") from None
        if found[0].note:
            say(found[0].note)

    llama = load(options, greedy=request["sampling"].greedy, clock=clock, examine=examine)
    conversation = Chat(llama, found[0], system=system, options=template_options)
    print_seed(options, request)
    is_built_in = options["model"] == BUILT_IN and not Path(BUILT_IN).exists()
    typed, first = sys.stdin.isatty(), others is None or others.first
    if typed and first:
        say("Type /help for what can be asked." if is_built_in else "Type /help for commands, /exit to leave.")
    lines = _terminal_lines() if typed else (line.rstrip("\r\n") for line in sys.stdin)
    agree: Callable[[bool], int] = bool
    if others:
        from llamaspec.model.parallel.processes import agreed as agree

        typed, lines = bool(agree(typed)), others.shared(lines)
    interrupted = _Pressed(agree, prompts=first)
    # Ctrl-C ends a chat whose questions come from a file: nobody is there to ask the next one.
    with handled_by(interrupted.press) if typed else nullcontext():
        for line in lines:
            if line.strip() in ("/exit", "quit", "exit"):
                return
            try:
                if re.match(r"\s*/\w+(\s|$)", line):
                    _command(conversation, line.strip(), sample=STORIES if is_built_in else "", saves=first)
                elif line.strip():
                    asked = perf_counter()
                    # Where another process fails, this one ends at once, and would leave the terminal without echo.
                    with unechoed() if others is None else nullcontext():
                        answer = _answer(conversation, line, interrupted, request, thoughts=thoughts)
                    if timings:
                        say(str(clock.with_first_token(answer.first_at - asked)))
                    timings = False
            except ValueError as error:
                if not typed:
                    raise
                say(f"error: {error}")


def _command(conversation: Chat, line: str, *, sample: str, saves: bool) -> None:
    """Do what a line that begins with a slash says. Raises ValueError for one that means nothing.

    Of several processes, only one `saves`.
    """
    name, _, rest = line.partition(" ")
    match name, rest.strip():
        case "/help", "":
            say(COMMANDS + (f"\n\n{sample}" if sample else ""))
        case "/reset", "":
            conversation.reset()
            say("forgotten")
        case "/system", text:
            conversation.instruct(text or None)
            say("begun anew" if text else "begun anew, without a system message")
        case "/save", file if file and not saves:
            pass
        case "/save", file if file:
            _save(conversation, file)
            say(f"{file}: {len(conversation.messages)} messages")
        case "/save", _:
            raise ValueError("/save needs the name of a file")
        case "/help" | "/reset" | "/exit", _:
            raise ValueError(f"{name} stands alone on its line")
        case _:
            raise ValueError(f"no command {name}: /help lists the commands")


def _save(conversation: Chat, file: str) -> None:
    import json

    from llamaspec.model.checkpoints.staging import new_file

    with new_file(Path(file).expanduser()) as staged:
        staged.write_text(json.dumps(conversation.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _answer(
    conversation: Chat, question: str, interrupted: _Pressed, request: dict[str, Any], *, thoughts: bool
) -> Generation:
    """Print the answer to a question, and return it.

    Lines on stderr say what had to be forgotten for it, and why it ends early.
    """
    if dropped := conversation.make_room(question, answer=request["max_new_tokens"]):
        turns = "the oldest turn was" if dropped == 1 else f"the {dropped} oldest turns were"
        say(f"({turns} forgotten: the context of {conversation.context} tokens was nearly full)")
    with interrupted.allowed():
        answer = conversation.reply(question, interrupted=interrupted, **request)
        stream(answer, answer=True, wrap=True, thoughts=thoughts)
    if ending := _ending(answer, conversation.context):
        say(ending)
    return answer


def _ending(answer: Generation, context: int) -> str:
    """Say why an answer was cut short; nothing where it was not."""
    if answer.finish_reason == "length":
        return f"(cut after {len(answer.ids)} tokens: --max-new-tokens allows more)"
    if answer.finish_reason == "context":
        return f"(cut: the context of {context} tokens is full)"
    return ""


def _terminal_lines() -> Iterator[str]:
    """Lines as a person types them, with editing and a history; ends at Ctrl-D."""
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
                say("(/exit or Ctrl-D leaves)")
        except EOFError:
            return


class _Pressed:
    """Whether Ctrl-C was pressed during an answer. Pressed again before that ends, it raises KeyboardInterrupt.

    It does nothing at another time where this process `prompts`: an answer may end as it is pressed, and the prompt
    takes it as a key. A process that waits for the questions of another one has no other way to leave.
    `agree` makes one answer of those of several processes, which must end a text after the same burst.
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
        """Within it the first Ctrl-C is only noted."""
        self._answering, self._pressed = True, False
        try:
            yield
        finally:
            self._answering = self._pressed = False
