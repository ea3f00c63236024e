"""The stories as training documents, with questions and their known answers."""

from collections.abc import Mapping
from functools import cache

from llamaspec.model.checkpoints.open import BUILT_IN
from llamaspec.model.tokenizers.sentencepiece_model import read_sentencepiece
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.training.data import Example, digest, tokenizer_digest
from llamaspec.training.recipe import Recipe
from llamaspec.training.stories import vocabulary
from llamaspec.training.stories.talk import TalkMessage
from llamaspec.training.stories.vocabulary import BOS, EOS, Document, documents, encode, entropy_rate, messages

HELD_OUT = 400  # documents for measuring the loss
QUESTIONS = 200
SAMPLED = range(0, 128, 2)  # seeds of the documents that stand for all in the digest
SPREAD = 2**40  # distance between the first documents of two seeds


class Stories:
    """The generated corpus. It is endless, and no story appears twice.

    Everything is made on demand, so training on a different text does not wait for the stories.
    """

    bos, eos = BOS, EOS

    @property
    def files(self) -> Mapping[str, bytes]:
        """Files of the model besides its weights, by name."""
        return _files()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, trained on the stories in a few seconds."""
        return _tokenizer()

    @property
    def digests(self) -> Mapping[str, str]:
        """Digests of the stories and of their tokenizer."""
        sample = [message.content for seed in SAMPLED for message in messages(seed)]
        return {
            "stories": digest(*(text.encode() for text in sample)),
            "tokenizer": tokenizer_digest(self.tokenizer, self.files),
        }

    @property
    def floor(self) -> float:
        """The entropy of the held-out documents, in nats per token that counts in the loss.

        No model has a lower expected loss on such documents.
        """
        return entropy_rate(_held_out(HELD_OUT))

    def training(self, step: int, recipe: Recipe) -> list[Example]:
        """Return the documents of a step. They depend only on the step and the recipe.

        Even seeds are for training: 4 n gives a story, 4 n + 2 a conversation. Three in four documents are
        conversations, which contain stories too, because answers take longest to learn.
        """
        first = recipe.seed * SPREAD + step * recipe.batch
        seeds = [4 * n + (0 if n % 4 == 0 else 2) for n in range(first, first + recipe.batch)]
        return [self._example(messages(seed), answers=recipe.answers) for seed in seeds]

    def held_out(self) -> list[Example]:
        """Return documents of odd seeds, which no step trains on."""
        return [Example(ids, [float(c) for c in counted]) for ids, counted, _ in _held_out(HELD_OUT)]

    def questions(self) -> list[Example]:
        """Return held-out questions about stories, with their answers."""
        return questions(self.tokenizer, QUESTIONS)

    def _example(self, conversation: list[TalkMessage], *, answers: float) -> Example:
        """Turn a conversation into an example. Answers about stories have weight `answers`, other text has weight 1."""
        ids, counted, _ = encode(conversation, self.tokenizer)
        weights = [float(c) for c in counted]
        end = len(ids)
        for message in reversed(conversation):  # a message ends at the start of the next
            start = end - len(encode([message], self.tokenizer).ids) + 1  # without the <s>
            if message.of_story:
                weights[start:end] = [w * answers for w in weights[start:end]]
            end = start
        return Example(ids, weights)


@cache
def _files() -> dict[str, bytes]:
    copied = ("tokenizer_config.json", "chat_template.jinja")  # only transformers needs the first
    files = {name: (BUILT_IN["stories"] / name).read_bytes() for name in copied}
    return {"tokenizer.model": vocabulary.train_tokenizer(), **files}


@cache
def _tokenizer() -> Tokenizer:
    return read_sentencepiece(_files()["tokenizer.model"], path="the stories' tokenizer")


@cache
def _held_out(count: int) -> list[Document]:
    return list(documents(range(1, 2 * count, 2), _tokenizer()))


def questions(tokenizer: Tokenizer, count: int) -> list[Example]:
    """Return held-out conversations, each cut after an answer about a story. Only the answer counts.

    An answer is right if each of its ids is the likeliest one after the ids before it. Greedy decoding then gives
    exactly this answer.
    """
    examples: list[Example] = []
    seed = 1
    while len(examples) < count:
        conversation = messages(seed)
        for turn, message in enumerate(conversation):
            if message.of_story:
                before, all = encode(conversation[:turn], tokenizer), encode(conversation[: turn + 1], tokenizer)
                header = len(before.ids) + 1  # the name of the role
                examples.append(Example(all.ids, [float(i >= header) for i in range(len(all.ids))]))
        seed += 2
    return examples[:count]
