"""The stories as documents to train on, with questions whose answers are known."""

from collections.abc import Mapping
from functools import cache

from llamaspec.model.checkpoints.open import BUILT_IN
from llamaspec.model.tokenizers.sentencepiece_model import read_sentencepiece
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.training.data import Example
from llamaspec.training.recipe import Recipe
from llamaspec.training.stories import vocabulary
from llamaspec.training.stories.talk import Message
from llamaspec.training.stories.vocabulary import BOS, EOS, Document, documents, encode, entropy_rate, messages

HELD_OUT = 400  # documents that the loss is measured on
QUESTIONS = 200
SPREAD = 2**40  # between the first documents of two seeds


class Stories:
    """The corpus that this repository writes: it never ends, and no story comes twice.

    Nothing is made before it is asked for, so that training on another text does not wait for the stories.
    """

    bos, eos = BOS, EOS

    @property
    def files(self) -> Mapping[str, bytes]:
        """Files that the model needs beside its weights, by name."""
        return _files()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the stories themselves train, in a few seconds."""
        return _tokenizer()

    @property
    def floor(self) -> float:
        """Nats per counted token of the held-out documents: no model's mean loss is less."""
        return entropy_rate(_held_out(HELD_OUT))

    def training(self, step: int, recipe: Recipe) -> list[Example]:
        """Give the documents of a step: a function of the step and the recipe alone.

        Even seeds train; of those, 4 n are stories and 4 n + 2 conversations. Three in four documents are
        conversations, which hold stories, too: answers take longest to learn.
        """
        first = recipe.seed * SPREAD + step * recipe.batch
        seeds = [4 * n + (0 if n % 4 == 0 else 2) for n in range(first, first + recipe.batch)]
        return [self._example(messages(seed), answers=recipe.answers) for seed in seeds]

    def held_out(self) -> list[Example]:
        """Give documents of odd seeds, which no step trains on."""
        return [Example(ids, [float(c) for c in counted]) for ids, counted, _ in _held_out(HELD_OUT)]

    def questions(self) -> list[Example]:
        """Give held-out questions about a story, each with its answer."""
        return questions(self.tokenizer, QUESTIONS)

    def _example(self, said: list[Message], *, answers: float) -> Example:
        """Turn a conversation into an example whose answers about stories weigh `answers` times as much as the rest."""
        ids, counted, _ = encode(said, self.tokenizer)
        weights = [float(c) for c in counted]
        end = len(ids)
        for message in reversed(said):  # each ends where the next begins
            start = end - len(encode([message], self.tokenizer).ids) + 1  # less the <s>
            if message.of_story:
                weights[start:end] = [w * answers for w in weights[start:end]]
            end = start
        return Example(ids, weights)


@cache
def _files() -> dict[str, bytes]:
    kept = ("tokenizer_config.json", "chat_template.jinja")  # the first for transformers alone
    files = {name: (BUILT_IN["stories"] / name).read_bytes() for name in kept}
    return {"tokenizer.model": vocabulary.train_tokenizer(), **files}


@cache
def _tokenizer() -> Tokenizer:
    return read_sentencepiece(_files()["tokenizer.model"], path="the stories' tokenizer")


@cache
def _held_out(count: int) -> list[Document]:
    return list(documents(range(1, 2 * count, 2), _tokenizer()))


def questions(tokenizer: Tokenizer, count: int) -> list[Example]:
    """Give held-out conversations, each cut behind an answer that a story decides; the answer alone is counted.

    An answer is right if each of its ids is the likeliest after those before it: decoding at temperature 0 then gives
    the same answer.
    """
    found: list[Example] = []
    seed = 1
    while len(found) < count:
        said = messages(seed)
        for turn, message in enumerate(said):
            if message.of_story:
                before, all = encode(said[:turn], tokenizer), encode(said[: turn + 1], tokenizer)
                header = len(before.ids) + 1  # the name of the role
                found.append(Example(all.ids, [float(i >= header) for i in range(len(all.ids))]))
        seed += 2
    return found[:count]
