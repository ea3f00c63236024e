"""Log-probabilities of answers, and of prompts that completions echo: one per token, including the last token."""

import json
from typing import Any

import pytest

from tests.serving.serving_site import EOS, TOKENIZER, FakeEngine, Reply, running, spelling
from tests.support.waiting import PATIENCE

openai = pytest.importorskip("openai", reason="needs OpenAI's client, of the extra dev")

HALF = next(token for token in range(1024) if TOKENIZER.bytes_of(token) == b"\xe7")  # the first byte of a character
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine()) as site:
        yield site


def choices_of(reply: Reply, *, stream: bool) -> list[dict[str, Any]]:
    """List the choices of a completion, or of all chunks of a stream."""
    if not stream:
        return reply.json["choices"]
    chunks = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n")[:-2]]
    return [chunk["choices"][0] for chunk in chunks if chunk["choices"]]


def joined(choices: list[dict[str, Any]], name: str) -> list[Any]:
    """Concatenate the list `name` from the logprobs of all chunks that have logprobs."""
    return [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][name]]


def test_logprobs_of_a_chat(site):
    arguments = {"model": "stories", "messages": ASK, "seed": 3, "logprobs": True, "top_logprobs": 4, "max_tokens": 6}
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        answer = client.chat.completions.create(**arguments).choices[0]
        chunks = [*client.chat.completions.create(**arguments, stream=True)]
    assert "".join(token.token for token in answer.logprobs.content) == answer.message.content
    assert b"".join(bytes(token.bytes) for token in answer.logprobs.content).decode() == answer.message.content
    assert [token.logprob for token in answer.logprobs.content] == [-(i + 1) / 16 for i in range(6)]
    assert all(len(token.top_logprobs) == 4 for token in answer.logprobs.content)
    streamed = [token for chunk in chunks if (logprobs := chunk.choices[0].logprobs) for token in logprobs.content]
    assert streamed == answer.logprobs.content


def test_no_logprobs_of_an_end_of_text_in_a_chat():
    """In a chat, the end-of-text token has no log-probability, because OpenAI's list covers the content only."""
    with running(FakeEngine(spelling("fox"))) as site:
        body = {"messages": ASK, "logprobs": True}
        choice = site.ask("/v1/chat/completions", body).json["choices"][0]
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == "fox"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_of_the_prompt(site, stream):
    """With echo, the prompt's log-probabilities come before the answer's, in the order that lm-eval reads."""
    text = "the fox sang"
    body = {"prompt": text, "echo": True, "logprobs": 2, "max_tokens": 2, "seed": 4, "stream": stream}
    choices = choices_of(site.ask("/v1/completions", body), stream=stream)
    tokens = joined(choices, "tokens")
    logprobs = joined(choices, "token_logprobs")
    tops = joined(choices, "top_logprobs")
    offsets = joined(choices, "text_offset")
    full_text = "".join(choice["text"] for choice in choices)
    ids = [1, *TOKENIZER.encode(text)]
    assert full_text.startswith(text) and len(tokens) == len(ids) + 2 == len(logprobs) == len(tops)
    assert logprobs[0] is None and tops[0] is None
    assert logprobs[1 : len(ids)] == [-i / 8 for i in range(len(ids) - 1)]
    assert logprobs[len(ids) :] == [-1 / 16, -2 / 16]
    assert all(len(top) == 2 for top in tops[1:])
    assert "".join(tokens[1:]) == full_text
    assert all(full_text[start:].startswith(token) for start, token in zip(offsets[1:], tokens[1:], strict=True))


def test_echo_alone(site):
    body = {"prompt": "the fox", "echo": True, "max_tokens": 0}
    choice = site.ask("/v1/completions", body).json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("the fox", "length", None)


def test_a_prompt_of_one_token_is_echoed(site):
    """A prompt of one token is echoed, although the engine reports log-probabilities from the second token on."""
    body = {"prompt": TOKENIZER.encode("fox")[:1], "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = site.ask("/v1/completions", body).json["choices"][0]
    assert site.engine.requests[-1].prompt_logprobs is None
    assert len(choice["logprobs"]["tokens"]) == 2 and choice["text"].startswith(choice["logprobs"]["tokens"][0])
    assert choice["logprobs"]["token_logprobs"] == [None, -1 / 16]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("drawn", [[], [*TOKENIZER.encode("fox 狐")], [*TOKENIZER.encode("fox"), HALF]])
def test_a_completion_has_an_entry_for_the_token_that_ends_it(drawn, echo, stream):
    """The token that ends a completion has a logprobs entry, as in vLLM.

    lm-eval asks for one token and drops the last entry, because it takes this entry for the drawn token. Without an
    entry for the end of the text, it would drop the prompt's last token.
    """
    with running(FakeEngine(lambda request: [*drawn, EOS])) as site:
        body = {"prompt": "the bird", "echo": echo, "logprobs": 2, "max_tokens": 40, "stream": stream}
        choices = choices_of(site.ask("/v1/completions", body), stream=stream)
        (silent,) = choices_of(site.ask("/v1/completions", body | {"logprobs": None, "stream": False}), stream=False)
    text = "".join(choice["text"] for choice in choices)
    assert text == silent["text"] and choices[-1]["finish_reason"] == "stop" == silent["finish_reason"]
    tokens, logprobs, tops, offsets = (
        joined(choices, name) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    before = [1, *TOKENIZER.encode("the bird")] if echo else []
    assert len(tokens) == len(logprobs) == len(tops) == len(offsets) == len(before) + len(drawn) + 1
    assert (tokens[-1], offsets[-1]) == ("</s>", len(text)) and "</s>" not in [*tokens[:-1], text]
    assert logprobs[len(before) :] == [-(i + 1) / 16 for i in range(len(drawn) + 1)]
    assert tops[-1]["</s>"] == -0.125 and len(tops[-1]) == 2
    assert not echo or logprobs[1:-1][len(before) - 2] == -(len(before) - 2) / 8  # the prompt's last token


def test_no_entry_for_an_end_that_a_stop_text_came_before():
    with running(FakeEngine(spelling("fox and bird"))) as site:
        body = {"prompt": "the", "logprobs": 1, "max_tokens": 40, "stop": " bird"}
        (choice,) = choices_of(site.ask("/v1/completions", body), stream=False)
    assert choice["text"] == " fox and" == "".join(choice["logprobs"]["tokens"])
