"""Layers to write, from small ones to a whole Llama that tells a story."""

from collections.abc import Callable
from itertools import islice

import numpy as np

from llamaspec.learn.lab.exercise import LayerToWrite
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tokenizers.of_model import tokenizer_of
from llamaspec.model.tokenizers.tokenizer import decode
from llamaspec.reference import llama
from llamaspec.reference.sentencepiece_bpe import Piece, Vocabulary, encode

CHAPTER = "Write it yourself"
LENGTH = 60  # tokens of the story
CLOSE = 1e-9  # allowed error, relative to the largest logit; the order of float64 sums changes it by less than 1e-12

TEXTS = ("", "a", "Once upon a time", "  two  spaces ", "\n", "héé 狐 🦊", "</s><0x41>", "▁▁", "banana bandana")


def _judge_bpe(candidate: Callable) -> str | None:
    """Compare the candidate's ids with the definition's, with and without bytes, for texts with spaces and for ties."""
    spelt = "▁ a b n d ▁a an na nd ana ban ▁ban band".split()
    pieces = {
        text: Piece(256 + i, -float(len(spelt) - i) if len(text) == 1 else -float(i)) for i, text in enumerate(spelt)
    }
    tied = {text: piece._replace(score=-1.0) for text, piece in pieces.items()}
    for vocabulary in (
        Vocabulary(pieces, bytes=range(256), unknown=-1),
        Vocabulary(tied, bytes=range(256), unknown=-1),
        Vocabulary(pieces, bytes=(), unknown=0),
    ):
        for text in TEXTS:
            for start in (True, False):
                expected = encode(text, vocabulary, start=start)
                got = list(candidate(text, vocabulary, start=start))
                if got != expected:
                    return f"encode({text!r}, start={start}): expected {expected}, got {got}"
    return None


def _judge_llama(candidate: Callable) -> str | None:
    """Compare the candidate's logits with the definition's, for a story of the built-in model. Tolerance: `CLOSE`."""
    checkpoint = open_checkpoint("stories")
    params, config = load_reference_params(checkpoint), checkpoint.config
    tokenizer = tokenizer_of(checkpoint, None)
    story = [1, *islice(llama.greedy(params, np.array([1]), config=config), LENGTH)]
    expected, _ = llama.forward(params, np.array(story), llama.empty_cache(config), config=config)
    for length in (1, 2, 7, len(story)):
        got = np.asarray(candidate(params, np.array(story[:length]), config=config))
        if got.shape != (length, config.vocab):
            return f"logits of {length} tokens: expected shape {(length, config.vocab)}, got {got.shape}"
        off = np.max(np.abs(got - expected[:length]), axis=1) / np.max(np.abs(expected))
        if not (off <= CLOSE).all():
            at = int(np.argmax(~(off <= CLOSE)))
            text = decode(tokenizer, story[: at + 1])
            return f"the logits after token {at} are off by {off[at]:.2g} of the largest; so far the story is {text!r}"
    return None


_SKELETONS = {
    "softmax": '''def softmax(x):
    """p_i = exp(x_i) / sum_j exp(x_j), for each row of x [rows n], in x's dtype. A row of -inf alone gives zeros."""
    raise NotImplementedError
''',
    "rmsnorm": '''def rmsnorm(x, weight, *, eps):
    """y_i = weight_i x_i / sqrt(mean_j(x_j^2) + eps), for each row of x [rows dim], in x's dtype."""
    raise NotImplementedError
''',
    "rope_halves": '''def rope_halves(x, positions, frequencies):
    """Turn x [batch seq heads head_dim]: feature i and feature i + head_dim/2 by the angle position * frequency i.

    positions are [batch seq], frequencies [head_dim/2].
    """
    raise NotImplementedError
''',
    "attention": '''def attention(q, k, v, mask):
    """softmax(q k / sqrt(head_dim) + mask) v, a head at a time, in q's dtype.

    q is [batch queries heads head_dim], k and v are [batch keys kv_heads head_dim], mask is [batch queries keys]: 0 or
    -inf. Consecutive query heads share a key head. A query that may see nothing gives zeros.
    """
    raise NotImplementedError
''',
    "ggml_encode": '''def ggml_encode(w, *, name):
    """Quantize w [rows cols] to ggml's Q4_0: bytes [rows cols/32*18], blocks of 32 weights, a scale and 16 bytes each.

    d = (the weight of largest magnitude, with its sign) / -8 is stored as float16, low byte first. With r = 1/d of a d
    that is not rounded yet (0 for a block of zeros), a code is min(15, floor(w r + 8.5)), all in float32. Byte i of a
    block holds code i in its low half and code i + 16 in its high half.
    """
    raise NotImplementedError
''',
    "encode": '''def encode(text, vocabulary, *, start=True):
    """Encode text as SentencePiece's BPE does, to a list of ids:

    1. With start, put a space in front, but of an empty text. Write each space as "▁" (U+2581).
    2. Take the text apart into characters.
    3. Join the two neighbors whose joint piece scores highest, the leftmost on ties; repeat while any two are a piece.
    4. A part that is no piece becomes the ids of its UTF-8 bytes; without those, a run of such parts is one `unknown`.

    vocabulary.pieces maps a text to its id and score, vocabulary.bytes has the ids of bytes 0 to 255 or is empty, and
    vocabulary.unknown is an id.
    """
    raise NotImplementedError
''',
    "forward": '''def forward(params, tokens, *, config):
    """Compute the logits [seq vocab] after each of tokens [seq], in float64, without a cache.

    x = embedding of the tokens; in each layer x += o attention(q, k, v), of the norm of x with attention_norm, where q
    and k are turned by RoPE in halves; x += down (silu(gate) up), of the norm of x with ffn_norm; logits =
    head norm(x).

    params.embedding and params.head are arrays [vocab dim], params.norm is [dim], params.layers a sequence. In a layer,
    attention_norm and ffn_norm are [dim]; q, k, v, o, ffn.gate, ffn.up and ffn.down have a weight [rows cols], applied
    as W x, and no bias here. config has heads, kv_heads, head_dim, eps of the norms, and theta: of d / 2 pairs, pair i
    turns by theta^(-2i/d) a position. The model is causal, and rounds nowhere.
    """
    raise NotImplementedError
''',
}

_TABLE = [
    ("softmax", "Write a softmax.", "Think of rows of large numbers, and of rows of -inf.", "reference/softmax.py"),
    ("rmsnorm", "Write RMSNorm.", "Add up in float32 whatever the dtype of x is.", "reference/rmsnorm.py"),
    ("rope_halves", "Write RoPE.", "Both new halves need both old halves.", "reference/rope.py"),
    ("attention", "Write grouped-query attention.", "Write it for one head first.", "reference/attention.py"),
    ("ggml_encode", "Write a quantizer: llama.cpp's Q4_0.", "Follow the text of the docstring: the order of roundings "
     "decides.", "reference/quantizers/ggml_blocks.py"),
    ("encode", "Write a tokenizer: SentencePiece's BPE.", "Join the best pair, again and again: of equals the first.",
     "reference/sentencepiece_bpe.py"),
    ("forward", "Write a whole Llama, until it tells the story.", "Use what you wrote before; reference/config.py says "
     "what config holds.", "reference/llama.py"),
]  # fmt: skip
_JUDGES = {"encode": _judge_bpe, "forward": _judge_llama}


def exercises(first: int) -> list[LayerToWrite]:
    """List the layers to write, numbered from `first`."""
    return [
        LayerToWrite(
            number,
            CHAPTER,
            name,
            title,
            hint,
            file,
            _SKELETONS[name],
            op="" if name in _JUDGES else name,
            only=(("name", ("Q4_0",)),) if name == "ggml_encode" else (),
            judge=_JUDGES.get(name),
        )
        for number, (name, title, hint, file) in enumerate(_TABLE, first)
    ]
