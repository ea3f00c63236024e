"""`tokens`: text to ids and back."""

from __future__ import annotations

import click

from commands.loading import parse_ids
from commands.options import Verb, combined, json_option, model_option, tokenizer_option
from commands.output import write, write_json


@click.command(cls=Verb)
@click.argument("text", required=False)
@click.option("--decode", metavar="IDS", help="The text of comma-separated ids, instead.")
@click.option("--no-bos", is_flag=True, help="Leave out the id that begins a text.")
@combined(model_option, tokenizer_option, json_option)
def tokens(text: str | None, decode: str | None, no_bos: bool, model: str, tokenizer: str | None, as_json: bool):
    """The ids of TEXT, on one line."""
    if (text is None) == (decode is None):
        raise click.UsageError("give either TEXT or --decode IDS")
    if decode is not None and no_bos:
        raise click.UsageError("--no-bos is for TEXT: --decode leaves control tokens out")
    from model.tokenizers.load import load_tokenizer
    from model.tokenizers.tokenizer import decode as decode_ids
    from model.tokenizers.tokenizer import encode_text

    if tokenizer:
        vocabulary = load_tokenizer(tokenizer)
    else:
        from model.checkpoints.open import open_checkpoint
        from model.tokenizers.of_model import tokenizer_of

        vocabulary = tokenizer_of(open_checkpoint(model), None)
    if decode is not None:
        ids = parse_ids(decode, vocabulary.vocab)
        decoded = decode_ids(vocabulary, ids)
        if as_json:
            write_json({"text": decoded})
        else:
            write(decoded + "\n")
        return
    assert text is not None
    ids = encode_text(vocabulary, text, bos=not no_bos)
    if as_json:
        write_json({"ids": ids, "pieces": [vocabulary.piece(id) for id in ids]})
    else:
        write(" ".join(map(str, ids)) + "\n")
