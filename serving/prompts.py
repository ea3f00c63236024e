"""Turns texts, token ids and conversations into prompts. A conversation is rendered by the model's own chat template.

Text from users never becomes special tokens, neither in a conversation nor in a plain prompt.
"""

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from llamaspec.model.chat.channels import CHANNEL, END_OF_THOUGHTS, MESSAGE, has_harmony, is_thinking
from llamaspec.model.chat.chat import LONGEST_TOKEN
from llamaspec.model.chat.marked_text import MarkedText
from llamaspec.model.chat.template import (
    OWN_VARIABLES,
    CannotRender,
    ChatTemplate,
    SpecialTokens,
    check_options,
    turn_stops,
)
from llamaspec.model.chat.template_process import Workers
from llamaspec.model.tokenizers.tokenizer import Tokenizer, check_text, check_texts, decode, encode_text
from llamaspec.serving.openai import Message, Refusal, RefusalPart, TextPart, Tool, ToolCall
from llamaspec.serving.tools import CallForm, form_of

UNSUPPORTED = "unsupported_parameter"
EFFORT = "reasoning_effort"  # a variable of chat templates that OpenAI's API has a field for
FINAL = f"{CHANNEL}final{MESSAGE}"  # the header of an answer, for a model with channels
# A tool with all fields that templates read. A template supports tools if its output contains this tool.
PROBE_ARGUMENTS = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}, "required": ["a"]}
PROBE = {"type": "function", "function": {"name": "c", "description": "d", "parameters": PROBE_ARGUMENTS}}

SIGNS_AND_COMMAS = re.compile(r'\\.|["{}\[\],]', re.DOTALL)  # the characters that decide how JSON may continue
Brackets = tuple | None  # a linked list of open brackets: (closing sign of the innermost, outer brackets)
CUT_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,3})?\Z")
# A conversation with two calls in one message, with different names.
SECOND = "second_call"
IDS = ("callnum01", "callnum02")
PROBE_CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": {"a": "b"}}}
            for id, name in zip(IDS, ("c", SECOND), strict=True)
        ],
    },
    *({"role": "tool", "tool_call_id": id, "content": "d"} for id in IDS),
]


class Prompt(NamedTuple):
    """An encoded prompt, and what the server needs to know about its answer."""

    ids: list[int]
    begins: bool  # whether the answer begins a text, so that its leading space is dropped
    stops: frozenset[int]  # ids that end the answer
    begun: tuple[int, ...] = ()  # ids at the end of `ids` that already belong to the answer
    calls: CallForm | None = None  # how the model writes tool calls, if the answer may contain some
    param: str = "prompt"  # the request field that contains the prompt


class Prompts:
    """Makes prompts for one model. Each method may take a tenth of a second, so call it in a thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None,
        stops: frozenset[int],
        context: int,
        vocab: int,
    ):
        """Make prompts for a model with this `context` and `vocab`. `stops` are the ids that end a plain text."""
        self.tokenizer = tokenizer
        self._workers = Workers()
        self.template = template and replace(template, workers=self._workers)
        self.stops = stops
        self._context = context
        self._vocab = vocab
        self._special = SpecialTokens(tokenizer)
        self._has_channels = has_harmony(tokenizer)
        self._call_form: CallForm | None = None  # None until it is needed
        self._two_calls: dict[
            bool, bool
        ] = {}  # key: whether the request has tools; value: whether a message may have two calls
        # The model never writes tokens beyond its vocabulary, although a tokenizer may have a few.
        self.turn_stops = stops | {id for id in turn_stops(tokenizer, template) if id < vocab}

    def close(self) -> None:
        """End the processes that render the template."""
        self._workers.close()

    def from_text(self, text: str, *, bos: bool = True, param: str = "prompt", is_complete: bool = False) -> Prompt:
        """Encode a text, with BOS first if `bos` is set and the model uses BOS.

        If `is_complete`, no answer will continue the text, so we append the ids that the tokenizer puts at the end of a
        text. Raises Refusal.
        """
        self._check_characters(text, param)
        ids = list(self._checked(encode_text(self.tokenizer, text, bos=bos), param))
        appended = self.tokenizer.appended if is_complete else ()
        return Prompt([*ids, *appended], text == "", self.stops, param=param)

    def from_ids(self, ids: Sequence[int], *, param: str = "prompt") -> Prompt:
        """Make a prompt from token ids. Raises Refusal for an id outside the vocabulary."""
        begins = not any(self.tokenizer.bytes_of(token) for token in self._checked(ids, param))
        return Prompt(list(ids), begins, self.stops, param=param)

    def from_messages(
        self,
        messages: Sequence[Message],
        *,
        begun: Sequence[int] = (),
        tools: Sequence[Tool] = (),
        forced: bool = False,
        formatted: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """Render a conversation up to the assistant's answer, and append `begun`, the first ids of the answer.

        The answer may call `tools`. If `forced`, the prompt ends with the start of a call. If `formatted`, a grammar
        restricts the answer, so a model that reasons must not write its reasoning. `options` are additional variables
        of the template. Raises Refusal if the model has no template, or if the template does not accept the
        conversation, the tools or an option.
        """
        self._check_options(options)
        calls = self._calls() if tools else None
        try:
            offered = [_for_template(tool) for tool in tools] or None
            turns = [self._as_read(message, f"messages[{i}]") for i, message in enumerate(messages)]
            if any(len(turn.get("tool_calls", ())) > 1 for turn in turns) and not self._writes_two_calls(offered):
                turns = one_call_each(turns)
            text = self._rendered(turns, tools=offered, **options)
        except RecursionError:
            raise Refusal("tools or tool calls are nested too deeply", param="tools" if tools else "messages") from None
        self._check_characters(text, "messages", check=False)
        ids = self._checked(self._special.encode(text), "messages")
        begun = self._checked(begun, "answer_ids")
        beginning = calls.beginning(tools) if calls and forced else FINAL if formatted and self._has_channels else ""
        if (forced or formatted) and is_thinking(self.tokenizer, ids):  # the grammar does not allow reasoning
            beginning = f"\n{END_OF_THOUGHTS}\n\n{beginning}"
        if beginning and not begun:
            begun = tuple(self._special.encode(beginning, after=text))
            text += beginning
        return Prompt([*ids, *begun], self._special.tail(text) == "", self.turn_stops, begun, calls, "messages")

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode all tokens of a text."""
        return decode(self.tokenizer, ids)

    def _checked(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        for token in ids:
            if not 0 <= token < self._vocab:
                raise Refusal(f"{param}: expected token ids from 0 to {self._vocab - 1}, got {token}", param=param)
        return tuple(ids)

    def _check_characters(self, text: str, param: str, *, check: bool = True) -> None:
        """Raise Refusal for a text that is certainly too long for the context, or that is not valid Unicode."""
        if len(text) > self._context * LONGEST_TOKEN:
            raise too_long(f"{len(text):,} characters", self._context, param)
        if check:
            try:
                check_text(text)
            except ValueError as error:
                raise Refusal(str(error), param=param) from None

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise Refusal for an option that the chat template does not read, because its name may be misspelled."""
        if self.template is None:
            return  # `_rendered` refuses a request that needs a missing template
        for name in options:
            param = name if name == EFFORT else "chat_template_kwargs"
            if name in OWN_VARIABLES:
                message = f"{param}: the server sets {name} from the conversation, so it cannot be an option"
                raise Refusal(message, param=param, code=UNSUPPORTED)
            try:
                if name == "self":  # reserved by Jinja
                    raise ValueError
                check_options(self.template, [name])
            except ValueError:
                message = f"{param}: this model's chat template does not read an option {name[:64]}"
                raise Refusal(message, param=param, code=UNSUPPORTED) from None

    def _rendered(self, messages: Sequence[dict[str, Any]], **variables: Any) -> MarkedText:
        if self.template is None:
            raise Refusal("this model has no chat template: use /v1/completions, or start the server with --template")
        try:
            return self.template.render(messages, **variables)
        except ValueError as error:  # clients must not see the template's path
            reason = f"the chat template {str(error).removeprefix(f'{self.template.name}: ')}"
            if isinstance(error, CannotRender):
                raise Refusal(reason, status=503, code="busy", headers={"Retry-After": "5"}) from None
            raise Refusal(f"messages: {reason}", param="messages") from None

    def _calls(self) -> CallForm:
        """Return the form that the template uses for tool calls.

        Raises Refusal if the template has no form that we can read.
        """
        if self._call_form is None:
            probe = [{"role": "user", "content": "a"}]
            if self._rendered(probe) == self._rendered(probe, tools=[PROBE]):
                raise Refusal(
                    "tools: this model's chat template does not support tools", param="tools", code=UNSUPPORTED
                )
            self._call_form = form_of(self.template.rendered_source(tools=True) if self.template else "")
        if self._call_form is None:
            message = "tools: this model's chat template writes calls in a form that this server cannot read"
            raise Refusal(message, param="tools", code=UNSUPPORTED)
        return self._call_form

    def _writes_two_calls(self, offered: Any) -> bool:
        """Return True if the template writes both tool calls of a message that has two.

        Returns False if it refuses such a message, as Llama's template does, or drops the second tool call.
        """
        with_tools = offered is not None
        if with_tools not in self._two_calls:
            try:
                text = self._rendered(PROBE_CALLS, tools=[PROBE] if with_tools else None)
                self._two_calls[with_tools] = SECOND in text
            except Refusal as refusal:
                if refusal.status == 503:
                    raise
                self._two_calls[with_tools] = False
        return self._two_calls[with_tools]

    def _as_read(self, message: Message, place: str) -> dict[str, Any]:
        """Convert a message to the dict that templates read. `place` is the path of the message for error messages."""
        role = "system" if message.role == "developer" else message.role
        content = message.content
        if content is None and role != "assistant":
            raise Refusal(f"{place}.content is missing", param=f"{place}.content", code="missing_required_parameter")
        if isinstance(content, list) and role != "assistant" and any(isinstance(p, RefusalPart) for p in content):
            raise Refusal(
                f"{place}.content: only assistant messages may contain a part of type refusal", param=f"{place}.content"
            )
        parts = [content] if isinstance(content, str) else map(_text_of_part, content or ())
        text = "".join(parts) or (message.refusal or "" if role == "assistant" else "")
        turn: dict[str, Any] = {"role": role, "content": text}
        for name in ("name", "tool_call_id"):
            if (value := getattr(message, name)) is not None:
                turn[name] = value
        if message.tool_calls:
            if role != "assistant":
                raise Refusal(
                    f"{place}.tool_calls: only assistant messages may have tool_calls", param=f"{place}.tool_calls"
                )
            calls = enumerate(message.tool_calls)
            turn["tool_calls"] = [self._called(call, f"{place}.tool_calls[{i}]") for i, call in calls]
        if thoughts := message.reasoning_content or message.reasoning:
            if role != "assistant":
                param = f"{place}.reasoning{'_content' if message.reasoning_content else ''}"
                raise Refusal(f"{param}: only assistant messages may contain reasoning", param=param)
            if self._has_channels and message.tool_calls and text:
                # gpt-oss's template writes the text before a call as reasoning, and refuses a message with both.
                thoughts, turn["content"] = f"{thoughts}\n{text}", ""
            turn["reasoning_content"] = thoughts
        return turn

    def _called(self, call: ToolCall, place: str) -> dict[str, Any]:
        """Convert an earlier tool call to the dict that templates read, with the arguments as an object."""
        param = f"{place}.function.arguments"
        function = {"name": call.function.name, "arguments": called_arguments(call.function.arguments)}
        try:
            check_texts(function)
        except ValueError as error:  # an escape in the arguments can be half of a surrogate pair
            raise Refusal(f"{param}: {error}", param=param) from None
        return {"id": call.id, "type": "function", "function": function}


def _for_template(tool: Tool) -> dict[str, Any]:
    return {"type": tool.type, "function": msgspec.to_builtins(tool.function)}


def _text_of_part(part: TextPart | RefusalPart) -> str:
    return part.text if isinstance(part, TextPart) else part.refusal


def called_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of an earlier tool call as an object, because templates need an object.

    The text may be invalid JSON, or cut by `max_tokens`. Then the object contains the values before the cut, or the
    whole text under the key "arguments" if the text is not an object.

    >>> called_arguments('{"a": 1, "b": "two'), called_arguments('{"a": 1, "b'), called_arguments("")
    ({'a': 1, 'b': 'two'}, {'a': 1}, {})
    >>> called_arguments("[1]"), called_arguments("a: 1")
    ({'arguments': [1]}, {'arguments': 'a: 1'})
    """
    for candidate in (text or "{}", *(completions(text) if text.lstrip().startswith("{") else ())):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {} if value is None else {"arguments": value}
    return {"arguments": text}


def completions(text: str) -> list[str]:
    """Return texts that complete a JSON object that was cut off, for a caller that tries them in order.

    They close the object after its last character, before its last comma, and after its last opening bracket.

    >>> completions('{"a": [1, "b')
    ['{"a": [1, "b"]}', '{"a": [1]}', '{"a": []}']
    """
    open_brackets: Brackets = None
    is_quoted = False
    shorter: dict[str, tuple[int, Brackets]] = {}  # where a shorter text ends, and its open brackets
    for sign in SIGNS_AND_COMMAS.finditer(text):
        if sign[0] == '"':
            is_quoted = not is_quoted
        elif is_quoted or sign[0][0] == "\\":
            continue
        elif sign[0] in "{[":
            open_brackets = ("}" if sign[0] == "{" else "]", open_brackets)
            shorter["bracket"] = sign.end(), open_brackets
        elif sign[0] == ",":
            shorter["comma"] = sign.start(), open_brackets
        elif open_brackets:
            open_brackets = open_brackets[1]
    longest = CUT_ESCAPE.sub("", text) + '"' * is_quoted + _closed(open_brackets)
    ends = [shorter[name] for name in ("comma", "bracket") if name in shorter]
    return [longest, *(text[:end] + _closed(brackets) for end, brackets in ends)]


def _closed(brackets: Brackets) -> str:
    """Return the closing signs of open brackets, the innermost first."""
    signs = []
    while brackets:
        sign, brackets = brackets
        signs.append(sign)
    return "".join(signs)


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split messages with several tool calls: each call gets its own message, followed by its results.

    This is for templates that write only one call per message.

    >>> calls = [{"id": "1"}, {"id": "2"}]
    >>> said = {"role": "assistant", "content": "a", "tool_calls": calls}
    >>> results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("2", "1", "3")]
    >>> for message in one_call_each([said, *results]): print(message["content"], message.get("tool_calls"))
    a [{'id': '1'}]
    1 None
     [{'id': '2'}]
    2 None
    3 None
    """
    split: list[dict[str, Any]] = []
    queue = deque(messages)
    while queue:
        message = queue.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        results = []
        while queue and queue[0]["role"] == "tool":
            results.append(queue.popleft())
        for i, call in enumerate(calls):
            split.append({**message, "tool_calls": [call]} | ({"content": ""} if i else {}))
            split += [result for result in results if result.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        split += [result for result in results if result.get("tool_call_id") not in ids]
    return split


def too_long(length: str, context: int, param: str) -> Refusal:
    """Make the error response for a prompt that is too long for the context, with OpenAI's error code."""
    message = f"{param}: the prompt has {length}, which do not fit in the context of {context:,} tokens"
    return Refusal(message, param=param, code="context_length_exceeded")
