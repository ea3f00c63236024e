"""Regular expressions by which byte-level tokenizers split a text into pieces, for each name in tokenizer.ggml.pre.

The names come from llama.cpp (src/llama-vocab.cpp, `load` and `llm_tokenizer_bpe`, commit 00ad355). We support the
names that tokenizers of our architectures use. The first pattern splits a text into pieces, the second pattern splits
these pieces, and so on. Text between two matches is also a piece.

We use the patterns of the original tokenizers. llama.cpp differs in two cases. Its regular expressions have no classes
for upper and lower case, so it has rewritten the patterns of gpt-4o and tekken, and it splits text with non-ASCII
capitals or combining marks differently. In deepseek-llm and deepseek-coder, it does not treat U+3000 as white space.

We leave out "superbpe" (OLMo 2 with SuperBPE): its pattern takes quadratic time for a long run of digits.

If a file lacks the key, we use "default". llama.cpp does the same, with a warning.
"""

from typing import NamedTuple

from llamaspec.reference.byte_bpe import GPT2, LLAMA3, QWEN2, TEKKEN


class Cutting(NamedTuple):
    """The rules of a byte-level tokenizer for splitting a text into pieces, before it applies merges."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # whether a piece that is a token becomes this token, even if no merges make it
    bos: bool = False  # whether texts begin with BOS if no key of the file says so


DIGIT, CONTRACTION = r"\p{N}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE, SPACES = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITALS, SMALLS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"{BEFORE}{CAPITALS}*{SMALLS}+{CONTRACTION}?|{BEFORE}{CAPITALS}+{SMALLS}*{CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
QWEN35 = rf"{CONTRACTION}|{BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
SEED_CODER = rf"{CONTRACTION}|{BEFORE}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
WORDS_WITHOUT_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CHINESE, JAPANESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
# The letters with upper and lower case, as DeepSeek's tokenizer.json lists them (about Unicode 11).
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
DEEPSEEK = ("[\\r\\n]", rf"\s?[{CASED}]+", rf"\s?[{PUNCTUATION}]+", r"\s+$", CHINESE, r"\p{N}+")
DEEPSEEK_CODER = ("[\\r\\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, DIGIT)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
UFAKZEKA = rf"{BEFORE}\p{{L}}+|{DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"  # Qwen 2's without contractions
MINICPM5 = (r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))

# If several names have the same patterns, we write files with the first name.
_NAMES: dict[str, Cutting] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Cutting((LLAMA3,), whole_words=True, bos=True),
    "qwen2 deepseek-r1-qwen kormo megrez hunyuan solar-open grok-2 stablelm2 f2llmv2": Cutting((QWEN2,)),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4": Cutting((GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Cutting((DIGIT, GPT2)),
    "tekken": Cutting((TEKKEN,), whole_words=True, bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Cutting((GPT4O,)),
    "dbrx smaug-bpe chatglm-bpe": Cutting((LLAMA3,)),
    "glm4": Cutting((LLAMA3,), whole_words=True),
    "minicpm5": Cutting(MINICPM5, whole_words=True),
    "deepseek-llm": Cutting(DEEPSEEK),
    "deepseek-coder": Cutting(DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm": Cutting((r"\p{N}{1,3}", JAPANESE, DEEPSEEK3)),
    "falcon": Cutting(FALCON),
    "qwen35": Cutting((QWEN35,)),
    "seed-coder": Cutting((SEED_CODER,)),
    "poro-chat bloom gpt3-finnish": Cutting((WORDS_WITHOUT_PUNCTUATION,)),
    "ufakzeka": Cutting((UFAKZEKA,)),
    "viking": Cutting((WORDS_WITHOUT_PUNCTUATION, DIGIT)),
    "default": Cutting(DEFAULT),
}
CUTTINGS = {name: cutting for names, cutting in _NAMES.items() for name in names.split()}
