"""`llamaspec serve` with the built-in model: it starts, answers correctly under load, and drains after SIGTERM."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamaspec.commands.serve import _fingerprint
from llamaspec.model.chat.template import ChatTemplate
from llamaspec.model.checkpoints.adapter import Adapter, write_adapter
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.options import SamplingOptions
from llamaspec.model.tokenizers.load import load_tokenizer
from tests.serving.serving_site import TOKENIZER
from tests.support import tiny_tokenizers
from tests.support.processes import REPOSITORY, run_llamaspec
from tests.support.random_models import SMALL, random_adapter
from tests.support.refusals import mentions
from tests.support.waiting import PATIENCE, until

PROVEN = REPOSITORY / "tests/goldens/proven_stories.json"

ANSWERS = 500.0  # seconds: on a busy machine 20 long answers take minutes
ASK = [{"role": "user", "content": "Tell me a story about a fox and a red kite."}]


class Server:
    """A server process, its URL, and its output."""

    def __init__(self, log: Path, *arguments: str):
        environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
        command = [sys.executable, "-c", "from llamaspec import cli; cli.main()", "serve", "--port", "0", *arguments]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stderr=out, cwd=log.parent, env=environment | {"PYTHONPATH": str(REPOSITORY)}
            )
        address = re.compile(r"http://\S+(?=\n)")  # the whole line has been written
        try:
            until(lambda: address.search(log.read_text()) or self.process.poll() is not None)
            match = address.search(log.read_text())
            assert match, log.read_text()
        except BaseException:
            self.process.kill()
            raise
        self.url = match[0]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=ANSWERS) as reply:
            return json.load(reply)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve") / "log", "--drain-seconds", "3600")
    yield server
    server.process.kill()
    server.process.wait()


def chat(server: Server, seed: int, **options: Any) -> dict[str, Any]:
    return server.ask("/v1/chat/completions", {"messages": ASK, "seed": seed, "max_tokens": 40, **options})


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_it_is_ready_when_health_says_so(server):
    assert server.ask("/health") == {"status": "ok"}
    (model,) = server.ask("/v1/models")["data"]
    assert (model["id"], model["owned_by"], model["context"]) == ("stories", "llamaspec", 1024)
    assert server.log.read_text() == f"stories is at {server.url}\n"


def test_a_request_has_the_same_text_alone_and_in_company(server):
    singles = [chat(server, seed) for seed in range(3)]
    assert len({*map(text, singles)}) == 3 and "fox" in text(singles[0])
    answers: dict[int, dict[str, Any]] = {}
    threads = [
        threading.Thread(target=lambda i=i: answers.update({i: chat(server, i % 3, temperature=1.0)}))
        for i in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text(answers[i]) for i in range(24)] == [text(singles[i % 3]) for i in range(24)]
    assert all(answers[i]["usage"] == singles[i % 3]["usage"] for i in range(24))


def test_a_script_compares_a_server_with_a_proven_text(server, tmp_path):
    """The script of docs/proofs.md accepts our server, and says where a wrong text differs."""
    vectors = json.loads(PROVEN.read_text("utf-8"))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(vectors | {"text": vectors["text"].replace("gentle", "greedy")}))
    command = [sys.executable, str(REPOSITORY / "docs/check_vectors.py")]
    right, wrong = (
        subprocess.run([*command, str(file), server.url, "stories"], capture_output=True, text=True)
        for file in (PROVEN, other)
    )
    assert (right.returncode, right.stderr) == (0, "") and right.stdout.startswith("right")
    assert wrong.returncode == 1 and "expected 'reedy boy" in wrong.stdout and "got 'entle boy" in wrong.stdout


def test_logprobs_of_a_prompt_do_not_depend_on_what_follows(server):
    def known(prompt: str, **options: Any) -> Any:
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, **options}
        return server.ask("/v1/completions", body)["choices"][0]["logprobs"]

    first = known("Once upon a time, there was a fox.")
    assert len(first["token_logprobs"]) == len(first["tokens"]) > 8
    assert first["token_logprobs"][0] is None and all(logprob <= 0 for logprob in first["token_logprobs"][1:])
    drawn = server.ask(
        "/v1/completions", {"prompt": "Once upon a time", "logprobs": 1, "max_tokens": 4, "temperature": 0}
    )
    again = known("Once upon a time" + drawn["choices"][0]["text"])
    likely = drawn["choices"][0]["logprobs"]["token_logprobs"]
    assert again["token_logprobs"][-4:] == pytest.approx(likely, abs=1e-3)


def test_lm_eval_gets_what_it_reads(server):
    """The server answers recorded requests of lm-eval 0.4.13 with the values that lm-eval reads.

    In the recorded run, lm-eval had the model_args tokenizer_backend=remote and custom_prefix_token_id=1, and reported
    a log-likelihood of -107.25116141175114. lm-eval installs datasets and many other packages, so the tests do not use
    it.
    """
    text = "Once upon a time, there was a fox who found a red kite in the old tree."
    info = server.ask("/tokenizer_info")
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    tokens = server.ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert server.ask("/detokenize", {"tokens": tokens})["prompt"] == text
    options = {"model": "stories", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = server.ask("/v1/completions", {"prompt": [[1, *tokens], [1, *tokens[:5]]], **options})
    sums, greedy = [], []
    for choice, context in zip(sorted(answer["choices"], key=lambda item: item["index"]), (1, 3), strict=True):
        known = choice["logprobs"]
        drawn = known["token_logprobs"][context:-1]
        sums.append(sum(drawn))
        likeliest = (max(top.values()) for top in known["top_logprobs"][context:-1])
        greedy.append([logprob == most for logprob, most in zip(drawn, likeliest, strict=True)])
    assert (len(greedy[0]), len(greedy[1])) == (23, 3)
    assert sums[0] == pytest.approx(-107.25116141175114, abs=23 * 1e-3)  # each of 23 tokens differs by 1e-3 or less
    assert any(greedy[0]) and not all(greedy[0])
    single = server.ask("/v1/completions", {"prompt": [1, *tokens[:5]], **options})["choices"][0]["logprobs"]
    assert sums[1] == sum(single["token_logprobs"][3:-1])

    stop = {"temperature": 0, "max_tokens": 12, "stop": [".", "</s>"], "seed": 1234, "model": "stories"}
    drawn = server.ask("/v1/completions", {"prompt": [tokens[:9]], **stop})["choices"][0]
    assert "." not in drawn["text"] and drawn["finish_reason"] in ("stop", "length")


LM_EVAL = shutil.which("lm-eval")
ROLLING = """
task: story
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.mark.slow  # 20 s, if lm-eval is installed
@pytest.mark.skipif(LM_EVAL is None, reason="needs lm-eval on the PATH: pip install 'lm-eval[api]'")
def test_lm_eval_finds_what_our_own_evaluation_finds(server, tmp_path):
    text = "Once upon a time, there was a fox who found a red kite in the old tree."
    (tmp_path / "text").write_text(text)
    (tmp_path / "story.jsonl").write_text(json.dumps({"page": text}))
    (tmp_path / "story.yaml").write_text(ROLLING.format(file=tmp_path / "story.jsonl"))
    where = f"model=stories,base_url={server.url}/v1/completions"
    model = ["--model", "local-completions", "--model_args"]
    model.append(f"{where},tokenizer_backend=remote,custom_prefix_token_id=1")
    tasks = ["--include_path", str(tmp_path), "--tasks", "story", "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    subprocess.run([str(LM_EVAL), "run", *model, *tasks], check=True, timeout=300, env=os.environ | offline)
    (result_file,) = (tmp_path / "out").rglob("results_*.json")
    expected = json.loads(result_file.read_text())["results"]["story"]["bits_per_byte,none"]
    actual = json.loads(run_llamaspec("eval", "--text", str(tmp_path / "text"), "--json").out)["bits_per_byte"]
    # Each of 23 log-probabilities differs by at most 1e-3, since programs with other shapes round differently.
    assert expected == pytest.approx(actual, abs=23 * 1e-3 / math.log(2) / len(text))


@pytest.mark.slow  # 25 s
def test_sigterm_under_load_lets_running_requests_finish(server):
    """After SIGTERM, running requests finish and new requests are refused.

    This test runs last, since the server ends.
    """
    long: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}  # 20 of these take longer than sending the requests
    full_text = text(chat(server, 5, **long))
    before = request_count(server)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(text(chat(server, 5, **long)))) for _ in range(20)]
    for thread in threads:
        thread.start()
    until(lambda: request_count(server) >= before + 20)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: turns_away(server))
    for thread in threads:
        thread.join(ANSWERS)
    assert answers == [full_text] * 20
    assert server.process.wait(ANSWERS) == 0
    assert "Traceback" not in server.log.read_text()


def turns_away(server: Server) -> bool:
    """Return whether the server refuses new requests, or has ended."""
    try:
        server.ask("/ready")
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return True
    except (urllib.error.URLError, ConnectionError):  # the latter if it ends during the request
        return True
    return False


def request_count(server: Server) -> float:
    """Count the requests that the engine has received, including ended requests."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE) as reply:
        values = re.findall(
            r"^llamaspec_(?:running|waiting|finished_total{.*}) (\S+)", reply.read().decode(), re.MULTILINE
        )
    return sum(map(float, values))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "0.0.0.0 reach --api-key"),
        (["--api-key", ""], 2, "API key must not be empty"),
        (["nowhere.gguf"], 1, "nowhere.gguf"),
        (["--max-batch", "0"], 2, "--max-batch"),
        (["--adapter", "folder"], 2, "--adapter NAME=DIR 'folder'"),
        (["--adapter", "a=x", "--adapter", "a=y"], 2, "two adapters name a"),
        (["--adapter", "stories=x"], 2, "--adapter stories the model has this name"),
        (["--adapter", "a=nowhere"], 1, "nowhere/adapter_config.json"),
        (["--context", "4096"], 1, "context must be between 1 and the model's 1024"),
        (["--host", "192.0.2.1", "--api-key", "k"], 1, "listen 192.0.2.1 port 8000"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments, code, message):
    done = run_llamaspec("serve", *arguments)
    assert done.code == code and done.out == ""
    assert done.err.startswith("error: ") and mentions(done.err, message) and done.err.count("\n") == 1


def test_a_missing_package_is_one_line():
    script = "import sys; sys.modules['aiohttp'] = None\nfrom llamaspec import cli; cli.main()"
    from tests.support.processes import run_python

    done = run_python(script, "serve")
    assert (done.code, done.err) == (1, "error: aiohttp is missing: pip install 'llamaspec[serve]'\n")


ONE, TWO = (random_adapter(SMALL, seed=seed) for seed in range(2))
ADAPTERS: list[dict[str, Adapter]] = [
    {"a": ONE},
    {"a": TWO},
    {"b": ONE},
    {"a": ONE, "b": TWO},
    {"a": replace(ONE, alpha=1.0)},
]


@pytest.mark.slow  # 9 s
def test_adapters_are_served_together(tmp_path):
    """Each request gets the same text, whether requests with different adapters run together or one by one.

    The base model and the two adapters give three different texts.
    """
    config = open_checkpoint("stories").config
    for name, seed in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        write_adapter(random_adapter(config, seed=seed, parts=("q", "up")), tmp_path / name, config, base="stories")
    arguments = ("--adapter", "one=one", "--adapter", "two=two", "--context", "128", "--max-batch", "3")
    server = Server(tmp_path / "log", *arguments)
    try:
        models = [model["id"] for model in server.ask("/v1/models")["data"]]
        assert models == ["stories", "one", "two"]
        singles = {model: text(chat(server, 7, model=model)) for model in models}
        assert len({*singles.values()}) == 3
        answers: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda model=model: answers.update({model: text(chat(server, 7, model=model))}))
            for model in models
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == singles
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.slow  # 13 s
def test_a_fingerprint_changes_with_whatever_a_text_depends_on(tmp_path):
    names = ("context", "dtype", "quantize", "cache", "kernels", "max_batch", "devices")
    options: dict[str, Any] = {name: None for name in names}
    template = ChatTemplate("t", "a")
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=("<x>",)))
    prints = [
        _fingerprint("stories", options, TOKENIZER, template, None),
        _fingerprint("other", options, TOKENIZER, template, None),
        _fingerprint("stories", options | {"max_batch": 2}, TOKENIZER, template, None),
        _fingerprint("stories", options | {"devices": 2}, TOKENIZER, template, None),
        _fingerprint("stories", options, load_tokenizer(tmp_path), template, None),
        _fingerprint("stories", options, TOKENIZER, None, None),
        _fingerprint("stories", options, TOKENIZER, template, SamplingOptions()),
        _fingerprint("stories", options, TOKENIZER, ChatTemplate("t", "b"), None),
        _fingerprint("stories", options, TOKENIZER, ChatTemplate("t", "a", named={"tool_use": "b"}), None),
        _fingerprint("stories", options, TOKENIZER, ChatTemplate("t", "a", {"bos_token": "<s>"}), None),
        *(_fingerprint("stories", options, TOKENIZER, template, None, adapters) for adapters in ADAPTERS),
    ]
    assert len({*prints}) == len(prints)
    # The fingerprint depends on the template's content, not on the name of its file.
    assert _fingerprint("stories", options, TOKENIZER, ChatTemplate("u", "a"), None) == prints[0]
