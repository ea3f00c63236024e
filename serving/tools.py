r"""Finds tool calls in a model's text. Each family of models writes tool calls in its own form:

- Hermes, Qwen 2.5 and 3: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, any number of times
- Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`
- gpt-oss: a message to a tool, on a separate channel (`model.chat.channels`)
- Llama 3.1 and later: the whole answer is `{"name": ..., "parameters": {...}}`, or several with semicolons between,
  or the same after `<|python_tag|>`. A model with built-in tools sometimes writes "arguments".

A model uses the same form as its chat template uses for earlier calls. A call must name one of the request's tools.
Everything else is text.

Sources: https://github.com/NousResearch/Hermes-Function-Calling, https://docs.mistral.ai/capabilities/function_calling,
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1, https://github.com/openai/harmony.
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

LONGEST_NAME = 512  # largest number of characters of a call before its arguments
MOST_FORCED = 16  # largest number of forced calls in an answer, because a small model may never stop
SIGNS = re.compile(r'\\.|\\\Z|["{}\[\]]', re.DOTALL)  # the characters that decide where a JSON value ends


@dataclass(frozen=True)
class CallForm:
    """The form in which a family of models writes tool calls."""

    opens: str  # text before the calls; "": the answer begins with a call
    closes: str  # text after a call; "": its closing brace ends it
    between: str  # characters allowed between calls, in addition to white space
    arguments: tuple[str, ...]  # possible keys of the arguments, starting with the usual one
    listed: bool = False  # whether the calls of an answer are a JSON list
    tag: str = ""  # a control token that may precede a call
    on_channel: bool = False  # whether a call is a separate message that contains only the arguments

    def beginning(self, tools: Sequence[Tool]) -> str:
        """Return the text before a forced call.

        Raises Refusal if that text contains a tool's name and there are several tools.
        """
        if not self.on_channel:
            return self.opens + "\n" if self.closes else self.opens
        if len(tools) > 1:
            message = "tool_choice: this model cannot choose among several tools in a forced call: name one function"
            raise Refusal(message, param="tool_choice", code="unsupported_parameter")
        return f"{CHANNEL}commentary{TO_TOOL}{FUNCTIONS}{tools[0].function.name} {CONSTRAIN}json{MESSAGE}"

    def spelled(self, special: Mapping[str, int]) -> dict[int, str]:
        """Map the control tokens that mark tool calls to their spelling."""
        return {special[name]: name for name in (self.opens, self.closes, self.tag) if name in special}

    def separator(self) -> str:
        """Return the text between two calls, if the calls are not a JSON list."""
        return f"\n{self.closes}\n{self.beginning(())}" if self.closes else f"{self.between} "

    def schema(self, tools: Sequence[Tool], *, most: int = 1) -> dict[str, Any]:
        """Make the JSON schema of the text after `beginning`: a call of one of `tools`.

        If the calls are a JSON list, this is the schema of a list of at most `most` calls.
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
    """Recognize the form of tool calls from the source of a chat template.

    Returns None for a form that we cannot read.
    """
    if CHANNEL in template:
        return HARMONY if f'"{FUNCTIONS}"' in template or f"{TO_TOOL.strip()}{FUNCTIONS}" in template else None
    if HERMES.opens in template:
        is_xml = "<function=" in template or "<arg_key>" in template  # Qwen3-Coder and GLM write calls as XML
        return None if is_xml else HERMES
    if MISTRAL.opens in template:
        return None if "[ARGS]" in template else MISTRAL  # later templates of Mistral write the name outside the JSON
    return LLAMA if '"parameters"' in template else None


class OfferedTools(NamedTuple):
    """The tools that an answer may call."""

    tools: list[Tool]
    forced: bool  # whether the answer must call a tool
    most: int | None  # largest number of calls; None: no limit


def offered_tools(body: ChatRequest) -> OfferedTools:
    """Determine which tools an answer may call, and how often. Raises Refusal for an invalid combination of fields."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise Refusal("tools: expected different names, but two tools have the same name", param="tools")
    for i, tool in enumerate(tools):
        stated = (tool.function.parameters or {}).get("type", "object")
        if stated != "object":
            param = f"tools[{i}].function.parameters"
            raise Refusal(f"{param}: expected a schema of type object, got type {str(stated)[:64]}", param=param)
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise Refusal(
                f"tool_choice: the request has no tool named {choice.function.name[:64]}", param="tool_choice"
            )
    elif choice == "required" and not tools:
        raise Refusal("tool_choice: required needs at least one tool in tools", param="tool_choice")
    if choice == "none" or not tools:
        return OfferedTools([], False, None)
    if not isinstance(body.response_format, TextFormat | None):
        raise Refusal(
            "response_format cannot be combined with tools, unless tool_choice is none", param="response_format"
        )
    if body.answer_ids:
        raise Refusal("answer_ids cannot be combined with tools", param="answer_ids")
    # A client that names a function in tool_choice wants one call of that function.
    single = body.parallel_tool_calls is False or isinstance(choice, ToolChoice)
    forced = choice not in (None, "auto")
    return OfferedTools(tools, forced, 1 if single else MOST_FORCED if forced else None)


def _parameters(tool: Tool, number: int) -> dict[str, Any]:
    """Make the schema of a tool's arguments. It gets a unique `$id`, because two tools may have the same one."""
    parameters = tool.function.parameters
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"$id": f"urn:tool:{number}", "type": "object"} | with_pointers(parameters)


class TextAndCalls(NamedTuple):
    """A piece of an answer: text, followed by pieces of tool calls."""

    text: str
    calls: list[CallPiece]


class Balance:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self):
        """Start before the opening brace of the object."""
        self.ended = False
        self._depth = 0
        self._quoted = False
        self._escaped = False  # whether the next character follows a backslash

    def feed(self, text: str) -> int:
        """Process more text. Returns how many of its characters belong to the object."""
        begin = int(self._escaped)
        self._escaped = self._escaped and not text
        for match in SIGNS.finditer(text, begin):
            sign = match[0]
            if sign[0] == "\\":
                self._escaped = len(sign) == 1
            elif sign == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    self.ended = True
                    return match.end()
        return len(text)


class CallReader:
    """Separates tool calls from text in one answer, piece by piece.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, form: CallForm, names: frozenset[str], *, begun: bool = False, most: int | None = None):
        """Read calls of the tools with these `names`. `begun` says that the prompt already ends with `form.beginning`.

        Calls after the first `most` are dropped.
        """
        self.count = 0  # number of calls so far
        self._form = form
        self._names = names
        self._most = most
        self._pending = ""  # text that may belong to a call
        self._before = ""  # text just before the current object
        self._object: str | None = None
        self._called = False  # whether the latest object was a call, and no new `opens` has followed
        self._balance = Balance()
        self._arguments: Balance | None = None  # finds the end of the current call's arguments
        self._calling = begun or not form.opens
        self._output = TextAndCalls("", [])
        key = "|".join(map(re.escape, form.arguments))
        self._begins = re.compile(
            rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:{key})"\s*:\s*(?=\{{)'
        )

    @property
    def is_complete(self) -> bool:
        """True if the answer has at least one call so far, and its last call is complete."""
        is_cut = self._object is not None and self._arguments is not None and self._shows()
        return self.count > 0 and not is_cut

    def feed(self, text: str) -> TextAndCalls:
        """Process new text, and return the text and calls that are certain."""
        self._output = TextAndCalls("", [])
        self._pending += text
        while self._step():
            pass
        return self._output

    def finish(self) -> TextAndCalls:
        """End the answer, and release the text that was held back."""
        self._output = TextAndCalls("", [])
        if self._object is not None:
            self._add_text(self._before + self._object if self._arguments is None else "")
        elif not self._called:
            self._add_text(self._before + self._pending)
        elif not self._calling:
            self._add_text(self._pending.rstrip())
        return self._output

    def _step(self) -> bool:
        """Process pending text. Returns False if more text is needed."""
        if self._object is not None:
            return self._read_object()
        return self._seek_object() if self._calling else self._seek_opening()

    def _seek_opening(self) -> bool:
        opens = self._form.opens or self._form.tag
        at = self._pending.find(opens) if opens else -1
        if at >= 0:
            text = self._pending[:at].rstrip()
            self._add_text(text)
            self._before = opens if self._called else self._pending[len(text) : at] + opens
            self._pending, self._calling, self._called = self._pending[at + len(opens) :], True, False
            return True
        sizes = range(min(len(opens) - 1, len(self._pending)), 0, -1)
        overlap = next((size for size in sizes if self._pending.endswith(opens[:size])), 0)
        certain = len(self._pending[: len(self._pending) - overlap].rstrip())
        self._add_text(self._pending[:certain])
        self._pending = self._pending[certain:]
        return False

    def _seek_object(self) -> bool:
        """Skip white space and marks that may come before a call. Returns False if more text is needed."""
        form = self._form
        between = re.match(rf"[\s{re.escape(form.between)}]*", self._pending)
        assert between is not None
        self._before += between[0]
        self._pending = self._pending[between.end() :]
        if not self._pending:
            return False
        if self._pending[0] == "{":
            self._object, self._balance, self._arguments = "", Balance(), None
            return True
        if any(mark.startswith(self._pending) and self._pending != mark for mark in (form.closes, form.tag)):
            return False
        if form.tag and self._pending.startswith(form.tag):
            self._before = form.tag if self._called else self._before + form.tag
            self._pending, self._called = self._pending[len(form.tag) :], False
            return True
        if form.closes and self._pending.startswith(form.closes):
            self._before += form.closes
            self._pending = self._pending[len(form.closes) :]
        if not self._called:
            self._add_text(self._before)
        self._before, self._calling = "", False
        return True

    def _read_object(self) -> bool:
        assert self._object is not None
        count = self._balance.feed(self._pending)
        new, self._pending = self._pending[:count], self._pending[count:]
        self._object += new
        if self._arguments is not None:
            self._add_arguments(new)
        elif (match := self._begins.match(self._object[:LONGEST_NAME])) and self._names_tool(match[1]):
            self._arguments = Balance()
            self._call(json.loads(match[1]), "")
            self._add_arguments(self._object[match.end() :])
        if not self._balance.ended:
            return False
        if self._arguments is None and not self._read_whole():
            self._add_text(self._before + self._object)
            self._called = False
        self._object, self._before = None, ""
        return True

    def _names_tool(self, quoted: str) -> bool:
        try:
            return json.loads(quoted) in self._names
        except ValueError:
            return False

    def _add_arguments(self, text: str) -> None:
        """Add `text` to the arguments of the current call."""
        assert self._arguments is not None
        if not self._arguments.ended and (part := text[: self._arguments.feed(text)]):
            self._call(None, part)

    def _read_whole(self) -> bool:
        """Parse a complete object as a call, with its keys in any order. Returns False if it is not a call."""
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
            self._output.calls.append(CallPiece(self.count - 1, name, arguments))

    def _shows(self) -> bool:
        """True if the latest call is one of the first `most` calls, which we return."""
        return self._most is None or self.count <= self._most

    def _add_text(self, text: str) -> None:
        self._output = self._output._replace(text=self._output.text + text)
