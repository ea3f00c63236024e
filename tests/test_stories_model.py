"""The built-in model: its card is right, transformers computes the same, and its stories are the golden ones."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import cli
from model import SamplingOptions, load
from model.chat.chat import Chat
from model.chat.template import SpecialTokens, find_template
from model.checkpoints.checkpoint import CheckpointError
from model.checkpoints.open import BUILT_IN, open_checkpoint, place_of
from model.tokenizers.tokenizer import encode_text
from tests.goldens.make_stories import CHAT, MODEL
from training.stories import vocabulary

GOLDEN = json.loads((Path(__file__).parent / "goldens/stories.json").read_text())
STORY = (Path(__file__).parent / "goldens/story.txt").read_text()
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json")


GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture(scope="module")
def stories():
    return load("stories", greedy=True)


def test_it_is_small_and_the_one_that_the_card_describes():
    assert BUILT_IN["stories"] == MODEL
    assert sum((MODEL / name).stat().st_size for name in FILES) < 4_000_000
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert f"`{digest}`" in (MODEL / "README.md").read_text()
    assert (MODEL / "tokenizer.model").read_bytes() == vocabulary.train_tokenizer()


@pytest.mark.parametrize("backend", ["jax", "reference"])
def test_the_same_story_byte_for_byte(backend, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["llamaspec", "story", "--seed", "7", "--temperature", "0", "--backend", backend])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capfd.readouterr().out) == (0, STORY)


def test_a_file_of_that_name_comes_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="stories"):
        open_checkpoint("stories")


def test_transformers_reads_the_same_directory(stories):
    """Ids exactly; logits to the float32 roundoff of both, 1e-5 of the largest; so the greedy story is the same."""
    tokenizer = stories.tokenizer
    assert {text: encode_text(tokenizer, text) for text in GOLDEN["texts"]} == GOLDEN["texts"]
    template = find_template(tokenizer, MODEL)
    assert SpecialTokens(tokenizer).encode(template.render(CHAT)) == GOLDEN["chat"]
    logits, expected = stories.logits(GOLDEN["story"]), np.array(GOLDEN["logits"])
    assert np.abs(logits[GOLDEN["positions"]] - expected).max() <= 1e-5 * np.abs(expected).max()
    tokens = list(stories.generate("", sampling=GREEDY, max_new_tokens=60))
    assert [token.id for token in tokens] == GOLDEN["story"][1:]


def test_it_answers_questions_about_what_it_told(stories):
    """Three turns: a story that was asked for, and two answers that are in it. The template is the model's own."""
    chat = Chat(stories, find_template(stories.tokenizer, place_of("stories")))

    def reply(text: str) -> str:
        return "".join(token.text for token in chat.reply(text, sampling=GREEDY))

    story = reply("Tell me a story about a fox and a red kite.")
    assert "fox" in story and "red kite" in story
    assert reply("What color was the kite?") == "It was red."
    assert reply("Where was the kite?") == "It was in the long grass."
    assert "What was that in the long grass? It was a red kite!" in story
