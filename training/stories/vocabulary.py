"""The stories' tokenizer, and their tokens: what `llamaspec train` reads.

Trained by SentencePiece (byte-pair encoding) on the corpus itself, from a fixed range of seeds and on one thread, so
that it comes out the same to the byte. Nearly every word of the stories is a piece of its own; anything else that can
be written is spelt in bytes.

A document is one sequence of ids:

    <s> a story </s>
    <s> <|user|> a request <|assistant|> a story </s> <|user|> a question <|assistant|> an answer </s> ...

What follows a control token is encoded as the start of a text. The loss counts what the model is to say: stories,
answers, and the </s> behind each. What the person says is not counted, nor are <s> and the names of the roles.
"""

import io
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sentencepiece import SentencePieceTrainer

from model.tokenizers.sentencepiece_model import read_sentencepiece
from model.tokenizers.tokenizer import Tokenizer
from training.stories.corpus import Message, conversation, story

VOCAB = 1024
SEEDS = range(0, 8_000, 2)  # documents that the pieces are learnt from
BOS, EOS = 1, 2
USER, ASSISTANT = "<|user|>", "<|assistant|>"


class Document(NamedTuple):
    """A sequence to train on."""

    ids: list[int]
    counted: list[bool]  # whether the loss counts the prediction of this id
    nats: float  # -log p of what is counted: no model's summed loss can be less, on average


def train_tokenizer(seeds: Iterable[int] = SEEDS) -> bytes:
    """A `tokenizer.model`."""
    model = io.BytesIO()
    SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=(text for seed in seeds for _, text, _ in messages(seed)),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        control_symbols=[USER, ASSISTANT],
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def write_tokenizer(path: str | Path) -> None:
    Path(path).write_bytes(train_tokenizer())


def stories_tokenizer() -> Tokenizer:
    """The tokenizer itself, made anew: a few seconds."""
    return read_sentencepiece(train_tokenizer(), path="the stories' tokenizer")


def messages(seed: int) -> list[Message]:
    """What the document of this seed says: a story by itself, of the role "story", or a conversation."""
    rng = random.Random(seed)
    if seed % 4 < 2:  # of even seeds, which train, and of odd ones alike
        told = story(rng)
        return [Message("story", told.text, told.nats)]
    return conversation(rng)


def encode(said: Iterable[Message], tokenizer: Tokenizer) -> Document:
    """The ids of a conversation, or of a story by itself."""
    ids, counted, nats = [BOS], [False], 0.0
    for role, content, surprisal in said:
        header = [tokenizer.special[f"<|{role}|>"]] if role != "story" else []
        body = tokenizer.encode(content) + ([EOS] if role != "user" else [])
        ids += header + body
        counted += [False] * len(header) + [role != "user"] * len(body)
        nats += surprisal if role != "user" else 0.0
    return Document(ids, counted, nats)


def entropy_rate(documents: Iterable[Document]) -> float:
    """Nats per counted token: the floor of the mean loss on such documents."""
    surprisals, counts = zip(*((document.nats, sum(document.counted)) for document in documents), strict=True)
    return sum(surprisals) / sum(counts)


def documents(seeds: Iterable[int], tokenizer: Tokenizer) -> Iterator[Document]:
    return (encode(messages(seed), tokenizer) for seed in seeds)
