"""Formats a tokenizer as files of a Hugging Face directory, which this package and transformers read."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from llamaspec.model.tokenizers.huggingface import HuggingFaceTokenizer
from llamaspec.model.tokenizers.sentencepiece_model import SentencePieceTokenizer
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.tokenizers.tokenizer_config import FLAGS


def tokenizer_files(
    tokenizer: Tokenizer, *, named: Mapping[str, str], templates: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the contents of files by name: tokenizer.model or tokenizer.json, tokenizer_config.json, chat templates.

    The first two files say whether texts begin with BOS and end with EOS. `named` has the strings of bos_token and
    eos_token for templates; a template may use these tokens even if texts do not begin or end with them. `templates`
    has the sources of chat templates by name; "default" becomes chat_template.jinja. Raises TypeError for a tokenizer
    that we cannot write.
    """
    ends = {"add_bos_token": tokenizer.bos is not None, "add_eos_token": bool(tokenizer.appended)}
    config: dict[str, Any] = {**ends, **named}
    if tokenizer.bos is not None:
        config["bos_token"] = tokenizer.piece(tokenizer.bos)
    if tokenizer.appended:
        config["eos_token"] = tokenizer.piece(tokenizer.appended[-1])
    match tokenizer:
        case SentencePieceTokenizer():
            config |= {"tokenizer_class": "LlamaTokenizer", "legacy": tokenizer.prefix_after_special}
            if not tokenizer.dummy_prefix:  # Without this key, LlamaTokenizer puts a space in front of texts.
                config["add_prefix_space"] = False
            if tokenizer.added:
                config["added_tokens_decoder"] = _decoder(tokenizer)
            files = {"tokenizer.model": _model(tokenizer)}
        case HuggingFaceTokenizer(dummy_prefix=False):
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            files = {"tokenizer.json": _as_json(_spec(tokenizer))}
        case _:
            raise TypeError(f"a tokenizer of type {type(tokenizer).__name__} cannot be written as files")
    files["tokenizer_config.json"] = _as_json(config)
    for name, source in templates.items():
        place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        files[place] = source.encode()
    return files


def _decoder(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """Format added_tokens_decoder, a map from ids to the tokens that the tokenizer finds in a text by name."""
    return {
        str(token.id): {"content": name, **{flag: getattr(token, flag) for flag in FLAGS}}
        for name, token in sorted(tokenizer.added.items(), key=lambda item: item[1].id)
    }


def _model(tokenizer: SentencePieceTokenizer) -> bytes:
    """Serialize the SentencePiece model, with the tokenizer's BOS in it.

    SentencePiece accepts only a control token as BOS. If texts begin without BOS, we state the unknown token as BOS.
    """
    proto = tokenizer.proto()
    trainer = proto.trainer_spec
    trainer.bos_piece = trainer.unk_piece if tokenizer.bos is None else tokenizer.piece(tokenizer.bos)
    return proto.SerializeToString()


def _spec(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """Format the tokenizer.json, with a post_processor that puts the tokenizer's BOS and EOS around a text."""
    begin, end = [] if tokenizer.bos is None else [tokenizer.bos], tokenizer.appended
    if not begin and not end:
        return tokenizer.spec() | {"post_processor": None}

    def controls(ids: Iterable[int], part: int) -> list[Any]:
        return [{"SpecialToken": {"id": tokenizer.piece(id), "type_id": part}} for id in ids]

    first, second = (
        [*controls(begin, i), {"Sequence": {"id": part, "type_id": i}}, *controls(end, i)]
        for i, part in enumerate("AB")
    )
    names = {id: tokenizer.piece(id) for id in (*begin, *end)}
    return tokenizer.spec() | {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, *second],
            "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for id, name in names.items()},
        }
    }


def _as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
