"""The stories' tokenizer, and the stories as token ids.

SentencePiece (byte-pair encoding) trains the tokenizer on the corpus itself. The seeds are fixed and there is only one
thread, so the result is the same to the byte. Nearly every word of the stories is a single piece. All other text is
spelled in bytes.

A document is one sequence of ids:

    <s> a story </s>
    <s> <|user|> a request <|assistant|> a story </s> <|user|> a question <|assistant|> an answer </s> ...

Text after a control token is encoded like the start of a text. The loss counts the model's part: stories, answers, and
the </s> after each. It does not count the person's part, <s> and the role tokens.
"""

import io
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sentencepiece import SentencePieceTrainer

from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.training.stories.corpus import story
from llamaspec.training.stories.talk import TalkMessage, conversation

VOCAB = 1024
SEEDS = range(0, 8_000, 2)  # documents for training the tokenizer
BOS, EOS = 1, 2
USER, ASSISTANT = "<|user|>", "<|assistant|>"


class Document(NamedTuple):
    """A sequence to train on."""

    ids: list[int]
    counted: list[bool]  # whether the loss counts the prediction of this id
    nats: float  # -log p of the counted ids: a lower bound on any model's average summed loss


def train_tokenizer(seeds: Iterable[int] = SEEDS) -> bytes:
    """Train the tokenizer. Returns the bytes of a `tokenizer.model`."""
    model = io.BytesIO()
    SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=(text for seed in seeds for _, text, *_ in messages(seed)),
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
    """Train the tokenizer, and write it to a file."""
    Path(path).write_bytes(train_tokenizer())


def messages(seed: int) -> list[TalkMessage]:
    """Make the document of a seed: a single story, with the role "story", or a conversation."""
    rng = random.Random(seed)
    if seed % 4 < 2:  # half of the even seeds (training) and half of the odd ones (evaluation)
        tale = story(rng)
        return [TalkMessage("story", tale.text, tale.nats)]
    return conversation(rng)


def encode(turns: Iterable[TalkMessage], tokenizer: Tokenizer) -> Document:
    """Encode a conversation or a single story."""
    ids, counted, nats = [BOS], [False], 0.0
    for role, content, surprisal, _ in turns:
        header = [tokenizer.special[f"<|{role}|>"]] if role != "story" else []
        body = tokenizer.encode(content) + ([EOS] if role != "user" else [])
        ids += header + body
        counted += [False] * len(header) + [role != "user"] * len(body)
        nats += surprisal if role != "user" else 0.0
    return Document(ids, counted, nats)


def entropy_rate(documents: Iterable[Document]) -> float:
    """Return the nats per counted token, a lower bound on the mean loss on such documents."""
    surprisals, counts = zip(*((document.nats, sum(document.counted)) for document in documents), strict=True)
    return sum(surprisals) / sum(counts)


def documents(seeds: Iterable[int], tokenizer: Tokenizer) -> Iterator[Document]:
    """Make and encode the documents of `seeds`."""
    return (encode(messages(seed), tokenizer) for seed in seeds)
