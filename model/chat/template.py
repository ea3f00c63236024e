"""Renders a conversation as text, by the template that came with a model, and encodes that text.

Special tokens that the template writes become their ids. Messages may spell the same names, and these stay text
wherever the template puts them: messages are disguised before they are rendered. A disguise replaces the first
character of such names by half of a surrogate pair, which no text can hold.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

from model.checkpoints.checkpoint import os_errors, refused
from model.checkpoints.mapped import MappedFile
from model.checkpoints.recognize import GGUF
from model.checkpoints.strict_json import short
from model.tokenizers.tokenizer import Tokenizer, check_text
from model.tokenizers.tokenizer_config import read_config

END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "</s>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>")

LARGEST = 1 << 20  # bytes of a template; the longest known has 30 thousand
SECONDS = 2.0  # for a rendering; a good one takes a hundredth of this
SECONDS_TO_START = 30.0  # for Python and Jinja, from a disk that may be slow
LONGEST_ANSWER = 50_000_000  # bytes; the worker allows 4 million characters, of at most 12 bytes each
LONGEST_ERROR = 300  # characters

BUILT_IN = Path(__file__).with_name("templates")
# The control tokens that suggest a built-in template, the most telling first.
SUGGESTED_BY = {
    "llama3": {"<|start_header_id|>"},
    "chatml": {"<|im_start|>", "<|im_end|>"},
    "mistral": {"[INST]", "[/INST]"},
    "llama2": {"<s>", "</s>"},
}
BUILT_IN_NAMES = (*SUGGESTED_BY, "vicuna")
WORKER = Path(__file__).with_name("template_worker.py")
# Python runs isolated, without PYTHONPATH and the user's site-packages, so we pass the place of Jinja.
START = "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"

# White space as the tokenizers library has it, which leaves out U+001C to U+001F.
WHITE = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
WHITE_AT_START, WHITE_AT_END = re.compile(rf"\A{WHITE}+"), re.compile(rf"{WHITE}+\Z")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A template in the Jinja language, rendered as transformers does."""

    name: str  # for messages: the file that it is from
    source: str = field(repr=False)
    tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token and eos_token, where the model has them
    note: str | None = None  # a line for the person who chats, where the model came without a template

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Render the conversation as text, ready for the assistant's answer.

        The template runs in a process of its own, which takes a tenth of a second and is stopped if it takes too much.
        Raises CheckpointError, one line that names the template, also where the template refuses the conversation.
        """
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        request = {"source": self.source, "variables": given | dict(self.tokens) | variables}
        try:
            answer, status = _run_worker(json.dumps(request).encode())
        except OSError as error:
            raise refused(self.name, f"cannot be rendered: {error}") from error
        try:
            said = json.loads(answer)
        except ValueError:  # The process was stopped, or crashed. Its status is a negative signal number.
            slow = -status in (signal.SIGKILL, signal.SIGXCPU)
            what = f"takes more than {SECONDS:.0f} seconds" if slow else f"ends its process with status {status}"
            raise refused(self.name, what) from None
        if "error" in said:
            raise refused(self.name, said["error"][:LONGEST_ERROR])
        return said["text"]


def find_template(tokenizer: Tokenizer, *places: str | Path, template: str | Path | None = None) -> ChatTemplate:
    """The chat template for a tokenizer: the one that `template` names, else the first one in `places`.

    `template` is one of `BUILT_IN_NAMES`, or a file. Without it, and where no place has a template, the control tokens
    of the tokenizer decide which built-in one is taken, and its `note` says so. Raises CheckpointError if there is
    none, or if it cannot be used.
    """
    if template is not None:
        return _named(template, tokenizer, places)
    if found := template_of(tokenizer, *places):
        return found
    where = places[0] if places else "the model"
    choices = f"{', '.join(BUILT_IN_NAMES)}, or a file"
    for name, tokens in SUGGESTED_BY.items():
        if tokens <= tokenizer.special.keys():
            note = refused(where, f"no chat template comes with it. Its control tokens suggest {name}'s, which is used")
            return replace(_built_in(name, tokenizer), note=f"{note}; --template chooses another: {choices}")
    what = "no chat_template.jinja, none in tokenizer_config.json, and no control tokens that suggest one"
    raise refused(where, f"has no chat template: {what}; --template chooses one: {choices}")


def template_of(tokenizer: Tokenizer, *places: str | Path) -> ChatTemplate | None:
    """The template in the first of `places` that has one; None where none has.

    A place is a directory, or a file in it: the tokenizer's, or the model's. A template is in the file itself (GGUF),
    in chat_template.jinja or in tokenizer_config.json. Raises CheckpointError if it cannot be used.
    """
    for place in map(Path, places):
        found = _in_directory(place, tokenizer) if place.is_dir() else _in_file(place, tokenizer)
        if found:
            return found
    return None


class SpecialTokens:
    """Tells the special tokens that a template writes from the same characters in messages."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        names = sorted((name for name in tokenizer.special if name), key=len, reverse=True)
        any_name = "|".join(map(re.escape, names)) or "(?!)"
        self._split = re.compile(f"({any_name})")
        self._begin = re.compile(f"(?={any_name}).", re.DOTALL)
        # We use low halves alone, since JSON would make one character of a high and a low one.
        firsts = sorted({name[0] for name in names})
        if len(firsts) > 0x400:
            raise ValueError(f"special tokens that begin with {len(firsts)} different characters are too many")
        self._disguise = {ord(first): 0xDC00 + i for i, first in enumerate(firsts)}
        self._reveal = {half: first for first, half in self._disguise.items()}

    def disguise(self, text: str) -> str:
        """Disguise a person's text, so that neither a part of it nor parts put together spell a special token.

        Raises ValueError where `text` is not valid Unicode.
        """
        check_text(text)
        return text.translate(self._disguise)

    def disguise_names(self, text: str) -> str:
        """Disguise special tokens in the model's text. All else stays, such as "<think>", which templates look for."""
        return self._begin.sub(lambda match: match[0].translate(self._disguise), text)

    def encode(self, text: str, *, after: str = "") -> list[int]:
        """The ids of `text`, which a template rendered from disguised messages and which continues the text `after`."""
        parts = self._split.split(text)
        before = self._split.split(after)
        # A special token at the end of `after` stands just before the empty last part of the split.
        previous = before[-2] if len(before) > 1 and not before[-1] else None
        within = bool(before[-1])
        ids = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._tokenizer.special[part])
                previous, within = part, False
                continue
            following = parts[i + 1] if i + 1 < len(parts) else None
            if self._absorbs(previous)[1]:
                part = WHITE_AT_START.sub("", part)
            if self._absorbs(following)[0]:
                part = WHITE_AT_END.sub("", part)
            if not part:
                continue
            plain = part.translate(self._reveal)
            if previous is not None:
                ids += self._tokenizer.encode_after_special(plain)
            else:
                ids += self._tokenizer.encode(plain, start=not within)
        return ids

    def _absorbs(self, name: str | None) -> tuple[bool, bool]:
        """Whether a special token takes in white space before it, and after it."""
        return (False, False) if name is None else self._tokenizer.absorbs.get(name, (False, False))

    def tail(self, text: str) -> str:
        """The text after the last special token."""
        return self._split.split(text)[-1].translate(self._reveal)


def _in_file(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template inside a GGUF file, else the one beside it."""
    with os_errors(path):
        if path.is_file() and (file := MappedFile(path)).bytes(0, len(GGUF)) == GGUF:
            from model.tokenizers.gguf import read_template

            if found := read_template(file):
                return _checked(path, *found, tokenizer)
    return _in_directory(path.parent, tokenizer)


def _in_directory(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    config_path, path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    with os_errors(folder):
        config = read_config(folder)
        source = _read(path) if path.exists() else None
    if source is None:
        path, source = config_path, _default(config.get("chat_template"), config_path)
    if source is None:
        return None
    return _checked(path, source, _stated_tokens(config, config_path), tokenizer)


def _checked(path: Path, source: str, tokens: Mapping[str, str], tokenizer: Tokenizer) -> ChatTemplate:
    if len(source.encode(errors="surrogatepass")) > LARGEST:
        raise refused(path, f"its chat template has more than {LARGEST} bytes")
    return ChatTemplate(str(path), source, _named_tokens(tokenizer) | dict(tokens))


def _named(template: str | Path, tokenizer: Tokenizer, places: Sequence[str | Path]) -> ChatTemplate:
    """The built-in template of this name, or the one in this file."""
    if str(template) in BUILT_IN_NAMES:
        return _built_in(str(template), tokenizer)
    if not os.path.exists(template):
        raise refused(template, f"no such file, and no built-in chat template: {', '.join(BUILT_IN_NAMES)}")
    path, tokens = Path(template), _named_tokens(tokenizer)
    for place in map(Path, places):
        folder = place if place.is_dir() else place.parent
        if config := read_config(folder):
            tokens |= _stated_tokens(config, folder / "tokenizer_config.json")
            break
    return ChatTemplate(str(path), _read(path), tokens)


def _built_in(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source = (BUILT_IN / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(f"built-in {name}.jinja", source, _named_tokens(tokenizer))


def _read(path: Path) -> str:
    file = MappedFile(path)
    if file.size > LARGEST:
        raise refused(path, f"its chat template has more than {LARGEST} bytes")
    try:
        return file.bytes(0, file.size).decode()
    except UnicodeDecodeError as error:
        raise refused(path, f"is not a template: byte {error.start} is not UTF-8") from None


def _default(stated: object, path: Path) -> str | None:
    """The template of a tokenizer_config.json, which may have several by name."""
    if isinstance(stated, list):
        entries = [entry for entry in stated if isinstance(entry, dict)]
        named = {entry["name"]: entry.get("template") for entry in entries if isinstance(entry.get("name"), str)}
        if "default" not in named:
            raise refused(path, "none of its chat templates is the default")
        stated = named["default"]
    if stated is not None and not isinstance(stated, str):
        raise refused(path, f"chat_template is {short(stated)}, not a text")
    return stated


def _stated_tokens(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The tokens that a tokenizer_config.json names; "" for one that it says there is not."""
    tokens = {}
    for key in ("bos_token", "eos_token"):
        if key in config:
            token = config[key]
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str | None):
                raise refused(path, f"{key} is {short(token)}, not a text")
            tokens[key] = token or ""
    return tokens


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    tokens = {} if tokenizer.bos is None else {"bos_token": tokenizer.piece(tokenizer.bos)}
    end = next((name for name in END_OF_TURN if name in tokenizer.special), None)
    return tokens if end is None else tokens | {"eos_token": end}


def _run_worker(request: bytes) -> tuple[bytes, int]:
    """Run the worker. Returns its answer, whole or cut short, and its exit status; the process has ended by then."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    packages = {str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin}
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
    with subprocess.Popen(
        [sys.executable, "-I", "-c", START, WORKER, *packages],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # A person's Ctrl-C is meant for this process.
    ) as worker:
        assert worker.stdin and worker.stdout
        try:
            _within(SECONDS_TO_START, worker, worker.stdout.readline)
            return _within(SECONDS, worker, lambda: _exchange(worker, request))
        finally:
            worker.kill()


def _within[T](seconds: float, worker: subprocess.Popen, action: Callable[[], T]) -> T:
    """The result of `action`, which reads from the worker. A worker that takes too long is killed: the stream ends."""
    timer = Timer(seconds, worker.kill)
    timer.start()
    try:
        return action()
    finally:
        timer.cancel()


def _exchange(worker: subprocess.Popen, request: bytes) -> tuple[bytes, int]:
    assert worker.stdin and worker.stdout
    with suppress(BrokenPipeError):  # The worker has ended, and its status says how.
        worker.stdin.write(request)
    with suppress(BrokenPipeError):
        worker.stdin.close()
    return worker.stdout.read(LONGEST_ANSWER), worker.wait()
