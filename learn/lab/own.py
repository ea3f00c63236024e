"""Exercises of writing layers, from small ones to a complete Llama that tells a story."""

from collections.abc import Callable
from itertools import islice

import numpy as np

from llamaspec.learn.lab.built_in import built_in
from llamaspec.learn.lab.exercise import LayerToWrite
from llamaspec.reference import llama
from llamaspec.reference.sentencepiece_bpe import Piece, Vocabulary, decode, encode

CHAPTER = "Write it yourself"
LENGTH = 60  # number of tokens of the story
CLOSE = 1e-9  # allowed error, relative to the largest logit; the order of float64 sums changes it by less than 1e-12

TEXTS = ("", "a", "Once upon a time", "  two  spaces ", "\n", "héé 狐 🦊", "</s><0x41>", "▁▁", "banana bandana")


def _judge_bpe(candidate: Callable) -> str | None:
    """Compare the candidate's ids with the definition's ids.

    Tries vocabularies with and without bytes, and with ties.
    """
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
    params, config, vocabulary, start, _ = built_in()
    story = [start, *islice(llama.greedy(params, np.array([start]), config=config), LENGTH)]
    expected, _ = llama.forward(params, np.array(story), llama.empty_cache(config), config=config)
    for length in (1, 2, 7, len(story)):
        got = np.asarray(candidate(params, np.array(story[:length]), config=config))
        if got.shape != (length, config.vocab):
            return f"logits of {length} tokens: expected the shape {(length, config.vocab)}, got {got.shape}"
        off = np.max(np.abs(got - expected[:length]), axis=1) / np.max(np.abs(expected))
        if not (off <= CLOSE).all():
            at = int(np.argmax(~(off <= CLOSE)))
            text = decode(story[: at + 1], vocabulary)
            fault = f"wrong by {off[at]:.2g} times the largest logit"
            return f"the logits after token {at} are {fault}; the story up to this token is {text!r}"
    return None


_SKELETONS = {
    "softmax": '''def softmax(x):
    """Compute p_i = exp(x_i) / sum_j exp(x_j) for each row of x [rows n], in x's dtype. A row of -inf gives zeros."""
    raise NotImplementedError
''',
    "rmsnorm": '''def rmsnorm(x, weight, *, eps):
    """For each row of x [rows dim], compute y_i = weight_i x_i / sqrt(mean_j(x_j^2) + eps), in x's dtype."""
    raise NotImplementedError
''',
    "rope_halves": '''def rope_halves(x, positions, frequencies):
    """Rotate the features of x [batch seq heads head_dim] in pairs: feature i with feature i + head_dim/2.

    The angle of pair i is position * frequencies[i]. positions are [batch seq], frequencies [head_dim/2].
    """
    raise NotImplementedError
''',
    "attention": '''def attention(q, k, v, mask):
    """Compute softmax(q k / sqrt(head_dim) + mask) v for each head, in q's dtype.

    q is [batch queries heads head_dim], k and v are [batch keys kv_heads head_dim]. mask is [batch queries keys]: 0 for
    a key that a query may attend to, and -inf for any other key. Consecutive query heads share a key head. The result
    of a query that may attend to no key is zeros.
    """
    raise NotImplementedError
''',
    "ggml_encode": '''def ggml_encode(w, *, name):
    """Quantize w [rows cols] to ggml's Q4_0. Returns bytes [rows cols/32*18]: 18 bytes per block of 32 weights.

    All steps are in float32. Let m be the weight with the largest magnitude in the block, with its sign, and d = m/-8.
    The first two bytes of the block are d as float16, low byte first. Let r = 1/d, where d is not rounded to float16,
    or r = 0 for a block of zeros. The code of a weight w is min(15, floor(w r + 8.5)). 16 bytes follow. Byte i of them
    has code i in its low half and code i + 16 in its high half.
    """
    raise NotImplementedError
''',
    "encode": '''def encode(text, vocabulary, *, start=True):
    """Encode text as SentencePiece's BPE does. Returns a list of ids.

    1. If start is true and text is not empty, put a space in front of it. Replace each space by "▁" (U+2581).
    2. Split the text into characters: these are the first parts.
    3. Among all pairs of neighboring parts that together are a piece, join the pair whose piece has the highest score;
       on ties, join the leftmost pair. Repeat this while there is such a pair.
    4. Replace each part by the id of its piece. A part that is not a piece becomes the ids of its UTF-8 bytes. If the
       vocabulary has no bytes, each run of such parts becomes one id: unknown.

    vocabulary.pieces maps a text to its id and score. vocabulary.bytes has the ids of bytes 0 to 255, or is empty.
    vocabulary.unknown is an id.
    """
    raise NotImplementedError
''',
    "forward": '''def forward(params, tokens, *, config):
    """Compute the logits [seq vocab] after each of tokens [seq], in float64, without a cache.

    x starts as the embedding of each token. Every layer does two steps, where norm is RMSNorm with config.eps:

        n = norm(x) with the weight attention_norm;  x = x + o attention(rope(q n), rope(k n), v n)
        n = norm(x) with the weight ffn_norm;        x = x + down (silu(gate n) * (up n))

    The logits are head norm(x), with the weight params.norm. Attention is causal. Nothing is rounded.

    params.embedding and params.head are arrays [vocab dim], params.norm is [dim], and params.layers is a sequence. In a
    layer, attention_norm and ffn_norm are [dim]. q, k, v, o, ffn.gate, ffn.up and ffn.down each have an array weight
    [rows cols], applied as W x, and no bias in this model. config has heads, kv_heads, head_dim, eps and theta. RoPE
    rotates in halves: with head_dim d, feature i and feature i + d/2 at position m rotate by the angle
    m theta^(-2i/d).
    """
    raise NotImplementedError
''',
}

_TABLE = [
    ("softmax", "Write a softmax.", "Test rows of large numbers, and rows of only -inf.", "reference/softmax.py"),
    ("rmsnorm", "Write RMSNorm.", "Compute the sum in float32, even if x has another dtype.", "reference/rmsnorm.py"),
    ("rope_halves", "Write RoPE.", "Each of the two new halves needs both old halves.", "reference/rope.py"),
    ("attention", "Write grouped-query attention.", "Write it for one head first.", "reference/attention.py"),
    ("ggml_encode", "Write a quantizer: llama.cpp's Q4_0.", "Round in exactly the places that the docstring names: the "
     "order of the roundings matters.", "reference/quantizers/ggml_blocks.py"),
    ("encode", "Write a tokenizer: SentencePiece's BPE.", "Repeatedly join the pair with the highest score; on ties, "
     "the first one.", "reference/sentencepiece_bpe.py"),
    ("forward", "Write a complete Llama that tells a story.", "Use your earlier solutions; reference/config.py "
     "describes the fields of config.", "reference/llama.py"),
]  # fmt: skip
_JUDGES = {"encode": _judge_bpe, "forward": _judge_llama}


def exercises(first: int) -> list[LayerToWrite]:
    """Return the exercises to write layers, numbered from `first`."""
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
