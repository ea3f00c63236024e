"""llama.cpp's results for our GGUF files (goldens/gguf.json): ids and stories equal ours, and logits are near ours."""

import base64
import hashlib
from pathlib import Path

import numpy as np
import pytest

import llamaspec.reference.llama
from llamaspec import SamplingOptions, load
from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import encode_text
from llamaspec.reference.llama import empty_cache, forward
from tests.goldens import make_gguf
from tests.goldens.make_gguf_stories import COUNT, prompts, write_story
from tests.support.goldens import read_golden

STORIES = read_golden("gguf_stories")["stories"]
GOLDENS = read_golden("gguf")
IDS = np.array(GOLDENS["ids"])


def make_file(tmp_path: Path, name: str, sha256: str) -> Path:
    """Write the GGUF file that llama.cpp read for the golden, and check its hash."""
    path = tmp_path / f"{name}.gguf"
    if name.startswith("tokenizer-"):
        make_gguf.write_tokenizer(path, name.removeprefix("tokenizer-"))
    else:
        make_gguf.write_model(path, name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    return path


def logits_of(path: Path) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    params = load_reference_params(checkpoint)
    return forward(params, IDS, empty_cache(checkpoint.config), config=checkpoint.config)[0]


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def llama_cpp_logits(name: str) -> np.ndarray:
    raw = base64.b64decode(GOLDENS["logits"][name]["logits"])
    return np.frombuffer(raw, "<f4").reshape(len(IDS), -1).astype(np.float64)


@pytest.mark.sampled(4)  # 17 cases, 8 s
@pytest.mark.parametrize("name", GOLDENS["logits"])
def test_logits_are_near_those_of_llama_cpp(tmp_path, name):
    """Our logits differ from llama.cpp's by a relative error below 0.06, because only llama.cpp rounds activations.

    A wrong weight would cause a larger error. test_eval_emulation.py in tests/model/insight rounds activations as
    llama.cpp does, and allows a smaller error.
    """
    path = make_file(tmp_path, name, GOLDENS["logits"][name]["sha256"])
    assert distance(logits_of(path), llama_cpp_logits(name)) < 0.06


@pytest.mark.parametrize("name", GOLDENS["tokens"])
def test_texts_become_the_ids_of_llama_cpp(tmp_path, name):
    golden = GOLDENS["tokens"][name]
    tokenizer = load_tokenizer(make_file(tmp_path, f"tokenizer-{name}", golden["sha256"]))
    for text, ids in golden["ids"].items():
        assert encode_text(tokenizer, text) == ids, repr(text)


def test_llama_cpp_tells_the_story_of_stories260k(tmp_path, data):
    golden = GOLDENS["story"]
    make_gguf.write_story(path := tmp_path / "stories260K.gguf", data)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == golden["sha256"]
    tokenizer = load_tokenizer(path)
    for text, ids in golden["texts"].items():
        assert encode_text(tokenizer, text) == ids, repr(text)
    checkpoint = open_checkpoint(path)
    params, ids = load_reference_params(checkpoint), encode_text(tokenizer, "Once upon a time")
    assert golden["ids"][: len(ids)] == ids
    new = llamaspec.reference.llama.greedy(params, np.array(ids), config=checkpoint.config)
    assert golden["ids"] == [*ids, *(token for token, _ in zip(new, range(100 - len(ids)), strict=False))]


@pytest.mark.sampled(1)  # 2 to 7 s each
@pytest.mark.parametrize(("type", "backend"), [*((type, "reference") for type in make_gguf.WRITTEN), ("q8_0", "jax")])
def test_the_story_is_that_of_llama_cpp(tmp_path, type, backend):
    """For each GGUF type that we write, the greedy story equals llama.cpp's.

    With JAX, only one type is tested, because compiling takes seconds for each type.
    """
    golden, path = STORIES[type], tmp_path / "x.gguf"
    assert write_story(path, type) == golden["sha256"]
    llama, greedy = load(path, backend=backend, greedy=True), SamplingOptions(temperature=0.0)
    for prompt, text in zip(prompts(), golden["texts"], strict=True):
        tokens = llama.generate(prompt, sampling=greedy, max_new_tokens=COUNT)
        assert "".join(token.text for token in tokens) == text
