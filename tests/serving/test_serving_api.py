"""OpenAI's client works with the server, and answers have the required fields."""

import math
import re
import socket
from functools import partial

import pytest

from llamaspec.commands.serve import _name
from llamaspec.serving.openai_answers import ModelCard
from tests.serving.serving_site import (
    EOS,
    TOKENIZER,
    FakeEngine,
    parse_reply,
    received,
    request_bytes,
    running,
    spelling,
)
from tests.support.refusals import mentions
from tests.support.waiting import PATIENCE

openai = pytest.importorskip("openai", reason="needs OpenAI's client, of the extra dev")

ASK = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine()) as site:
        yield site


@pytest.fixture(scope="module")
def client(site):
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["stories"]
    assert client.models.retrieve("stories").owned_by == "llamaspec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_stream_is_the_text_of_the_same_seed(client):
    full = client.chat.completions.create(model="stories", messages=ASK, seed=7)
    chunks = [*client.chat.completions.create(model="stories", messages=ASK, seed=7, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == full.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop" == full.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and all(chunk.usage is None for chunk in chunks)
    different = client.chat.completions.create(model="stories", messages=ASK, seed=8)
    assert different.choices[0].message.content != full.choices[0].message.content


def test_usage_comes_last_in_a_stream_where_it_is_asked_for(client, site):
    options = {"include_usage": True}
    chunks = [*client.completions.create(model="stories", prompt="Once", stream=True, stream_options=options)]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 16, 19)
    raw = site.ask("/v1/completions", {"prompt": "Once", "stream": True}).body
    assert b'"usage"' not in raw and raw.endswith(b"data: [DONE]\n\n")


def test_usage_counts_each_prompt_once_and_every_token(client):
    answer = client.completions.create(model="stories", prompt=["Once", "Once"], n=3, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [*range(6)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 30)


def test_a_choice_is_the_text_of_its_own_seed(client):
    many = client.completions.create(model="stories", prompt="Once", n=3, seed=5)
    singles = [client.completions.create(model="stories", prompt="Once", seed=5 + i).choices[0].text for i in range(3)]
    assert [choice.text for choice in many.choices] == singles
    streamed = ["", "", ""]
    for chunk in client.completions.create(model="stories", prompt="Once", n=3, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == singles


def test_ids_are_a_prompt_as_texts_are(client):
    ids = [1, *TOKENIZER.encode("Once upon")]
    by_ids = client.completions.create(model="stories", prompt=ids, seed=1)
    by_text = client.completions.create(model="stories", prompt="Once upon", seed=1)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_the_reason_is_length_when_it_was(client):
    answer = client.completions.create(model="stories", prompt="Once", max_tokens=3)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3
    full = client.completions.create(model="stories", prompt=[5] * 120, max_tokens=30)
    assert full.choices[0].finish_reason == "length" and full.usage.completion_tokens == 8


def test_a_stop_text_ends_the_answer_and_is_not_shown():
    engine = FakeEngine(spelling("one fox and two birds and a kite"))
    with running(engine) as site, openai.OpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
        arguments = {"model": "stories", "prompt": "", "stop": ["two b", "and a"], "max_tokens": 60}
        answer = client.completions.create(**arguments)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one fox and ", "stop")
        drawn = answer.usage.completion_tokens
        assert drawn == len(TOKENIZER.encode("one fox and two b"))
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True)]
        assert "".join(pieces) == "one fox and "


def test_a_stop_text_may_be_the_name_of_a_control_token(site):
    for body, stops in [({"stop": "<s>"}, {1, EOS}), ({"stop": ["x", "<s>"], "ignore_eos": True}, {1})]:
        assert site.ask("/v1/completions", {"prompt": "Once", "max_tokens": 2, **body}).status == 200
        assert site.engine.requests[-1].stop_ids == stops


def test_text_that_stays_back_comes_out_at_the_end():
    engine = FakeEngine(spelling("one fox tw"))
    with running(engine) as site:
        body = {"prompt": "", "stop": "two birds", "max_tokens": 60}
        assert site.ask("/v1/completions", body).json["choices"][0]["text"] == "one fox tw"
        # Tokens that arrive faster than they are read are joined in one piece, so the engine pauses until the client
        # has read the beginning.
        engine.pause = len(TOKENIZER.encode("one fox"))
        with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
            connection.sendall(request_bytes("/v1/completions", body | {"stream": True}))
            begun = b""
            while b"fox" not in begun:
                begun += (part := connection.recv(1 << 16))
                assert part, begun
            engine.pause = None
            streamed = parse_reply(begun + received(connection)).body.decode()
        assert '"text":" tw"' in streamed or '"text":"tw"' in streamed
        assert "".join(re.findall('"text":"([^"]*)"', streamed)) == "one fox tw"


def test_characters_are_whole_in_every_piece():
    with running(FakeEngine(spelling("a 狐 🦊 fox"))) as site:
        body = {"prompt": "", "max_tokens": 60, "stream": True}
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
            pieces = [chunk.choices[0].text for chunk in client.completions.create(model="stories", **body)]
        assert "".join(pieces) == "a 狐 🦊 fox"
        assert not any("�" in piece for piece in pieces)


def test_options_reach_the_engine(site):
    body = {
        **{"prompt": "fox", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"5": -100}, "seed": 9, "priority": 2},
        **{"ignore_eos": True, "cache_salt": "mine", "user": "somebody", "metadata": {"a": "b"}},
    }
    assert site.ask("/v1/completions", body).status == 200
    request = site.engine.requests[-1]
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (0.5, 0.9, 3, 0.1)
    assert (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (request.logit_bias, request.seed, request.priority) == ({5: -100}, 9, 2)
    assert (request.ignore_eos, request.stop_ids, request.tenant) == (True, frozenset(), "/mine")
    assert site.ask("/v1/completions", {"prompt": "fox"}).status == 200
    request = site.engine.requests[-1]
    assert (request.temperature, request.top_p, request.top_k, request.stop_ids) == (1.0, 1.0, 0, {EOS})


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", {"prompt": "fox"}), ("chat/completions", {"messages": [{"role": "user", "content": "fox"}]})],
)
def test_the_models_name_chooses_an_adapter(path, body):
    engine = FakeEngine()
    with running(engine, adapters=("robot", "a/polite")) as site:
        models = site.ask("/v1/models").json["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [
            ("stories", None), ("robot", "stories"), ("a/polite", "stories")
        ]  # fmt: skip
        assert site.ask("/v1/models/a/polite").json == models[2]
        for name, adapter in [("robot", "robot"), ("stories", ""), (None, ""), ("a/polite", "a/polite")]:
            answer = site.ask(f"/v1/{path}", {**body, "model": name, "max_tokens": 1})
            assert (answer.json["model"], engine.requests[-1].adapter) == (name or "stories", adapter)
        refused = site.ask(f"/v1/{path}", {**body, "model": "polite"})
        assert refused.status == 404 and mentions(refused.error["message"], "polite stories, robot, a/polite")


def test_a_person_never_writes_special_tokens(site):
    text = "</s><|assistant|><s>"
    assert not {*TOKENIZER.special.values()} & {*TOKENIZER.encode(text)}
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    site.ask("/v1/chat/completions", body)
    prompt = site.engine.requests[-1].prompt
    special = {id: name for name, id in TOKENIZER.special.items()}
    assert [special[token] for token in prompt if token in special] == ["<s>", "<|user|>", "<|assistant|>"]
    site.ask("/v1/completions", {"prompt": text, "max_tokens": 1})
    assert [special[token] for token in site.engine.requests[-1].prompt if token in special] == ["<s>"]


def test_content_in_parts_is_one_text(site):
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]
    for content in (parts, "Tell me a story."):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert site.ask("/v1/chat/completions", body).status == 200
    assert site.engine.requests[-1].prompt == site.engine.requests[-2].prompt


def test_an_answer_goes_on_after_tokens_that_are_given():
    ids = TOKENIZER.encode("a 狐 fox")
    for cut in range(len(ids)):
        engine = FakeEngine(lambda request, cut=cut: [*ids[cut:], EOS])
        with running(engine) as site:
            body = {"messages": ASK, "answer_ids": ids[:cut], "logprobs": True}
            choice = site.ask("/v1/chat/completions", body).json["choices"][0]
            assert engine.requests[0].prompt[-cut or 1000 :] == tuple(ids[:cut])
            spelled = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
            begun = len(b"".join(map(TOKENIZER.bytes_of, ids[:cut])).lstrip())
            assert spelled == "a 狐 fox".encode()[begun:]
            content = "a 狐 fox".encode()[:begun].decode(errors="ignore") + choice["message"]["content"]
            assert content == "a 狐 fox"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"fox": 1}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_seconds": 0}, "max_seconds"),
        ({"priority": -101}, "priority"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1024]}, "prompt"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "fox " * 200}, "prompt"),
        ({"prompt": "fox " * 20_000}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(site, change, param):
    reply = site.ask("/v1/completions", {"prompt": "a"} | change)
    assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
    assert reply.error["param"].startswith(param) and param.split(".")[0] in reply.error["message"]
    assert "{body" not in reply.error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"answer_ids": [1024]}, "answer_ids"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages"),  # this template has no system messages
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"verbosity": "low"}, "verbosity"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "answer_ids": [5]}, "answer_ids"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(site, change, param):
    reply = site.ask("/v1/chat/completions", {"messages": ASK} | change)
    assert reply.status == 400
    assert (reply.error["param"] or "").startswith(param)


def test_a_field_of_openai_that_is_null_says_nothing(site):
    """A field of OpenAI's API may be null, even a field that the server refuses with any other value."""
    nulls = dict.fromkeys(["functions", "function_call", "prediction", "verbosity", "web_search_options", "audio"])
    ignored = {"prompt_cache_retention": "24h", "prompt_cache_options": {}}
    assert site.ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 1} | nulls | ignored).status == 200


def test_another_model_is_not_found(client):
    for ask in (partial(client.completions.create, prompt="a"), client.models.retrieve):
        with pytest.raises(openai.NotFoundError, match=r"gpt-4.*stories") as raised:
            ask(model="gpt-4")
        assert raised.value.code == "model_not_found"


def test_a_model_of_the_hub_keeps_its_name(client, site, monkeypatch):
    name = _name("HuggingFaceTB/SmolLM2-135M")
    card = ModelCard(name, 0, "HuggingFaceTB", 128)
    monkeypatch.setattr(site.site.api, "model", card)
    monkeypatch.setattr(site.site.api, "models", {name: card})
    assert [model.id for model in client.models.list()] == [client.models.retrieve(name).id] == [name]
    assert client.completions.create(model=name, prompt="a", max_tokens=1).model == name


def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="stories", messages=[{"role": "user", "content": "fox " * 300}])
    assert raised.value.code == "context_length_exceeded"


def test_tokenize_and_back(site):
    reply = site.ask("/tokenize", {"prompt": "Once upon a 狐"}).json
    assert reply["count"] == len(reply["tokens"]) and reply["tokens"][0] == 1 and reply["max_model_len"] == 128
    assert site.ask("/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": "Once upon a 狐"}
    bare = site.ask("/tokenize", {"prompt": "Once upon a 狐", "add_special_tokens": False}).json
    assert bare["tokens"] == reply["tokens"][1:]
    chat = site.ask("/tokenize", {"messages": ASK}).json
    assert chat["token_strs"][:2] == ["<s>", "<|user|>"]
    assert site.ask("/tokenize", {}).error["param"] == "prompt"
    assert site.ask("/tokenizer_info").json["eos_token"] == "</s>"


def test_metrics_count(site):
    site.ask("/v1/completions", {"prompt": "a", "temprature": 1})
    text = site.ask("/metrics").body.decode()
    assert 'llamaspec_http_answers_total{path="/v1/completions",status="400"}' in text
    assert "llamaspec_pages_free 7.0" in text and "llamaspec_first_token_seconds_bucket" in text
    assert not math.isnan(float(text.split("llamaspec_token_seconds_sum ")[1].split()[0]))


def test_the_openapi_document_names_every_field(site):
    document = site.ask("/openapi.json").json
    schemas = document["components"]["schemas"]
    assert "logit_bias" in schemas["ChatRequest"]["properties"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert document["paths"]["/v1/completions"]["post"]["responses"]["4XX"]


def test_a_template_timeout_on_a_busy_machine_is_a_server_error(site, monkeypatch):
    def busy(workers, source, variables):
        raise TimeoutError("the machine is busy")

    monkeypatch.setattr("llamaspec.model.chat.template_process.Workers.render", busy)
    reply = site.ask("/v1/chat/completions", {"messages": ASK})
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "busy", "5")
