"""`prove`: the continuation of a text, proven with an interval around each logit."""

from __future__ import annotations

import json
from contextlib import nullcontext

import click

from llamaspec.commands.loading import open_with_tokenizer
from llamaspec.commands.options import Verb, combined, json_option, max_new_tokens, model_option, tokenizer_option
from llamaspec.commands.output import say, write, write_json


@click.command(cls=Verb)
@click.argument("text")
@click.option("--out", metavar="FILE", help="Write known-answer vectors to this JSON file. It must not exist.")
@combined(max_new_tokens(25), model_option, tokenizer_option, json_option)
def prove(text: str, out: str | None, max_new_tokens: int, model: str, tokenizer: str | None, as_json: bool):
    """Prove how TEXT continues, with an interval around each exact logit.

    Each token is the one with the largest logit. It is proven if its interval, computed by ball arithmetic, lies above
    all others. The proof ends at a token that cannot be decided.

    --out writes the tokens and the intervals of the largest logits, to check other engines.

    \b
    llamaspec prove "Once upon a time"
    llamaspec prove "Once upon a time" --out vectors.json
    """
    if max_new_tokens < 1:
        raise click.BadParameter("expected at least 1", param_hint="--max-new-tokens")
    from llamaspec.model.checkpoints.staging import new_file
    from llamaspec.model.options import check_length
    from llamaspec.model.system import available_bytes
    from llamaspec.model.tensors import weight_count
    from llamaspec.model.tokenizers.tokenizer import Decoder, decode, encode_text
    from llamaspec.verify.proof import BITS, check_supported, needed_bytes, prove, vectors

    checkpoint, vocabulary = open_with_tokenizer(model, tokenizer)
    prompt = encode_text(vocabulary, text)
    config = checkpoint.config
    check_length(prompt, config.context)
    check_supported(config)
    weights = weight_count(config)
    if (needed := needed_bytes(config, weights, prompt=len(prompt))) > (free := available_bytes()):
        raise click.ClickException(
            f"a proof with {weights:,} weights and {len(prompt):,} tokens needs about {needed / 2**30:,.1f} GiB of "
            f"memory, and {free / 2**30:,.1f} GiB are free"
        )
    with new_file(out) if out else nullcontext() as staged:
        from llamaspec.model.running.reference_backend import load_reference_params

        params = load_reference_params(checkpoint)
        decoder, tokens, proven = Decoder(vocabulary), [], []
        if not as_json:
            write("".join(map(decoder.feed, prompt)))
        most = min(max_new_tokens, config.context - len(prompt))
        for token in prove(params, prompt, config=config, stops=checkpoint.stops, max_new_tokens=most):
            tokens.append(token)
            if token.decided and token.id not in checkpoint.stops:
                proven.append(token.id)
                if not as_json:
                    write(decoder.feed(token.id))
        result = None
        if as_json or staged:  # otherwise we save the digest, which reads all weights
            result = vectors(params, config, text, prompt, tokens, decode(vocabulary, proven, start=False))
        if as_json:
            write_json(result)
        else:
            write("\n")
        if staged:
            staged.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    decided = sum(token.decided for token in tokens)
    radius = max((token.radius for token in tokens), default=0.0)
    bits = max((token.bits for token in tokens), default=BITS)
    say(f"{decided} of {len(tokens)} tokens are proven; every logit is known to within {radius:.1e}, with {bits} bits")
