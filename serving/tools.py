r"""Calls of tools in a model's text, in the forms that families write them:

- Hermes, Qwen 2.5 and 3: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, any number of times
- Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`
- gpt-oss: a message to a tool, on a channel of its own (`model.chat.channels`)
- Llama 3.1 and later: an answer that is `{"name": ..., "parameters": {...}}`, or several with semicolons between, or
  the same after `<|python_tag|>`. Where it has tools of its own as well, it writes "arguments" at times.

The form that a model writes is the one in which its template spells earlier calls. A call names one of the request's
tools. Whatever does not is text.

Sources: https://github.com/NousResearch/Hermes-Function-Calling,
https://docs.mistral.ai/capabilities/function_calling,
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1,
https://github.com/openai/harmony.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llamaspec.model.chat.channels import CHANNEL, CONSTRAIN, FUNCTIONS, MESSAGE, TO_TOOL
from llamaspec.serving.openai import ChatRequest, Refusal, TextFormat, Tool, ToolChoice
from llamaspec.serving.schemas import with_pointers
from llamaspec.serving.streaming import CallPiece

LONGEST_NAME = 512  # characters of a call before its arguments
MOST_FORCED = 16  # calls of an answer that must call: a grammar without an end lets a small model go on for ever
SIGNS = re.compile(r'\\.|\\\Z|["{}\[\]]', re.DOTALL)  # all that matters to where a JSON value ends


@dataclass(frozen=True)
class CallForm:
    """A way to write calls."""

    opens: str  # text before calls; "": an answer that begins with a call is one
    closes: str  # text after a call; "": the brace alone ends it
    between: str  # characters that may stand between calls, besides white space
    arguments: tuple[str, ...]  # the keys that the arguments come under, the usual one first
    listed: bool = False  # whether the calls of an answer are a list of JSON
    tag: str = ""  # a control token that may stand before a call
    on_channel: bool = False  # whether a call is a message of its own, whose text is the arguments alone

    def beginning(self, tools: Sequence[Tool]) -> str:
        """Give the text that a forced call of one of `tools` follows. Raises Refusal where it must name the tool."""
        if not self.on_channel:
            return self.opens + "\n" if self.closes else self.opens
        if len(tools) > 1:
            message = "tool_choice: this model names a tool before its arguments: name one function, or offer one tool"
            raise Refusal(message, param="tool_choice", code="unsupported_parameter")
        return f"{CHANNEL}commentary{TO_TOOL}{FUNCTIONS}{tools[0].function.name} {CONSTRAIN}json{MESSAGE}"

    def spelled(self, special: Mapping[str, int]) -> dict[int, str]:
        """List the control tokens of a tokenizer that calls are told by."""
        return {special[name]: name for name in (self.opens, self.closes, self.tag) if name in special}

    def separator(self) -> str:
        """Give the text from one call to the next, where calls are not listed."""
        return f"\n{self.closes}\n{self.beginning(())}" if self.closes else f"{self.between} "

    def schema(self, tools: Sequence[Tool], *, most: int = 1) -> dict[str, Any]:
        """Make the JSON schema of a call of any of `tools`, as it is written after `beginning`.

        Where calls are listed, it is the schema of a list of `most` calls at most.
        """
        if self.on_channel:
            return _parameters(tools[0], 0)
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, self.arguments[0]: _parameters(tool, i)},
                "required": ["name", self.arguments[0]],
                "additionalProperties": False,
            }
            for i, tool in enumerate(tools)
        ]
        call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {"type": "array", "minItems": 1, "maxItems": most, "items": call} if self.listed else call


HERMES = CallForm("<tool_call>", "</tool_call>", "", ("arguments",))
MISTRAL = CallForm("[TOOL_CALLS]", "", "[,]", ("arguments",), listed=True)
LLAMA = CallForm("", "", ";", ("parameters", "arguments"), tag="<|python_tag|>")
HARMONY = CallForm("", "", "", (), on_channel=True)


def form_of(template: str) -> CallForm | None:
    """Find the form of calls that a template's source spells; None for one that we cannot read."""
    if CHANNEL in template:
        return HARMONY if f'"{FUNCTIONS}"' in template or f"{TO_TOOL.strip()}{FUNCTIONS}" in template else None
    if HERMES.opens in template:
        is_xml = "<function=" in template or "<arg_key>" in template  # as Qwen3-Coder and GLM write
        return None if is_xml else HERMES
    if MISTRAL.opens in template:
        return None if "[ARGS]" in template else MISTRAL  # Mistral's later templates write names outside of JSON
    return LLAMA if '"parameters"' in template else None


class Wanted(NamedTuple):
    """The tools that an answer may call."""

    tools: list[Tool]
    forced: bool  # whether it must call
    most: int | None  # calls; None: as many as it likes


def wanted_tools(body: ChatRequest) -> Wanted:
    """Find which tools an answer may call, and how often. Raises Refusal."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise Refusal("tools: two have one name", param="tools")
    for i, tool in enumerate(tools):
        stated = (tool.function.parameters or {}).get("type", "object")
        if stated != "object":
            param = f"tools[{i}].function.parameters"
            raise Refusal(f"{param}: arguments are an object, not of type {str(stated)[:64]}", param=param)
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise Refusal(f"tool_choice: no tool is named {choice.function.name[:64]}", param="tool_choice")
    elif choice == "required" and not tools:
        raise Refusal("tool_choice: required needs tools", param="tool_choice")
    if choice == "none" or not tools:
        return Wanted([], False, None)
    if not isinstance(body.response_format, TextFormat | None):
        raise Refusal("response_format: not together with tools, but for tool_choice none", param="response_format")
    if body.answer_ids:
        raise Refusal("answer_ids: not together with tools", param="answer_ids")
    # Whoever names a function wants it called, not called again and again.
    single = body.parallel_tool_calls is False or isinstance(choice, ToolChoice)
    forced = choice not in (None, "auto")
    return Wanted(tools, forced, 1 if single else MOST_FORCED if forced else None)


def _parameters(tool: Tool, number: int) -> dict[str, Any]:
    """Make the schema of a tool's arguments. Its `$id` is unique, because two tools may come with the same one."""
    parameters = tool.function.parameters
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"$id": f"urn:tool:{number}", "type": "object"} | with_pointers(parameters)


class Said(NamedTuple):
    """A piece of an answer: text, and pieces of calls after it."""

    text: str
    calls: list[CallPiece]


class Balance:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self):
        """Begin before the object's brace."""
        self.ended = False
        self._depth = 0
        self._quoted = False
        self._escaped = False  # whether the next character follows a backslash

    def feed(self, text: str) -> int:
        """Take text, and return how many of its characters belong to the object."""
        begin = int(self._escaped)
        self._escaped = self._escaped and not text
        for found in SIGNS.finditer(text, begin):
            sign = found[0]
            if sign[0] == "\\":
                self._escaped = len(sign) == 1
            elif sign == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    self.ended = True
                    return found.end()
        return len(text)


class CallReader:
    """Tells calls from text in one answer, as it comes. Pieces put together do not depend on where they were cut."""

    def __init__(self, form: CallForm, names: frozenset[str], *, begun: bool = False, most: int | None = None):
        """Read calls of tools with these `names`. The answer may have `begun` with the form's `beginning`.

        Calls after the first `most` are left out.
        """
        self.count = 0  # calls
        self._form = form
        self._names = names
        self._most = most
        self._rest = ""  # text that is not certain
        self._before = ""  # of the object that is being read: what led to it
        self._object: str | None = None
        self._called = False  # whether the latest object was a call, and no opening has followed
        self._balance = Balance()
        self._arguments: Balance | None = None  # of the call that has begun
        self._calling = begun or not form.opens
        self._said = Said("", [])
        key = "|".join(map(re.escape, form.arguments))
        self._begins = re.compile(
            rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:{key})"\s*:\s*(?=\{{)'
        )

    @property
    def whole(self) -> bool:
        """Whether the answer has calls so far, and the last one of them is whole."""
        is_cut = self._object is not None and self._arguments is not None and self._shows()
        return self.count > 0 and not is_cut

    def feed(self, text: str) -> Said:
        """Take new text."""
        self._said = Said("", [])
        self._rest += text
        while self._step():
            pass
        return self._said

    def finish(self) -> Said:
        """End the answer: nothing follows, so text that stayed back comes out."""
        self._said = Said("", [])
        if self._object is not None:
            self._say(self._before + self._object if self._arguments is None else "")
        elif not self._called:
            self._say(self._before + self._rest)
        elif not self._calling:
            self._say(self._rest.rstrip())
        return self._said

    def _step(self) -> bool:
        """Read on; False once more text is needed."""
        if self._object is not None:
            return self._read_object()
        return self._seek_object() if self._calling else self._seek_opening()

    def _seek_opening(self) -> bool:
        opens = self._form.opens or self._form.tag
        at = self._rest.find(opens) if opens else -1
        if at >= 0:
            text = self._rest[:at].rstrip()
            self._say(text)
            self._before = opens if self._called else self._rest[len(text) : at] + opens
            self._rest, self._calling, self._called = self._rest[at + len(opens) :], True, False
            return True
        sizes = range(min(len(opens) - 1, len(self._rest)), 0, -1)
        held = next((size for size in sizes if self._rest.endswith(opens[:size])), 0)
        certain = len(self._rest[: len(self._rest) - held].rstrip())
        self._say(self._rest[:certain])
        self._rest = self._rest[certain:]
        return False

    def _seek_object(self) -> bool:
        """Skip what may stand before a call."""
        form = self._form
        between = re.match(rf"[\s{re.escape(form.between)}]*", self._rest)
        assert between is not None
        self._before += between[0]
        self._rest = self._rest[between.end() :]
        if not self._rest:
            return False
        if self._rest[0] == "{":
            self._object, self._balance, self._arguments = "", Balance(), None
            return True
        if any(mark.startswith(self._rest) and self._rest != mark for mark in (form.closes, form.tag)):
            return False
        if form.tag and self._rest.startswith(form.tag):
            self._before = form.tag if self._called else self._before + form.tag
            self._rest, self._called = self._rest[len(form.tag) :], False
            return True
        if form.closes and self._rest.startswith(form.closes):
            self._before += form.closes
            self._rest = self._rest[len(form.closes) :]
        if not self._called:
            self._say(self._before)
        self._before, self._calling = "", False
        return True

    def _read_object(self) -> bool:
        assert self._object is not None
        taken = self._balance.feed(self._rest)
        new, self._rest = self._rest[:taken], self._rest[taken:]
        self._object += new
        if self._arguments is not None:
            self._argue(new)
        elif (found := self._begins.match(self._object[:LONGEST_NAME])) and self._names_tool(found[1]):
            self._arguments = Balance()
            self._call(json.loads(found[1]), "")
            self._argue(self._object[found.end() :])
        if not self._balance.ended:
            return False
        if self._arguments is None and not self._read_whole():
            self._say(self._before + self._object)
            self._called = False
        self._object, self._before = None, ""
        return True

    def _names_tool(self, quoted: str) -> bool:
        try:
            return json.loads(quoted) in self._names
        except ValueError:
            return False

    def _argue(self, text: str) -> None:
        """Take more of a call's arguments."""
        assert self._arguments is not None
        if not self._arguments.ended and (part := text[: self._arguments.feed(text)]):
            self._call(None, part)

    def _read_whole(self) -> bool:
        """Read a call whose keys stand in another order; False where it is none."""
        try:
            call = json.loads(self._object or "")
        except (ValueError, RecursionError):
            return False
        name = call.get("name")
        arguments = next((call[key] for key in self._form.arguments if key in call), {})
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return False
        self._call(name, json.dumps(arguments))
        return True

    def _call(self, name: str | None, arguments: str) -> None:
        if name is not None:
            self.count += 1
            self._called = True
        if self._shows():
            self._said.calls.append(CallPiece(self.count - 1, name, arguments))

    def _shows(self) -> bool:
        """Whether the latest call is not one of those that are left out."""
        return self._most is None or self.count <= self._most

    def _say(self, text: str) -> None:
        self._said = self._said._replace(text=self._said.text + text)
