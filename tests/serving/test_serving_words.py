"""Error messages of the server, as a new user reads them after a mistake."""

import pytest

from tests.serving.serving_site import FakeEngine, running


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine()) as site:
        yield site


def chat(**message):
    return {"messages": [{"role": "user", "content": "a"} | message]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", b"", "the body is empty: expected JSON"),
        ("/v1/completions", b"prompt=a", "the body is not JSON: invalid character (byte 0)"),
        (
            "/v1/completions",
            {"prompt": "a fox " * 70},
            "prompt: the prompt has 142 tokens, which do not fit in the context of 128 tokens",
        ),
        (
            "/v1/chat/completions",
            chat(content="a fox " * 70),
            "messages: the prompt has 143 tokens, which do not fit in the context of",
        ),
        ("/v1/chat/completions", chat(role="robot"), "messages[0].role: 'robot' is not supported"),
        ("/v1/chat/completions", chat(role="x" * 9999), f"messages[0].role: '{'x' * 99}... is not supported"),
        ("/v1/completions", {"y" * 9999: 1}, f"unknown field: {'y' * 100}..."),
        ("/v1/completions", {"response_format": {"type": "xml"}}, "response_format.type: 'xml' is not supported"),
        (
            "/v1/chat/completions",
            chat(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
            "messages[0].content[0].type: 'image_url' is not supported",
        ),
        ("/chat/completions", b"{}", "unknown path /chat/completions: use /v1/chat/completions"),
        ("/models/a", b"{}", "unknown path /models/a: use /v1/models/a"),
        ("/v1/rerank", b"{}", "unknown path /v1/rerank"),
    ],
)
def test_the_error_says_what_is_wrong(site, path, body, says):
    reply = site.ask(path, raw=body) if isinstance(body, bytes) else site.ask(path, body)
    assert reply.status in (400, 404)
    assert reply.error["message"].startswith(says) and (reply.error["message"] == says or says.endswith(" of"))
