"""The built-in model: its card is correct, transformers computes the same logits, and its stories are as stored."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from llamaspec import SamplingOptions, cli, load
from llamaspec.commands.chat import STORIES as SUGGESTED
from llamaspec.model.chat.chat import Chat
from llamaspec.model.chat.template import SpecialTokens, find_template
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.open import BUILT_IN, open_checkpoint, place_of
from llamaspec.model.tokenizers.tokenizer import encode_text
from llamaspec.training.stories import vocabulary
from llamaspec.training.stories.talk import NAMES
from tests.goldens.make_stories import CHAT, MODEL
from tests.support.goldens import read_golden

GOLDEN = read_golden("stories")
STORY = (Path(__file__).parents[1] / "goldens/story.txt").read_text()
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json")


GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture(scope="module")
def stories():
    return load("stories", greedy=True)


@pytest.mark.slow  # 18 s
def test_it_is_small_and_the_one_that_the_card_describes():
    assert BUILT_IN["stories"].samefile(MODEL)
    assert sum((MODEL / name).stat().st_size for name in FILES) < 4_000_000
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert f"`{digest}`" in (MODEL / "README.md").read_text()
    assert (MODEL / "tokenizer.model").read_bytes() == vocabulary.train_tokenizer()


@pytest.mark.parametrize("backend", ["jax", pytest.param("reference", marks=pytest.mark.slow)])
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


@pytest.mark.slow  # 9 s
def test_transformers_reads_the_same_directory(stories):
    """transformers gives the same ids and the same greedy story, and its logits agree with ours.

    Logits differ by at most 1e-5 times the largest logit.
    """
    tokenizer = stories.tokenizer
    assert {text: encode_text(tokenizer, text) for text in GOLDEN["texts"]} == GOLDEN["texts"]
    template = find_template(tokenizer, MODEL)
    assert SpecialTokens(tokenizer).encode(template.render(CHAT)) == GOLDEN["chat"]
    logits, expected = stories.logits(GOLDEN["story"]), np.array(GOLDEN["logits"])
    assert np.abs(logits[GOLDEN["positions"]] - expected).max() <= 1e-5 * np.abs(expected).max()
    tokens = list(stories.generate("", sampling=GREEDY, max_new_tokens=60))
    assert [token.id for token in tokens] == GOLDEN["story"][1:]


def test_it_answers_questions_about_what_it_told_and_declines_others(stories):
    """The chat tells a story, answers a question about it, declines two other questions, and tells a second story."""
    chat = Chat(stories, find_template(stories.tokenizer, place_of("stories")))

    def reply(text: str) -> str:
        return "".join(token.text for token in chat.reply(text, sampling=GREEDY))

    story = reply("Tell me a story about a fox and a red kite.")
    assert "fox" in story and "Something red lay under a bush. It was a kite!" in story
    assert reply("What color was the kite?") == "It was red."
    assert reply("Who won the war?") == "I do not know that. Ask me about Pip, or for another story."
    another = reply("Tell me another story.")
    assert len(another) > 400 and not {"Pip", "kite"} & set(another.replace(".", "").split())
    assert reply("How old was the robot?") == "The story does not say."
    assert reply("Who won the war?") == "I do not know that. Ask me about Emma, or for another story."


@pytest.mark.slow  # 14 s
def test_nine_more_stories_are_nine_stories(stories):
    """Nine more stories in one chat are complete and all different from each other."""
    chat = Chat(stories)

    def reply(text: str, seed: int) -> str:
        chat.make_room(text, answer=512)
        return "".join(token.text for token in chat.reply(text, seed=seed, max_new_tokens=512))

    reply("Tell me a story.", 100)
    stories_told = [reply("Tell me another story.", 100 + n) for n in range(1, 10)]
    assert len(set(stories_told)) == 9
    assert all(len(text) > 400 and text.endswith((".", '"')) for text in stories_told)


REQUESTS, QUESTIONS = re.sub(r"\s+", " ", SUGGESTED).split("Once it has told one:")


@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.parametrize("first_line", re.findall(r"Tell me a story about [^.]+\.", REQUESTS))
def test_what_help_suggests_to_ask_is_answered(stories, first_line):
    """After every story that help suggests, every question that help suggests gets an answer.

    An earlier version of the model answered "There is no Anna in the story.".
    """
    chat = Chat(stories)
    story = "".join(token.text for token in chat.reply(first_line, max_new_tokens=512, sampling=GREEDY))
    hero = next(name for name in re.findall(r"[A-Z][a-z]+", story) if name in NAMES)
    for template in re.findall(r"[A-Z][^?]+\?", QUESTIONS):
        question = template.replace("Anna", hero)
        answer = "".join(token.text for token in chat.reply(question, max_new_tokens=40, sampling=GREEDY))
        assert not re.match("There is no|The story does not|I do not know|I tell", answer), (question, answer)
        assert not template.startswith("Where") or answer.removeprefix("In ").rstrip(".") in story, (question, answer)
