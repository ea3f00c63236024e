"""Adds the tokens that files next to a tokenizer.json state, in the same order as transformers 5.24.

1. tokenizer.json has its own added_tokens.
2. We add the tokens of added_tokens_decoder in tokenizer_config.json in the order of their ids. If both files have a
   token, the flags of tokenizer_config.json count.
3. If there is no added_tokens_decoder, we add the tokens of added_tokens.json, and read special_tokens_map.json (see
   `tokenizer_config.special_tokens`). A token of added_tokens.json is special if a key such as eos_token names it;
   otherwise we search for it in the normalized text.
4. We add each token that a key such as eos_token names, or that is in the list of extra special tokens, as a special
   token, unless steps 1 to 3 have added it.

A token that is in the vocabulary keeps its id, and a new token gets the next free id. Source: transformers 5.24,
tokenization_utils_base.py, `_from_pretrained`, and tokenization_utils_tokenizers.py, `TokenizersBackend.__init__`.

We add two rules to the rules of transformers. First, we refuse a new token if the id that its file states is not the
next free id: with the wrong id, the model would use another token's embedding. Second, a token that a key names, or
that is a known chat marker, is a control token even if a file lists it as not special. So this token ends an answer, as
in mlx-lm and vLLM, and text in a user's message cannot become this token.
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
    """Add the tokens that files in `folder` state to `tokenizer`.

    A token with a name in `markers` is always a control token. `default` has special tokens by key, for keys that no
    file states. Raises `CheckpointError` if a file is not usable, or if a token would get a wrong id.
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
            raise refused(folder, f"a file states id {token.id} for token {short(name)}, but the next free id is {id}")
    controls = {*special, *markers, *(name for name, token in listed.items() if token.special)}
    added = tokenizer.get_added_tokens_decoder().values()
    tokenizer.add_special_tokens(
        [_with_special(token) for token in added if token.content in controls and not token.special]
    )


def _stated(folder: Path, special: Collection[str], *, listed: Collection[int]) -> dict[str, Added]:
    """Return the tokens with ids that the files in `folder` list. The key is the token's name.

    `special` has the names of special tokens. `listed` has the ids of the added tokens in tokenizer.json.
    """
    if "added_tokens_decoder" in read_config(folder):
        return {name: token for name, token in added_decoder(folder).items() if name}
    return {
        name: Added(id, special=name in special, normalized=name not in special)
        for name, id in added_ids(folder).items()
        if name and id not in listed
    }


def _library(name: str, token: Added | SpecialToken) -> AddedToken:
    """Convert a token to the library's class; a `SpecialToken` (which has no flag `special`) becomes special."""
    flags = {flag: getattr(token, flag, True) for flag in FLAGS}
    return AddedToken(name, **flags)


def _with_special(token: AddedToken) -> AddedToken:
    flags = {flag: getattr(token, flag) for flag in FLAGS}
    return AddedToken(token.content, **{**flags, "special": True})
