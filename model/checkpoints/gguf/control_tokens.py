"""Corrects the types of tokens in GGUF files, which are often wrong for control tokens.

Converters gave many chat markers the type normal or user-defined, and some files have no types. llama.cpp therefore
recognizes many markers by name (src/llama-vocab.cpp, `llama_vocab::impl::load`, commit 00ad355), and its converter
recognizes other markers by their form (conversion/base.py, `does_token_look_special`). We apply these rules in order:

    1. A token with a name in `ENDS` or `FILL_IN` becomes a control token, even if the file gives it a different type.
       llama.cpp has the same rule.
    2. A token with the form of a chat marker becomes a control token if its type is user-defined, or if its type is
       normal and no merge makes the token. llama.cpp's present converter writes these types. For older files,
       llama.cpp does not correct the types, so `<|im_start|>` in a user's message becomes the marker. Here it stays
       ordinary text.
    3. If the file's keys state that a token begins or ends texts, and its name is in brackets, the token becomes a
       control token.
    4. Generation ends at the tokens with a name in `ENDS`, and at the tokens that the file's keys state. There are two
       exceptions, as in llama.cpp. `<|end|>` does not end generation in vocabularies with `<|return|>` and `<|call|>`
       (gpt-oss, where `<|end|>` ends one message), or with `<|flush|>` and either `<|call|>` or `<|calls|>`. `</s>`
       is a normal token in vocabularies with `<|tool_response>` (Gemma 4).

llama.cpp gives gpt-oss's `<|channel|>`, `<|message|>`, `<|start|>` and `<|constrain|>` the type user-defined, so that
it prints them. We keep them as control tokens, since `model.chat.channels` uses them to separate thoughts from answers.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # SentencePiece's numbers of token types

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    # llama.cpp also ends generation at these tokens of code models: padding, a repository's name, a file's end.
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
FILL_IN = frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|prefix|>", "<|suffix|>", "<|middle|>",
})  # fmt: skip
# The part of the converter's rule for chat markers. We also require a letter or a digit, since "<|>" is an operator in
# programs. Gemma uses <start_of_turn>, and older files give it the type user-defined.
MARKER = re.compile(r"<\|.*\w.*\|>|<｜.*\w.*｜>|<start_of_turn>", re.DOTALL)
BRACKETS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
LONGEST_MARKER = 100  # characters


def ending_names(names: Collection[str]) -> frozenset[str]:
    """Find the tokens in the vocabulary `names` that end generation (rule 4).

    >>> sorted(ending_names({"<|end|>", "<|return|>", "<|call|>", "a"})), sorted(ending_names({"<|end|>", "<|user|>"}))
    (['<|call|>', '<|return|>'], ['<|end|>'])
    """
    ends = {name for name in ENDS if name in names}
    if {"<|return|>", "<|call|>"} <= ends or ({"<|flush|>"} <= ends and ends & {"<|call|>", "<|calls|>"}):
        ends.discard("<|end|>")
    if "<|tool_response>" in names:
        ends.discard("</s>")
    return frozenset(ends)


def corrected_types(
    ids: Mapping[str, int], types: Sequence[int], *, named: Iterable[int], merged: Collection[str] = ()
) -> list[int]:
    """Correct the types of tokens by the rules 1 to 3 in this module's docstring.

    `ids` maps each token's name to its id. `types` has the file's type for each id. `named` has the ids that the file's
    keys state as begin or end tokens. `merged` has the names of tokens that merges make. A merged token of the type
    normal is part of words, so it stays normal even if it looks like a marker.

    >>> names = ["<|im_start|>", "<|im_end|>", "<|>", "<think>", "<s>", "a"]
    >>> corrected_types({name: id for id, name in enumerate(names)}, [4, 1, 1, 4, 1, 1], named=[4, 5])
    [3, 3, 1, 4, 3, 1]
    """
    corrected = list(types)
    by_name = (ENDS | FILL_IN) & ids.keys()
    if "<|tool_response>" in ids:
        by_name -= {"</s>"}
    for id in (ids[name] for name in by_name):
        if types[id] not in (UNKNOWN, BYTE):
            corrected[id] = CONTROL
    named = set(named)
    for name, id in ids.items():
        if name[:1] not in ("<", "[") or len(name) > LONGEST_MARKER or types[id] not in (NORMAL, USER_DEFINED):
            continue
        if types[id] == NORMAL and name in merged:
            continue
        if MARKER.fullmatch(name) or (id in named and BRACKETS.fullmatch(name)):
            corrected[id] = CONTROL
    return corrected
