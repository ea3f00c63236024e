"""Tokenizers of a few hundred tokens, made by hand; most tokens are single bytes or letters."""

import base64
import string
import struct
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def llama2c() -> bytes:
    """Build a tokenizer.bin of single letters, each with and without a leading space."""
    letters = string.ascii_letters + string.digits + string.punctuation
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)), " ", *letters]
    pieces += [f" {letter}" for letter in letters]
    records = [struct.pack("<fI", -i, len(piece.encode())) + piece.encode() for i, piece in enumerate(pieces)]
    return struct.pack("<I", max(map(len, pieces))) + b"".join(records)


def llama3() -> bytes:
    """Build Llama 3's tokenizer.model with the 256 bytes only; the control tokens have ids from 256 on."""
    return b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))


def tekken(tokens: Sequence[bytes], pattern: str, **changes: Any) -> dict[str, Any]:
    """Build a tekken.json with `tokens` in rank order and 20 control tokens.

    The stated vocabulary size leaves out the last of `tokens`.
    """
    controls = changes.pop("controls", 20)
    sizes = {"num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) - 1 + controls}
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]
    config = {"pattern": pattern, **sizes, "default_num_special_tokens": controls, "version": "v3"}
    return {"config": config, "vocab": entries, **changes}


def chatml(
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), added: tuple[str, ...] = ()
) -> str:
    """Build a tokenizer.json with the 256 bytes, special tokens, and added tokens that are text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in added])
    return tokenizer.to_str()
