"""Write tekken.json: a small tokenizer in Mistral's format, and the ids that Mistral's library gives for texts.

Run `python -m tests.goldens.make_tekken` in the root, in an environment with mistral-common and tokenizers.
"""

import json
import tempfile
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

PATH = Path(__file__).with_name("tekken.json")
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "Once upon a time there was a fox who had a big red hat. The fox and the crow sang a song in the rain.",
    "def readLines(fileName): return openFile(fileName).read()  // HTTPServer, JSONObject, camelCase == camelCase",
    "Il était une fois un renard. Ein Fuchs hörte die Vögel. Жила-была лиса. 昔々、狐がいました。",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces ",
    "\n\n\tx\r\n",
    "HTTPServer2024 //\n",
    "2024, 3.14159",
    "'s don't SHE'LL",
    "[INST]fox[/INST]</s><SPECIAL_20>",
    "👋 e\u0301 ﬁ ǅ",
    "a\0b",
    " " * 200 + "x",
]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"]


def trained_tokens() -> list[bytes]:
    """Return the tokens by rank: the 256 single bytes, then the trained tokens."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte = {chr(b): b for b in printable}
    byte |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in printable)}
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes([b]) for b in range(256)] + [bytes(byte[c] for c in token) for token, _ in entries if len(token) > 1]


def main() -> None:
    import mistral_common  # pyright: ignore[reportMissingImports]
    from mistral_common.tokens.tokenizers.tekken import (  # pyright: ignore[reportMissingImports]
        SpecialTokenPolicy,
        Tekkenizer,
    )

    # Imported here, since this module of ours writes the file that the library then reads.
    from tests.support.tiny_tokenizers import tekken

    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(SPECIAL)]
    tokens, cases = trained_tokens(), {}
    for version, changes in {"v3": {}, "v13": {"special_tokens": special}}.items():
        file = tekken(tokens, PATTERN, controls=24, **changes)
        file["config"]["version"] = version
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tekken.json"
            path.write_text(json.dumps(file))
            library = Tekkenizer.from_file(path)
        count = library.n_words
        cases[version] = {
            "file": file,
            "vocab": count,
            "bos": library.bos_id,
            "pieces": [library.decode([id], SpecialTokenPolicy.KEEP) for id in range(count)],
            "texts": [{"text": text, "ids": library.encode(text, bos=False, eos=False)} for text in TEXTS],
        }
    goldens = {"made by": f"mistral-common {mistral_common.__version__}", "cases": cases}
    PATH.write_text(json.dumps(goldens, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
