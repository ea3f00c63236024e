"""Types of requests, as OpenAI's clients send them, and of errors.

We refuse requests with unknown fields, and with fields that would change the text but that we do not support. The error
names the field. Fields that cannot change the text (`user`, `metadata` ...) are accepted and ignored.

Source: https://platform.openai.com/docs/api-reference, "Completions" and "Chat". Extensions have the names that other
servers use: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `priority`, `cache_salt`, `reasoning_content`,
`chat_template_kwargs`. Only `max_seconds` is our own.
"""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import msgspec
from msgspec import Meta, Struct, defstruct

from llamaspec.model.options import SAMPLING, SamplingOption
from llamaspec.serving.request import LARGEST_BIAS, LARGEST_PENALTY, MOST_BIASES, MOST_LOGPROBS

Count = Annotated[int, Meta(ge=0)]
Likeliest = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-LARGEST_PENALTY, le=LARGEST_PENALTY)]
Bias = Annotated[float, Meta(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Priority = Annotated[
    int, Meta(ge=-100, le=100)
]  # a bounded range, because each step of priority delays a request by a bounded time
Ids = list[Count]
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
MOST_TOOLS = 128
# Fields with JSON of the client's choice. We do not turn 4.0 into 4 inside them.
FREE = {"chat_template_kwargs", "metadata", "parameters", "schema"}
LONGEST_QUOTED = 100  # characters of a client's string that an error message quotes

KINDS = {  # error types by status; all other statuses get `invalid_request_error`
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Refusal(Exception):
    """Raised for a request that gets an error response instead of an answer."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        kind = KINDS.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


Seed = Annotated[int, Meta(ge=-(2**63))]  # a negative seed s means s + 2^64


class RequestObject(Struct, forbid_unknown_fields=True):
    """Base class of the objects in requests. Unknown fields are refused."""


class StreamOptions(RequestObject, kw_only=True):
    """The field `stream_options`, which says whether the last chunk has token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored


class TextPart(RequestObject, kw_only=True, tag_field="type", tag="text"):
    """A text part of a message's content."""

    text: str
    cache_control: Any = None  # a field of Anthropic's API, ignored
    prompt_cache_breakpoint: Any = None  # ignored
    annotations: Any = None  # ignored


class RefusalPart(RequestObject, kw_only=True, tag_field="type", tag="refusal"):
    """A part of an assistant message that says why it refuses to answer."""

    refusal: str


class CalledFunction(Struct, kw_only=True):
    """The function in a tool call. `arguments` is a string with a JSON object, which is incomplete if the answer was
    cut.

    Clients add other fields (`parsed_arguments`, `provider_specific_fields`), which are ignored.
    """

    name: FunctionName
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A tool call of an earlier answer. Fields that clients add (`index`, `cache_control`) are ignored."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestObject, kw_only=True, tag_field="role"):
    """One message of a conversation. Each role has its own subclass."""

    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # only in assistant messages
    tool_call_id: str | None = None  # only in tool messages: the id of the call that gave this result
    reasoning_content: str | None = None  # an assistant's reasoning; our answers use the same field
    reasoning: str | None = None  # another name of `reasoning_content`, which other servers use
    refusal: str | None = None  # why an assistant refused to answer
    audio: None = None
    function_call: None = None
    cache_control: Any = None  # a field of Anthropic's API, ignored

    @property
    def role(self) -> str:
        """The role of the message, which is the tag of its class."""
        return str(self.__struct_config__.tag)


class SystemMessage(Message, tag="system"):
    """A message of the role `system`."""


class DeveloperMessage(Message, tag="developer"):
    """A message of the role `developer`, OpenAI's newer name for `system`."""


class UserMessage(Message, tag="user"):
    """A message of the role `user`."""


class ToolMessage(Message, tag="tool"):
    """A message of the role `tool`: the result of a tool call."""


class AssistantTurn(Message, tag="assistant", forbid_unknown_fields=False):
    """An earlier answer. Clients add fields to an answer and send it back, so unknown fields are ignored."""


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | ToolMessage | AssistantTurn


class TextFormat(RequestObject, tag_field="type", tag="text"):
    """A `response_format` that asks for plain text."""


class JsonFormat(RequestObject, tag_field="type", tag="json_object"):
    """A `response_format` that asks for any JSON object."""


class Schema(RequestObject, kw_only=True):
    """A named JSON schema."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # ignored: answers always match the schema


class SchemaFormat(RequestObject, tag_field="type", tag="json_schema"):
    """A `response_format` that asks for JSON that matches a schema."""

    json_schema: Schema


class Function(RequestObject, kw_only=True, omit_defaults=True):
    """A function that an answer may call. `parameters` is the JSON schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # None: no parameters
    strict: bool | None = None  # ignored: forced calls always match the schema


class Tool(RequestObject, kw_only=True):
    """A tool. The only kind of tool is a function."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None  # a field of Anthropic's API, ignored


class FunctionChoice(RequestObject, kw_only=True):
    """The name of the function that an answer must call."""

    name: str


class ToolChoice(RequestObject, kw_only=True):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: FunctionChoice


def _field(option: SamplingOption) -> tuple[str, Any, None]:
    """Make a request field for one of the `SamplingOptions`: name, type with its range, and the default None."""
    low, high, _, above = option.range
    top = high if option.kind is float and math.isfinite(high) else None
    bounds: dict[str, Any] = {"gt" if above else "ge": low, "le": top}
    return option.name, Optional[Annotated[option.kind, Meta(**bounds)]], None  # noqa: UP045  # `|` is not a type here


if TYPE_CHECKING:
    SamplingFields = RequestObject  # we make the fields at run time, so a type checker cannot know them
else:
    SamplingFields = defstruct("SamplingFields", map(_field, SAMPLING.values()), bases=(RequestObject,), kw_only=True)


class SampledRequest(SamplingFields, kw_only=True):
    """Fields that completion and chat requests share."""

    model: str | None = None  # None: the model of this server
    max_tokens: Count | None = None
    top_p: Share | None = None  # 0: always the likeliest token, as with temperature 0
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # 0 or -1: off
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MOST_BIASES)] | None = None  # by token id
    seed: Seed | None = None  # below 2^64; None: random
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    max_seconds: Annotated[float, Meta(gt=0)] | None = None  # time limit, from the arrival of the request
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # We ignore the following fields, because they cannot change the text.
    user: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class CompletionRequest(SampledRequest, kw_only=True):
    """The body of `POST /v1/completions`."""

    # a string, a list of strings, a list of ids, or a list of lists of ids; None: an empty string
    prompt: str | Annotated[list[str | Count | Ids], Meta(min_length=1)] | None = None
    echo: bool | None = None
    logprobs: Likeliest | None = None
    best_of: Count | None = None  # must equal `n`
    suffix: None = None


class ChatRequest(SampledRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    answer_ids: Ids | None = None  # an extension: the answer continues after these tokens and does not repeat them
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # False: at most one call in an answer
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None  # only for chat templates with this variable
    chat_template_kwargs: dict[str, Any] | None = None  # an extension: more variables for the chat template
    # We do not support the following fields. Clients that send every field send null for them.
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    verbosity: None = None
    web_search_options: None = None


class EmbeddingRequest(RequestObject, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    # a string, a list of strings, a list of ids, or a list of lists of ids
    input: str | Annotated[list[str | Count | Ids], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None  # base64: little-endian float32 numbers
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # None: all
    pooling: Literal["last", "mean"] | None = None  # an extension; None: as the model's files say
    priority: Priority | None = None
    max_seconds: Annotated[float, Meta(gt=0)] | None = None
    user: str | None = None  # ignored


class TokenizeRequest(RequestObject, kw_only=True):
    """The body of `POST /tokenize`: a text, or a conversation to render with the chat template."""

    prompt: str | None = None
    messages: list[AnyMessage] | None = None
    add_special_tokens: bool = True  # put BOS before `prompt`, if the model uses BOS
    model: str | None = None
    # More fields of a chat request:
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestObject, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Ids
    model: str | None = None


def read_json[Body](raw: bytes, kind: type[Body]) -> Body:
    """Parse the JSON body of a request to the type `kind`. Raises Refusal, which names an unknown or wrong field."""
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.convert(_whole_numbers(msgspec.json.decode(raw)), kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not valid UTF-8: {error.reason}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        if not raw.strip():
            raise Refusal("the body is empty: expected JSON") from None
        raise Refusal(f"the body is not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def _whole_numbers(value: Any) -> Any:
    """Replace floats such as 4.0 with integers, because they are integers for JSON Schema.

    >>> _whole_numbers({"n": 4.0, "temperature": 0.5, "metadata": {"a": 1.0}})
    {'n': 4, 'temperature': 0.5, 'metadata': {'a': 1.0}}
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: item if name in FREE else _whole_numbers(item) for name, item in value.items()}
    return value


def _wrong_field(message: str) -> Refusal:
    """Turn an error message of msgspec into a Refusal that names the field."""
    what, _, place = message.partition(" - at `")
    place = place.removesuffix("`").removeprefix("$").removeprefix(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        param = _cut(f"{place}.{unknown[1]}" if place else unknown[1])
        return Refusal(f"unknown field: {param}", param=param, code="unknown_parameter")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        param = f"{place}.{missing[1]}" if place else missing[1]
        return Refusal(f"{param} is missing", param=param, code="missing_required_parameter")
    if what.startswith("Expected `null`"):
        return Refusal(f"{place} is not supported", param=place, code="unsupported_parameter")
    if unsupported := re.fullmatch(r"Invalid (?:enum )?value (.*)", what, re.DOTALL):
        return Refusal(f"{place}: {_cut(unsupported[1])} is not supported", param=place, code="unsupported_value")
    what = what[:1].lower() + what[1:].replace("`", "")
    return Refusal(f"{place or 'the body'}: {what}", param=place or None, code="invalid_type")


def _cut(text: str) -> str:
    """Shorten a string that a client sent, which may have megabytes."""
    return text if len(text) <= LONGEST_QUOTED else f"{text[:LONGEST_QUOTED]}..."
