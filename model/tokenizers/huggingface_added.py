"""The tokens that files next to a tokenizer.json add to it, in the order of transformers 5.24.

1. tokenizer.json has added_tokens of its own.
2. The tokens of added_tokens_decoder in tokenizer_config.json are added in the order of their ids. Where both files
   have a token, the flags of tokenizer_config.json count.
3. Without an added_tokens_decoder, the tokens of added_tokens.json are added, and special_tokens_map.json is read (see
   `tokenizer_config.special_tokens`). A token of added_tokens.json is special if a key names it, and otherwise it is
   found in normalized text.
4. Each token that a key such as eos_token names, or the list of extra special tokens, is added as special unless one
   of the first three has it.

A token that the vocabulary has keeps its id, and a new one gets the next id. Source: transformers 5.24,
tokenization_utils_base.py, `_from_pretrained`, and tokenization_utils_tokenizers.py, `TokenizersBackend.__init__`.

Two rules are ours. A new token that would get another id than its file states is refused: the model's row would be
another token's. And a token that a key names, or that is a known marker of chats, is a control token even if it is
listed as not special: it ends an answer, as in mlx-lm and vLLM, and a person's text cannot spell it.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.limits import check_special
from llamaspec.model.tokenizers.tokenizer_config import (
    FLAGS,
    Added,
    SpecialToken,
    added_decoder,
    added_ids,
    read_config,
    special_tokens,
)


def add_tokens_beside(
    tokenizer: Tokenizer, folder: Path, *, markers: Collection[str], default: Mapping[str, str]
) -> None:
    """Add the tokens that files in `folder` state. A token with a name in `markers` is always a control token.

    `default` are special tokens by key, for the keys that no file states. Raises `CheckpointError`.
    """
    named, extra = special_tokens(folder)
    named = {key: SpecialToken(name) for key, name in default.items()} | named
    special = {token.content: token for token in (*named.values(), *extra) if token and token.content}
    stated = _stated(folder, special, listed=tokenizer.get_added_tokens_decoder().keys())
    check_special([*stated, *special], str(folder))
    listed = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    in_vocabulary = {name for name in stated if tokenizer.token_to_id(name) is not None}
    tokens = [_library(name, token) for name, token in sorted(stated.items(), key=lambda item: item[1].id)]
    tokens += [_library(name, token) for name, token in special.items() if name not in listed.keys() | stated.keys()]
    tokenizer.add_tokens(tokens)
    for name, token in stated.items():
        if name not in in_vocabulary and (id := tokenizer.token_to_id(name)) != token.id:
            raise refused(folder, f"token {short(name)} is stated to have id {token.id}, but the next free id is {id}")
    controls = {*special, *markers, *(name for name, token in listed.items() if token.special)}
    added = tokenizer.get_added_tokens_decoder().values()
    tokenizer.add_special_tokens(
        [_with_special(token) for token in added if token.content in controls and not token.special]
    )


def _stated(folder: Path, special: Collection[str], *, listed: Collection[int]) -> dict[str, Added]:
    """Collect the tokens that files in `folder` give ids to, by name.

    `listed` are the ids of tokenizer.json's added tokens.
    """
    if "added_tokens_decoder" in read_config(folder):
        return {name: token for name, token in added_decoder(folder).items() if name}
    return {
        name: Added(id, special=name in special, normalized=name not in special)
        for name, id in added_ids(folder).items()
        if name and id not in listed
    }


def _library(name: str, token: Added | SpecialToken) -> AddedToken:
    """Make the library's token. A `SpecialToken`, which a key names, is special."""
    flags = {flag: getattr(token, flag, True) for flag in FLAGS}
    return AddedToken(name, **flags)


def _with_special(token: AddedToken) -> AddedToken:
    flags = {flag: getattr(token, flag) for flag in FLAGS}
    return AddedToken(token.content, **{**flags, "special": True})
