"""`/v1/embeddings`: the vectors are the model's final hidden states, with and without other requests."""

import base64
import json
import socket
import tracemalloc
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamaspec.model.checkpoints import CheckpointError
from llamaspec.model.checkpoints.pooling import read_pooling
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference import llama
from llamaspec.serving.connections import ClientLimits
from llamaspec.serving.embeddings import MOST_AT_ONCE, answer_in_json, unit
from llamaspec.serving.openai import EmbeddingRequest
from llamaspec.serving.request import Embedding, QueueFull, Request
from tests.serving.served_models import CHUNK, OWN_KEYS, Server, served
from tests.serving.served_models import MODELS as CONFIGS
from tests.serving.serving_site import TOKENIZER, FakeEngine, read_reply, request_bytes, running
from tests.support.gguf_files import STRING, U32, File
from tests.support.random_models import random_checkpoint
from tests.support.waiting import PATIENCE, until

PATH = "/v1/embeddings"
MODELS = (OWN_KEYS, "3 to 1, q/k norms, window")
TEXTS = ["the fox", "a red kite", "the old tree"]


@pytest.fixture(scope="module")
def site():
    with running(FakeEngine(context=64)) as site:
        yield site


def vectors(site, body) -> list[Any]:
    reply = site.ask(PATH, body)
    assert reply.status == 200, reply.body
    assert [entry["index"] for entry in reply.json["data"]] == [*range(len(reply.json["data"]))]
    return [entry["embedding"] for entry in reply.json["data"]]


def test_every_form_of_input_gives_the_same_vectors(site):
    ids = [[TOKENIZER.bos, *TOKENIZER.encode(text)] for text in TEXTS]
    expected = vectors(site, {"input": TEXTS})
    assert len(expected) == len(TEXTS) and len({tuple(vector) for vector in expected}) > 1
    assert vectors(site, {"input": ids}) == expected
    assert vectors(site, {"input": [*TEXTS[:1], *ids[1:]]}) == expected
    for text, tokens, vector in zip(TEXTS, ids, expected, strict=True):
        assert vectors(site, {"input": text}) == vectors(site, {"input": tokens}) == [vector]
    reply = site.ask(PATH, {"input": TEXTS, "model": "stories", "user": "a"}).json
    count = sum(map(len, ids))
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (reply["object"], reply["model"], reply["data"][0]["object"]) == ("list", "stories", "embedding")


def test_base64_has_the_same_numbers(site):
    expected = vectors(site, {"input": TEXTS, "encoding_format": "float"})
    for vector, encoded in zip(expected, vectors(site, {"input": TEXTS, "encoding_format": "base64"}), strict=True):
        assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == vector


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("dimensions", [None, 1, 2, 3])
def test_vectors_are_pooled_cut_and_of_length_one(site, pooling, dimensions):
    ids = [7, 30, 500]
    stated = {} if dimensions is None else {"dimensions": dimensions}
    (vector,) = vectors(site, {"input": ids, "pooling": pooling, **stated})
    full = np.array([500 if pooling == "last" else sum(ids) / 3, 1.0, -2.0])[:dimensions]
    assert np.allclose(vector, full / np.linalg.norm(full), rtol=1e-6, atol=0)
    assert len(vector) == (dimensions or 3)


def test_zeros_stay_zeros():
    assert unit(np.zeros(3, np.float32), None).tolist() == [0, 0, 0]


def test_many_inputs_come_back_in_order(site):
    inputs = [[1 + i % 900, 5 + i % 1000] for i in range(3 * MOST_AT_ONCE + 1)]
    expected = [unit(np.array([tokens[-1], 1.0, -2.0]), None).tolist() for tokens in inputs]
    assert vectors(site, {"input": inputs}) == expected
    assert site.engine.open == 0


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": []}, "input", "invalid_type"),
        ({"input": [[]]}, "input", None),
        ({"input": ["a", 5]}, "input", None),
        ({"input": [5000]}, "input", None),
        ({"input": ["a"] * 2049}, "input", None),
        ({"input": [5] * 65}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 4}, "dimensions", "out_of_range"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_type"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "unsupported_value"),
        ({"input": "a", "pooling": "cls"}, "pooling", "unsupported_value"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown_parameter"),
        ({"input": "a", "model": "other"}, "model", "model_not_found"),
    ],
)
def test_wrong_requests_name_the_field(site, body, param, code):
    reply = site.ask(PATH, body)
    assert reply.status in (400, 404)
    assert (reply.error["param"], reply.error["code"]) == (param, code), reply.error
    assert site.engine.open == 0


def test_an_input_may_be_as_long_as_the_context(site):
    assert len(vectors(site, {"input": [5] * 64})) == 1


def test_one_failing_input_fails_the_request_and_cancels_the_others():
    engine = FakeEngine(context=64)
    with running(engine) as site:
        engine.poison = 900
        reply = site.ask(PATH, {"input": [[5], [900], [6]]})
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        until(lambda: engine.open == 0)  # the answer does not wait for the end of cancelled requests


def test_an_adapter_is_chosen_by_the_model_s_name():
    with running(FakeEngine(), adapters=["wolf"]) as site:
        for name, adapter in (("wolf", "wolf"), ("stories", ""), (None, "")):
            reply = site.ask(PATH, {"input": "a", "model": name})
            assert (reply.status, reply.json["model"]) == (200, name or "stories")
            assert site.engine.requests[-1].adapter == adapter


@contextmanager
def more_inputs_than_at_once() -> Iterator[tuple[Any, socket.socket]]:
    """Send a request with more inputs than the engine gets at once; yield the site and the connection.

    The engine is paused. The other inputs wait, so that other clients get their turn.
    """
    engine = FakeEngine(context=64)
    engine.pause = 0
    with running(engine) as site, socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
        connection.sendall(request_bytes(PATH, {"input": [[5]] * (MOST_AT_ONCE + 4)}))
        until(lambda: engine.open == MOST_AT_ONCE)
        yield site, connection


def test_a_client_that_leaves_ends_its_requests():
    with more_inputs_than_at_once() as (site, connection):
        connection.close()
        until(lambda: site.engine.open == 0)
        assert site.engine.ends == {"cancelled": MOST_AT_ONCE}


class CrowdedEngine(FakeEngine):
    """An engine with a queue that other clients fill. `submit` finds the queue full in the calls in `refused`.

    `refused` has the numbers of these calls, counted from 1.
    """

    def __init__(self, refused: Container[int], **options: Any):
        super().__init__(**options)
        self.refused, self.calls = refused, 0

    def submit(self, request, deliver):
        self.calls += 1
        if self.calls in self.refused:
            raise QueueFull("too many requests wait")
        return super().submit(request, deliver)


def refused(site) -> str:
    lines = site.ask("/metrics").body.decode().splitlines()
    return next((line.split()[-1] for line in lines if line.startswith('llamaspec_http_refused_total{limit="q')), "0")


def test_more_inputs_than_the_queue_has_room_for_are_fed_in_as_room_comes():
    engine = FakeEngine(context=64, most=3)
    with running(engine) as site:
        inputs = [[5 + i] for i in range(3 * MOST_AT_ONCE)]
        assert len(vectors(site, {"input": inputs})) == len(inputs)
        assert [request.prompt for request in engine.requests] == [tuple(tokens) for tokens in inputs]
        assert refused(site) == "0"


def test_a_begun_request_waits_while_other_clients_fill_the_queue():
    with running(CrowdedEngine(range(2, 5), context=64, most=1)) as site:
        assert len(vectors(site, {"input": [[5], [6], [7]]})) == 3
        assert refused(site) == "0"


def test_a_queue_that_others_have_filled_refuses_the_request():
    engine = CrowdedEngine(range(1, 2), context=64)
    with running(engine) as site:
        reply = site.ask(PATH, {"input": [[5], [6]]})
        assert (reply.status, reply.error["code"], engine.calls) == (429, "queue_full", 1)
        assert refused(site) == "1.0"


@pytest.mark.parametrize("limits", [ClientLimits(request_seconds=0.4), ClientLimits()])
def test_the_time_limit_counts_for_all_inputs_together(limits):
    engine = FakeEngine(context=64, most=1, seconds=0.1)
    body = {"input": [[5 + i] for i in range(20)]} | ({"max_seconds": 0.4} if limits == ClientLimits() else {})
    with running(engine, limits=limits) as site:
        reply = site.ask(PATH, body)
        assert (reply.status, reply.error["code"]) == (503, "expired")
        deadlines = [request.deadline or 0 for request in engine.requests]
        assert 1 < len(deadlines) < 6 and deadlines == sorted(deadlines, reverse=True)
        assert 0 < deadlines[-1] <= 0.4 - 0.1 * (len(deadlines) - 1)
        until(lambda: engine.open == 0)


def test_a_request_that_waits_for_others_expires():
    with running(CrowdedEngine(range(2, 10_000), context=64)) as site:
        reply = site.ask(PATH, {"input": [[5], [6]], "max_seconds": 0.2})
        assert (reply.status, reply.error["code"]) == (503, "expired")


def test_a_request_that_is_not_all_in_the_engine_ends_when_the_server_drains():
    with more_inputs_than_at_once() as (site, connection):
        site.stop()
        until(lambda: site.engine._draining)
        site.engine.pause = None
        reply = read_reply(connection)
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")


def test_finished_work_is_not_refused_while_prompts_wait_to_be_encoded(monkeypatch):
    engine = FakeEngine(context=64)
    engine.pause = 0
    with running(engine) as site:
        with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
            connection.sendall(request_bytes(PATH, {"input": [[5]]}))
            until(lambda: engine.open == 1)
            monkeypatch.setattr("llamaspec.serving.api.MOST_PREPARED", 0)
            engine.pause = None
            assert read_reply(connection).status == 200


def test_writing_the_answer_takes_little_more_memory_than_the_answer():
    """Writing an answer takes at most half of its size as additional memory.

    Lists of Python floats for all inputs would take 1.5 times its size.
    """
    draw = np.random.default_rng(0)
    embeddings = [Embedding(vector, vector) for vector in draw.standard_normal((64, 2048)).astype(np.float32)]
    body = EmbeddingRequest(input="a")
    tracemalloc.start()
    answer = answer_in_json(body, embeddings, model="m[]", tokens=1, pooling="last")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * len(answer)
    entries = json.loads(answer)["data"]
    assert [entry["embedding"] for entry in entries] == [unit(vector, None).tolist() for vector, _ in embeddings]


@pytest.mark.sampled(1)  # 12 s each
@pytest.mark.parametrize("name", MODELS)
def test_an_embedding_is_the_reference_s_final_hidden_state_in_any_company(name):
    """An embedding has the same bits with and without other texts, and `reference.llama` computes the same vector."""
    model, draw = served(name), np.random.default_rng(0)
    checkpoint = random_checkpoint(replace(CONFIGS[name], tied=False), seed=0)
    params, config = load_reference_params(checkpoint), model.config
    for length in (1, CHUNK, 3 * CHUNK + 2):
        prompt = tuple(int(token) for token in draw.integers(5, 50, length))
        single, together = Server(model), Server(model)
        single.submit(Request(prompt, 0, embeds=True))
        alone = single.finish()[0]
        together.submit(Request((*prompt, 7), 1))
        together.finish()  # now the prefix cache has the prompt's pages
        for seed in range(3):
            together.submit(Request((*prompt[: 4 * seed + 1], 7), 9, seed=seed, temperature=1.0))
        together.turn()
        number = together.submit(Request(prompt, 0, embeds=True))
        together.submit(Request((1, 2, 5, 6, 7, 8, 9, 10, 11), 5))
        assert together.finish()[number] == alone
        assert sorted(alone.pooled) == [*range(0, length, CHUNK)] and alone.reason == "length"
        x, _ = llama.hidden_states(params, np.array(prompt), llama.empty_cache(config), config=config)
        exact = llama.apply_norm(x, params.norm, params.norm_bias, config=config)
        last = alone.pooled[max(alone.pooled)][0]
        total = np.sum([pooled[1] for pooled in alone.pooled.values()], axis=0)
        size = np.abs(exact).max()
        assert np.abs(last - exact[-1]).max() < 1e-4 * size
        assert np.abs(total - exact.sum(axis=0)).max() < 1e-4 * size * length


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        (None, "last"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False, "include_prompt": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({}, "mean"),
        ({"pooling_mode": ["mean", "max"]}, "mean and max"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_the_files_of_sentence_transformers_state_the_pooling(tmp_path, switches, expected):
    if switches is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8} | switches))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert read_pooling(tmp_path) == read_pooling(tmp_path / "model.safetensors") == expected


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"type": kind if "." in kind else f"sentence_transformers.models.{kind}", "path": path}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ([module("Transformer"), module("Pooling", "pool"), module("Normalize", "2_Normalize")], "max"),
        ([module("Transformer"), module("Pooling", "pool"), module("Dense", "2_Dense")], "max and then Dense"),
        ([module("Transformer"), module("sentence_transformers.base.modules.dense.Dense", "1_Dense")], "Dense"),
        ([module("custom.Pooling", "pool")], "custom.Pooling"),
        ([module("Transformer")], "last"),
    ],
)
def test_modules_of_sentence_transformers_change_a_vector(tmp_path, modules, expected):
    """`read_pooling` names every module that changes a vector, except for modules that only normalize it."""
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text('{"pooling_mode": "max"}')
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert read_pooling(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{}", "is not a JSON list"),
        ("[1]", "contains 1, expected objects with the strings type and path"),
        ('[{"type": "x", "path": "../y"}]', r'the path of a module is "\.\./y"'),
    ],
)
def test_modules_that_cannot_be_used_are_refused(tmp_path, text, what):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"modules\.json: {what}"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("number", "expected"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last"), (9, "type 9")]
)
def test_a_gguf_file_states_the_pooling(tmp_path, number, expected):
    keys: dict = {"general.architecture": (STRING, "qwen3")}
    keys |= {} if number is None else {"qwen3.pooling_type": (U32, number)}
    assert read_pooling(File(keys, {}).write(tmp_path / "x.gguf")) == expected


@pytest.mark.parametrize("pooling", ["cls", "mean and then Dense"])
def test_a_pooling_that_we_lack_must_be_replaced_by_the_request(pooling):
    with running(FakeEngine(), pooling=pooling) as site:
        reply = site.ask(PATH, {"input": "a"})
        assert (reply.status, reply.error["param"]) == (400, "pooling") and pooling in reply.error["message"]
        assert site.ask(PATH, {"input": "a", "pooling": "mean"}).status == 200
