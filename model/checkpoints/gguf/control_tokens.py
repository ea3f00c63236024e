"""Control tokens of a GGUF file, which its types of tokens often get wrong.

Converters have typed the markers of chats as normal or as user-defined tokens, and some files have no types. llama.cpp
therefore knows many of them by name (src/llama-vocab.cpp, `llama_vocab::impl::load`, commit 00ad355), and its converter
knows others by how they look (conversion/base.py, `does_token_look_special`). The rules here, in order:

    1. A token with a name in `ENDS` or `FILL_IN` is a control token, even if its type says otherwise. As in llama.cpp.
    2. A user-defined token that looks like a marker is one, and so is a normal token that no merge can make. A file of
       llama.cpp's present converter has these types already. llama.cpp itself leaves them, and so takes `<|im_start|>`
       in a person's text for the marker. We promise that such text stays text.
    3. An id that the file names as the begin or the end of texts is a control token, if its name is in brackets.
    4. The tokens with a name in `ENDS`, and the tokens that the file's keys name, end a text. `<|end|>` does not where
       `<|return|>` and `<|call|>` do (gpt-oss, where it ends one message), nor where `<|calls|>` and `<|flush|>` do.
       `</s>` is normal where `<|tool_response>` is there (Gemma 4). As in llama.cpp.

llama.cpp makes user-defined tokens of gpt-oss's `<|channel|>`, `<|message|>`, `<|start|>` and `<|constrain|>`, in
order to print them. They stay control tokens here: our answers are told from thoughts by them.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the types of tokens, as SentencePiece's

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    # llama.cpp ends a text at these three kinds of tokens for code, too: padding, a repository's name, a file's end.
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
FILL_IN = frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|prefix|>", "<|suffix|>", "<|middle|>",
})  # fmt: skip
# The part of the converter's rule that is about chats. The letter or digit is ours, since "<|>" is an operator of
# programs. The begin of a turn is Gemma's, which older files have as user-defined.
MARKER = re.compile(r"<\|.*\w.*\|>|<｜.*\w.*｜>|<start_of_turn>", re.DOTALL)
BRACKETS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
LONGEST_MARKER = 100  # characters


def ending_names(names: Collection[str]) -> frozenset[str]:
    """The names in a vocabulary that end a text.

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
    """The types of tokens by the rules above.

    `ids` are the ids of all tokens by name. `named` are the ids that the file's keys name as the begin or the end of
    texts. `merged` are the tokens that merges make: normal ones of them are parts of words, however they look.

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
