"""Renders a conversation with a model's chat template, and encodes the result.

Special tokens that the template writes become their ids. If a message spells the name of a special token, the name is
encoded as text, because each character that comes from a message is marked as quoted.
"""

import json
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from llamaspec.model.chat.marked_text import MarkedText, lengths_of, marked, marks_from, marks_of, plain
from llamaspec.model.chat.template_process import CPU_SECONDS, Workers
from llamaspec.model.checkpoints.checkpoint import CheckpointError, os_errors, refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import GGUF, leads_out
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.markers import END_OF_TURN
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.tokenizers.tokenizer_config import read_config, stated_tokens

LARGEST = 1 << 20  # bytes of a template; the longest that we know has 30 thousand
MOST_NAMED = 100  # largest number of templates of one model
WITH_TOOLS = "tool_use"  # the name of a model's template for conversations with tools
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # options cannot replace these variables
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # a message may have its reasoning under any of these keys
LONGEST_ERROR = 300  # characters of an error message

BUILT_IN = Path(__file__).with_name("templates")
# Control tokens that suggest a built-in template. We use the first template whose tokens the tokenizer all has.
SUGGESTED_BY = {
    "llama3": {"<|start_header_id|>"},
    "chatml": {"<|im_start|>", "<|im_end|>"},
    "mistral-tekken": {
        "[INST]",
        "[/INST]",
        "<SPECIAL_100>",
    },  # this tokenizer has a thousand control tokens with such names
    "mistral": {"[INST]", "[/INST]"},
    "llama2": {"<s>", "</s>"},
}
BUILT_IN_NAMES = (*SUGGESTED_BY, "vicuna")

Message = Mapping[str, Any]


class CannotRender(CheckpointError):
    """Raised when a template cannot be rendered because the machine lacks memory or time."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template in the Jinja language, rendered as transformers renders it."""

    name: str  # the file of the template, for error messages
    source: str = field(repr=False)
    tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token and similar, if the model has them
    note: str | None = None  # a note to show to the user if the model has no template
    named: Mapping[str, str] = field(default_factory=dict, repr=False)  # the model's other templates, by name
    workers: Workers | None = field(default=None, repr=False, compare=False)  # None: a new process per rendering

    def render(self, messages: Sequence[Message], **variables: Any) -> MarkedText:
        """Render the conversation up to the assistant's answer. Characters from messages are marked as quoted.

        `variables` are other variables that the template reads: `tools`, or switches such as `enable_thinking`. With
        tools, we render the model's template named tool_use if it has one. A message may have its reasoning under any
        key in `THOUGHTS`.

        Each rendering runs in its own process, which is killed if it takes too much time or memory. If the template has
        no `workers`, every rendering starts a Python process, which takes a tenth of a second.

        Raises CheckpointError if the template fails or refuses the conversation, and CannotRender if the machine lacks
        memory or time. The message is one line and names the template.
        """
        context = {"messages": [_plain(message) for message in messages], "tools": None, "documents": None}
        context |= {"add_generation_prompt": True, **variables}
        source = self.rendered_source(tools=context["tools"] is not None)
        request = json.dumps({"variables": context, "tokens": dict(self.tokens)}).encode()
        try:
            with ExitStack() as stack:
                workers = self.workers or stack.enter_context(closing(Workers()))
                answer, status = workers.render(source, request)
        except OSError as error:
            raise CannotRender(str(refused(self.name, f"cannot be rendered: {error}"))) from error
        try:
            message = json.loads(answer)
        except ValueError:  # the process was killed or crashed; its status is a negative signal number
            slow = -status in (signal.SIGKILL, signal.SIGXCPU)
            what = f"takes more than {CPU_SECONDS} seconds" if slow else f"ends its process with status {status}"
            raise refused(self.name, what) from None
        if "error" in message:
            raise refused(self.name, message["error"][:LONGEST_ERROR])
        marks = marks_from(message["marks"])
        if len(marks) != len(message["text"]):  # JSON joins the two halves of a surrogate pair to one character
            raise refused(self.name, "renders this conversation as text that is not valid Unicode")
        return marked(message["text"], marks)

    def rendered_source(self, *, tools: bool) -> str:
        """Return the source of the template for conversations with tools, or without tools if `tools` is False."""
        return self.named.get(WITH_TOOLS, self.source) if tools else self.source

    def reads(self, variable: str) -> bool:
        """Return whether the template, or another template of the model, contains the name of a variable."""
        return any(re.search(rf"\b{re.escape(variable)}\b", text) for text in (self.source, *self.named.values()))


def _plain(message: Message) -> dict[str, Any]:
    """Prepare a message for a template as transformers does.

    Drops keys with the value None, and puts the reasoning under both keys that templates read.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    thoughts = next((plain[key] for key in THOUGHTS if key in plain), None)
    return plain if thoughts is None else {"thinking": thoughts, **plain, "reasoning_content": thoughts}


def find_template(tokenizer: Tokenizer, *places: str | Path, template: str | Path | None = None) -> ChatTemplate:
    """Find a chat template for a tokenizer: the one that `template` names, or else the first one in `places`.

    `template` is one of `BUILT_IN_NAMES`, the name of one of the model's own templates, or a file. If it is None and no
    place has a template, the tokenizer's control tokens decide which built-in template we use, and the result's `note`
    says so. Raises CheckpointError if no template is found, or if the template cannot be used.
    """
    if template is not None:
        return _named(template, tokenizer, places)
    if match := template_of(tokenizer, *places):
        return match
    where = places[0] if places else "the model"
    choices = f"{', '.join(BUILT_IN_NAMES)}, or a file"
    for name, tokens in SUGGESTED_BY.items():
        if tokens <= tokenizer.special.keys():
            note = refused(
                where, f"comes without a chat template; using the built-in {name}, as its control tokens suggest"
            )
            return replace(_built_in(name, tokenizer), note=f"{note}; choose another with --template: {choices}")
    what = (
        "no chat_template.jinja, none in tokenizer_config.json, and no control tokens that suggest a built-in template"
    )
    raise refused(where, f"has no chat template ({what}); choose one with --template: {choices}")


def template_of(tokenizer: Tokenizer, *places: str | Path) -> ChatTemplate | None:
    """Return the template in the first of `places` that has a template, or None if no place has one.

    A place is the tokenizer's or the model's directory, or a file in it. The template is in the file itself (GGUF), or
    in the directory's chat_template.jinja or tokenizer_config.json. Raises CheckpointError if the template cannot be
    used.
    """
    for place in map(Path, places):
        match = _in_directory(place, tokenizer) if place.is_dir() else _in_file(place, tokenizer)
        if match:
            return match
    return None


def turn_stops(tokenizer: Tokenizer, template: ChatTemplate | None) -> frozenset[int]:
    """Return the ids of the control tokens that end an answer in a conversation.

    In gpt-oss, `<|return|>` ends an answer. `<|end|>` ends only one message of the answer, such as the reasoning.
    """
    ends = {*END_OF_TURN, template.tokens.get("eos_token") if template else None}
    if "<|return|>" in tokenizer.special:
        ends.discard("<|end|>")
    return frozenset(id for name, id in tokenizer.special.items() if name in ends)


def check_options(template: ChatTemplate, options: Iterable[str]) -> None:
    """Raise ValueError for an option that no template of the model reads, because it would have no effect."""
    for name in options:
        if name in OWN_VARIABLES:
            raise ValueError(f"{name} comes from the conversation and cannot be set as an option of the chat template")
        if not template.reads(name):
            raise ValueError(f"{template.name}: this chat template does not read an option {short(name)}")


class SpecialTokens:
    """Encodes rendered conversations.

    Special tokens that the template wrote become ids. The same names in messages are encoded as text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        names = sorted((name for name in tokenizer.special if name), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def encode(self, text: str, *, after: str = "") -> list[int]:
        """Encode the rendered string `text`, which continues the string `after`.

        We encode the name of a special token as the token's id if no character of the name is marked as quoted.
        """
        parts = self._parts(text)
        before = self._parts(after)
        # If `after` ends with a special token, the last part is empty, and the token is the part before it.
        previous = before[-2] if len(before) > 1 and not before[-1] else None
        within = bool(before[-1])
        ids = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._tokenizer.special[part])
                previous, within = part, False
                continue
            following = parts[i + 1] if i + 1 < len(parts) else None
            left = previous if self._absorbs(previous)[1] else None
            right = following if self._absorbs(following)[0] else None
            if left or right:
                part = self._tokenizer.trimmed(part, after=left, before=right)
            if not part:
                continue
            if previous is not None:
                ids += self._tokenizer.encode_after_special(part)
            else:
                ids += self._tokenizer.encode(part, start=not within)
        return ids

    def _parts(self, text: str) -> list[str]:
        """Split a rendered string into texts and special tokens, which alternate.

        The first and the last part are texts.
        """
        characters, parts, at, end = plain(text), [], 0, 0
        for i, length in enumerate(lengths_of(marks_of(text))):
            begin, end = end, end + length
            if i % 2:  # this run is quoted
                continue
            for match in self._names.finditer(characters, begin, end):
                parts += [characters[at : match.start()], match[0]]
                at = match.end()
        return [*parts, characters[at:]]

    def _absorbs(self, name: str | None) -> tuple[bool, bool]:
        """Return whether a special token absorbs white space before it, and whether it absorbs white space after it."""
        return (False, False) if name is None else self._tokenizer.absorbs.get(name, (False, False))

    def begins(self, text: MarkedText, start: MarkedText) -> bool:
        """Return whether `text` begins with `start`, with the same special tokens at the same places."""
        return plain(text).startswith(plain(start)) and self._parts(text[: len(start)]) == self._parts(start)

    def tail(self, text: str) -> str:
        """Return the part of a rendered string after its last special token."""
        return self._parts(text)[-1]


def _in_file(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template inside a GGUF file, or else the template in the file's folder."""
    with os_errors(path):
        if path.is_file() and (file := MappedFile(path)).bytes(0, len(GGUF)) == GGUF:
            from llamaspec.model.tokenizers.gguf import read_templates

            if match := read_templates(file):
                return _checked(path, *match, tokenizer)
    return _in_directory(path.parent, tokenizer)


def _in_directory(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template in a folder's .jinja files, or else in its tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    with os_errors(folder):
        config = read_config(folder)
        sources = {"default": _read(path)} if path.exists() else {}
        sources |= {named.stem: _read(named) for named in _named_templates(folder / "additional_chat_templates")}
    if not sources:
        path, stated = folder / "tokenizer_config.json", config.get("chat_template")
        if stated is None:
            return None
        sources = _by_name(stated, path)
    return _checked(path, sources, stated_tokens(folder), tokenizer)


def _named_templates(folder: Path) -> list[Path]:
    """Return the files in `folder` that hold additional templates. A file's name is the name of its template.

    `convert` copies these files, and so publishes them. We therefore refuse a link to a file outside the folder.
    """
    paths = sorted(islice(folder.glob("*.jinja"), MOST_NAMED + 1))
    if len(paths) > MOST_NAMED:
        raise refused(folder, f"contains more than {MOST_NAMED} chat templates")
    for path in paths:
        if outside := leads_out(folder) or leads_out(path):
            raise refused(path, f"is a link to {outside}, outside the model's folder")
    return paths


def _checked(
    path: Path, sources: Mapping[str, str], tokens: Mapping[str, str | None], tokenizer: Tokenizer
) -> ChatTemplate:
    """Make a ChatTemplate from `sources`, a model's templates by name. One of the names must be "default"."""
    if any(len(source.encode(errors="surrogatepass")) > LARGEST for source in sources.values()):
        raise refused(path, f"has a chat template of more than {LARGEST} bytes")
    if "default" not in sources:
        raise refused(path, "has several chat templates, but none has the name default")
    named = {name: source for name, source in sources.items() if name != "default"}
    return ChatTemplate(str(path), sources["default"], _tokens(tokenizer, tokens), named=named)


def _named(template: str | Path, tokenizer: Tokenizer, places: Sequence[str | Path]) -> ChatTemplate:
    """Find the template `template`: the name of a built-in template or of one of the model's templates, or a file."""
    if str(template) in BUILT_IN_NAMES:
        return _built_in(str(template), tokenizer)
    if not os.path.exists(template):
        own = template_of(tokenizer, *places)
        if own and str(template) in own.named:
            return replace(own, name=f"{own.name} ({template})", source=own.named[str(template)], named={})
        names = ", ".join((*BUILT_IN_NAMES, *(own.named if own else ())))
        raise refused(template, f"is neither a file nor the name of a chat template: expected a file or one of {names}")
    path, tokens = Path(template), {}
    for place in map(Path, places):
        if tokens := stated_tokens(place if place.is_dir() else place.parent):
            break
    return ChatTemplate(str(path), _read(path), _tokens(tokenizer, tokens))


def _built_in(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source = (BUILT_IN / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(f"built-in {name}.jinja", source, _tokens(tokenizer, {}))


def _read(path: Path) -> str:
    file = MappedFile(path)
    if file.size > LARGEST:
        raise refused(path, f"has a chat template of more than {LARGEST} bytes")
    try:
        return file.bytes(0, file.size).decode()
    except UnicodeDecodeError as error:
        raise refused(path, f"is not a chat template: byte {error.start} is not UTF-8") from None


def _by_name(stated: object, path: Path) -> dict[str, str]:
    """Read chat_template of a tokenizer_config.json: one template, or several templates by name."""
    if isinstance(stated, list):
        entries = [entry for entry in stated if isinstance(entry, dict)]
        stated = {entry["name"]: entry.get("template") for entry in entries if isinstance(entry.get("name"), str)}
    sources = {}
    for name, source in (stated if isinstance(stated, dict) else {"default": stated}).items():
        if not isinstance(source, str):
            raise refused(path, f"expected a string as chat_template, got {short(source)}")
        if not re.fullmatch(r"[\w-]{1,100}", name, re.ASCII):  # names become file names
            raise refused(
                path, f"expected the name of a chat template to have only letters, digits, - and _, got {short(name)}"
            )
        sources[name] = source
    return sources


def _tokens(tokenizer: Tokenizer, stated: Mapping[str, str | None]) -> dict[str, str]:
    """Return the strings of bos_token, eos_token and other tokens for a template.

    We use the strings in `stated`, which come from files. If they lack bos_token or eos_token, we use the tokenizer's
    BOS, and its control token that ends a turn.
    """
    end = next((name for name in END_OF_TURN if name in tokenizer.special), None)
    begin = None if tokenizer.bos is None else tokenizer.piece(tokenizer.bos)
    tokens = {"bos_token": begin, "eos_token": end, **stated}
    return {name: token for name, token in tokens.items() if token is not None}
