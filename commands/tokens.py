"""`tokens`: converts a text to token ids and back."""

from __future__ import annotations

import click

from llamaspec.commands.loading import parse_ids
from llamaspec.commands.options import Verb, combined, json_option, model_option, tokenizer_option
from llamaspec.commands.output import write, write_json


@click.command(cls=Verb)
@click.argument("text", required=False)
@click.option("--decode", metavar="IDS", help="Print the text of these comma-separated ids instead.")
@click.option("--no-bos", is_flag=True, help="Do not put BOS, the token that begins a text, before the ids.")
@combined(model_option, tokenizer_option, json_option)
def tokens(text: str | None, decode: str | None, no_bos: bool, model: str, tokenizer: str | None, as_json: bool):
    """Print the ids of a text, or the text of ids.

    Prints the ids of TEXT on one line, with BOS first if the model expects it. --json also prints the piece of text
    that each id stands for.

    \b
    llamaspec tokens "Once upon a time" --json
    llamaspec tokens --decode 1,306,505
    """
    if (text is None) == (decode is None):
        raise click.UsageError("give either TEXT or --decode IDS")
    if decode is not None and no_bos:
        raise click.UsageError("--no-bos does not work with --decode, which never prints control tokens")
    from llamaspec.model.tokenizers.load import load_tokenizer
    from llamaspec.model.tokenizers.tokenizer import decode as decode_ids
    from llamaspec.model.tokenizers.tokenizer import encode_text

    if tokenizer:
        vocabulary = load_tokenizer(tokenizer)
    else:
        from llamaspec.model.checkpoints.open import open_checkpoint
        from llamaspec.model.tokenizers.of_model import tokenizer_of

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
