"""Habits of real clients: answers sent back, requests sent before the previous answer arrives, and unusual fields."""

import json
import socket
from typing import Any

import pytest

from llamaspec.model.options import MAX_SEED, SAMPLING, SamplingOptions
from llamaspec.serving.connections import Access
from llamaspec.serving.prompts import called_arguments, completions
from llamaspec.serving.streaming import server_sent
from tests.serving.serving_site import FakeEngine, obedient, read_reply, request_bytes, running, spelling
from tests.serving.tool_templates import TEMPLATES
from tests.support.waiting import PATIENCE

USER: list[dict[str, Any]] = [{"role": "user", "content": "Tell me a story."}]
FUNCTION = {"name": "look", "arguments": '{"a": 1}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
TOOL = {"type": "function", "function": {"name": "look"}}
CHAT = "/v1/chat/completions"
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine(context=4000), template=TEMPLATES["hermes"]) as site:
        yield site


def rendered(site, messages: list[dict[str, Any]], **more: Any) -> str:
    """Return the prompt that the server renders from a conversation."""
    tokens = site.ask("/tokenize", {"messages": messages, **more})
    assert tokens.status == 200, tokens.body
    return site.ask("/detokenize", {"tokens": tokens.json["tokens"]}).json["prompt"]


def answered(**more: Any) -> list[dict[str, Any]]:
    return [*USER, {"role": "assistant", "content": "A fox.", **more}, *USER]


def called(call: dict[str, Any]) -> list[dict[str, Any]]:
    result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


@pytest.mark.parametrize(
    "more",
    [
        {"parsed": {"a": 1}},
        {"provider_specific_fields": {"refusal": None}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "x"}]},
        {"thinking_blocks": []},
        {"annotations": [], "refusal": None, "index": 0, "id": "a", "citations": None, "audio": None},
        {"images": [], "phase": "final", "whatever": {"a": [1]}},
        {"content": [{"type": "text", "text": "A fox.", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_what_clients_keep_in_an_answer_changes_nothing(site, more):
    assert rendered(site, answered(**more)) == rendered(site, answered())
    assert site.ask(CHAT, {"messages": answered(**more), "max_tokens": 2}).status == 200


@pytest.mark.parametrize(
    "call",
    [
        CALL | {"index": 0},
        CALL | {"provider_specific_fields": {}, "cache_control": None},
        CALL | {"function": FUNCTION | {"parsed_arguments": {"a": 1}, "provider_specific_fields": None}},
    ],
)
def test_what_clients_keep_in_a_call_changes_nothing(site, call):
    assert rendered(site, called(call), tools=[TOOL]) == rendered(site, called(CALL), tools=[TOOL])


def test_a_refusal_is_what_the_assistant_said(site):
    text = rendered(site, answered(content="I cannot."))
    assert rendered(site, answered(content=None, refusal="I cannot.")) == text
    assert rendered(site, answered(content=[{"type": "refusal", "refusal": "I cannot."}])) == text
    for role in ("user", "system"):
        body = {"messages": [{"role": role, "content": [{"type": "refusal", "refusal": "no"}]}]}
        assert site.ask(CHAT, body).error["param"] == "messages[0].content"


def test_an_unknown_field_of_other_roles_is_still_refused(site):
    parts = [{"type": "text", "text": "a", "image": 1}]
    for messages in ([{"role": "user", "content": "a", "images": ["x"]}], [{"role": "user", "content": parts}]):
        assert site.ask(CHAT, {"messages": messages}).error["code"] == "unknown_parameter"


def test_an_answer_that_was_cut_in_a_call_may_come_back():
    parameters = {"type": "object", "properties": {"what": {"type": "string", "minLength": 300}}, "required": ["what"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    with running(FakeEngine(obedient, context=4000), template=TEMPLATES["hermes"]) as site:
        for most in (12, 25, 40, 41, 42, 43, 60):
            body = {"messages": USER, "tools": [tool], "tool_choice": "required", "max_tokens": most, "seed": most}
            message = site.ask(CHAT, body).json["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "not JSON"}
                for call in message.get("tool_calls", [])
            ]
            back = {"messages": [*USER, message, *results, *USER], "tools": [tool]}
            assert site.ask("/tokenize", back).status == 200, message


@pytest.mark.parametrize(
    "value", [{"a": 1, "b": [True, {"c": "x, {"}], "é\\\n": None, "z": "end"}, {}, {"a": {"b": {}}}]
)
@pytest.mark.parametrize("ascii", [True, False])
def test_wherever_arguments_are_cut_an_object_is_left(value, ascii):
    text = json.dumps(value, ensure_ascii=ascii)
    assert called_arguments(text) == value
    for end in range(1, len(text)):
        partial_arguments = called_arguments(text[:end])
        assert isinstance(partial_arguments, dict) and "arguments" not in partial_arguments
        assert {*partial_arguments} <= {*value}, text[:end]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("null", {}),
        ("", {}),
        ("[1]", {"arguments": [1]}),
        ('"a"', {"arguments": "a"}),
        ("look at it", {"arguments": "look at it"}),
        ("}{", {"arguments": "}{"}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
        ('{"a":' * 100_000, {"arguments": '{"a":' * 100_000}),
    ],
)
def test_arguments_that_are_no_object_stay_what_they_are(site, text, expected):
    assert called_arguments(text) == expected
    call = CALL | {"function": FUNCTION | {"arguments": text[:200]}}
    assert site.ask("/tokenize", {"messages": called(call), "tools": [TOOL]}).status == 200
    assert completions("") == [""]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_a_scheme_has_any_case(scheme):
    access = Access(keys=("secret",))
    assert access.tenant(f"{scheme} secret") == access.tenant(f"{scheme}   secret ") == "0"
    assert access.tenant(f"{scheme} other") is None and access.tenant("Basic secret") is None


def test_a_page_may_send_the_headers_that_it_asks_for():
    requested = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,x-anything"
    head = f"OPTIONS {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAccess-Control-Request-Method: POST\r\n"
    with running(FakeEngine(), access=Access(keys=("k",), origins=frozenset({ORIGIN}))) as site:
        replies = {}
        for origin in (ORIGIN, "https://other.example"):
            raw = f"{head}Origin: {origin}\r\nAccess-Control-Request-Headers: {requested}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
                connection.sendall(raw.encode())
                replies[origin] = read_reply(connection)
        good, bad = replies.values()
        assert (good.status, good.headers["access-control-allow-headers"]) == (204, requested)
        assert bad.status == 403 and "access-control-allow-headers" not in bad.headers


@pytest.mark.parametrize("value", ["100-continue", "100-Continue"])
def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(site, value):
    raw_request = request_bytes(CHAT, {"messages": USER, "max_tokens": 2}, headers=f"Expect: {value}\r\n")
    head, _, body = raw_request.partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_reply(connection).status == 200


def test_unauthorized_clients_get_no_100_continue():
    with running(FakeEngine(), access=Access(keys=("k",))) as site:
        raw = request_bytes(CHAT, {"messages": USER}, headers="Expect: 100-continue\r\n").partition(b"\r\n\r\n")[0]
        with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
            connection.sendall(raw + b"\r\n\r\n")
            assert read_reply(connection).status == 401
        key = "Authorization: Bearer k\r\n"
        reply = site.ask(CHAT, {"messages": USER}, headers=f"{key}Expect: the unexpected\r\n")
        assert (reply.status, reply.error["code"]) == (417, "expectation_failed")


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_over_http_1_0_ends_with_its_connection(site, stream):
    raw = request_bytes(CHAT, {"messages": USER, "max_tokens": 3, "stream": stream})
    raw = raw.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Connection: close", b"Connection: keep-alive")
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
        connection.sendall(raw)
        if stream:
            assert read_reply(connection).body.endswith(b"data: [DONE]\n\n")  # up to the end of the connection
        else:
            connection.sendall(raw)  # A length says where the answer ends, so the connection stays.
            assert connection.recv(1 << 16).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -1},
        {"seed": -(2**63)},
        {"seed": MAX_SEED},
        {"top_p": 0},
        {"top_p": 0.0, "temperature": 2},
        {"top_k": -1},
        {"top_k": -1.0},
        {"logprobs": False, "top_logprobs": 0},
        {"max_tokens": 4.0, "n": 1.0, "seed": 3.0},
        {"logit_bias": {"5": 1}, "presence_penalty": 1, "stop": None, "logprobs": None},
    ],
)
def test_values_that_openai_takes_are_taken(site, options):
    assert site.ask(CHAT, {"messages": USER, "max_tokens": 2, **options}).status == 200


def test_a_request_wins_over_the_servers_defaults():
    """Fields of a request take precedence over the defaults in the model's generation_config.json.

    A field that is neither in the request nor in this file has OpenAI's default.
    """
    stated = SamplingOptions(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    with running(FakeEngine(), sampling=stated) as site:
        site.ask(CHAT, {"messages": USER, "max_tokens": 2})
        site.ask("/v1/completions", {"prompt": "a", "max_tokens": 2, "temperature": 0.3, "top_k": -1})
    first, second = site.engine.requests
    assert [getattr(first, name) for name in SAMPLING] == [getattr(stated, name) for name in SAMPLING]
    assert (second.temperature, second.top_k, second.top_p, second.min_p) == (0.3, 0, 0.9, 0.1)


def test_values_mean_what_they_say(site):
    site.ask(CHAT, {"messages": USER, "max_tokens": 2, "seed": -1, "top_k": -1, "top_p": 0, "temperature": 1.5})
    request = site.engine.requests[-1]
    assert (request.seed, request.top_k, request.temperature) == (MAX_SEED, 0, 0)
    site.ask("/v1/completions", {"prompt": [5.0, 6.0, 7], "max_tokens": 4.0, "seed": 7.0})
    request = site.engine.requests[-1]
    assert (request.prompt, request.max_tokens, request.seed) == ((5, 6, 7), 4, 7)
    assert all(type(token) is int for token in request.prompt)
    for prompt in ({"prompt": None}, {"prompt": ""}, {}):
        site.ask("/v1/completions", {"max_tokens": 2, **prompt})
    assert len({request.prompt for request in site.engine.requests[-3:]}) == 1


@pytest.mark.parametrize(
    "options",
    [
        *({"seed": 2**64}, {"seed": -(2**63) - 1}, {"top_p": -0.1}, {"top_k": -2}, {"n": 0.0}, {"max_tokens": 4.5}),
        *({"max_tokens": 1e300}, {"seed": True}, {"seed": "1"}, {"top_p": 1.1}),
    ],
)
def test_other_values_are_refused(site, options):
    reply = site.ask(CHAT, {"messages": USER, **options})
    assert (reply.status, reply.error["param"]) == (400, next(iter(options)))


def test_numbers_of_a_template_stay_as_they_are(site):
    body = {"messages": USER, "max_tokens": 2.0, "chat_template_kwargs": {"nothing": 4.0}}
    assert "nothing" in site.ask(CHAT, body).error["message"]


def test_a_stream_says_that_it_is_utf_8_and_has_no_other_line_ends():
    text = "a\u2028b\u2029c\u0085d"
    with running(FakeEngine(spelling(text), context=400)) as site:
        reply = site.ask(CHAT, {"messages": USER, "stream": True})
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert len(reply.body.decode().splitlines()) == reply.body.count(b"\n")
        events = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: {")]
        pieces = [choice["delta"].get("content", "") for line in events for choice in json.loads(line)["choices"]]
        assert "".join(pieces) == text
    assert server_sent({"a": "é\u2028"}) == 'data: {"a":"é\\u2028"}\n\n'.encode()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("//v1/chat/completions", "use /v1/chat/completions"),
        ("/v1//chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completions/", "use /v1/chat/completions"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/api/v1/models/", "use /v1/models"),
        ("/openai/v1/completions", "use /v1/completions"),
        ("/V1/Models", "use /v1/models"),
        ("/health/", "use /health"),
        ("/v1/chat/completion", "do you mean /v1/chat/completions?"),
        ("/v1/responses", "this server does not have that API; use /v1/chat/completions"),
        ("/v1/models/", "use /v1/models"),
        ("/v1/responses/resp_1/cancel", "this server does not have that API; use /v1/chat/completions"),
        ("/v1/responses/", "this server does not have that API; use /v1/chat/completions"),
        ("/api/generate", "this server does not have that API; use /v1/completions"),
    ],
)
def test_a_path_that_is_not_there_hints_at_one_that_is(site, path, hint):
    reply = site.ask(path, {})
    assert (reply.status, reply.error["message"]) == (404, f"unknown path {path}: {hint}")


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/nothing", "/" + "v1/" * 3000, "//"])
def test_other_paths_get_no_hint(site, path):
    reply = site.ask(path, {})
    assert reply.status in (400, 404) and ": use" not in reply.error["message"]
