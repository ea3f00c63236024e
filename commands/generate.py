"""`generate` and `story`: continue a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from commands.loading import cache_folder, checked_request, load, print_seed
from commands.options import (
    Verb,
    combined,
    json_option,
    max_new_tokens,
    model_option,
    running_options,
    sampling_options,
    tokenizer_option,
)
from commands.output import stream, write, write_json

if TYPE_CHECKING:
    from model.generation import Generation
    from model.llama import Llama


@click.command(cls=Verb)
@click.argument("prompt", default="")
@combined(model_option, tokenizer_option, max_new_tokens(256), sampling_options, running_options, json_option)
def generate(prompt: str, as_json: bool, **options: Any):
    """Continue PROMPT; - reads it from standard input.

    Prints the prompt and its continuation as it is drawn. Without PROMPT, a text from its beginning.
    """
    if prompt == "-" and sys.stdin is None:
        raise click.UsageError("standard input is closed")
    _generate(sys.stdin.read() if prompt == "-" else prompt, as_json=as_json, **options)


@click.command(cls=Verb)
@click.argument("prompt", default="")
@combined(model_option, tokenizer_option, max_new_tokens(512), sampling_options, running_options, json_option)
def story(prompt: str, as_json: bool, **options: Any):
    """Tell a story, from the beginning or on from PROMPT.

    `generate` under the name that children ask for.
    """
    _generate(prompt, as_json=as_json, **options)


def _generate(prompt: str, *, as_json: bool, **options: Any):
    request = checked_request(options)
    llama = load(options, prompt=prompt, greedy=request["sampling"].greedy)
    generation = llama.generate(prompt, **request)
    print_seed(options, generation.seed)
    if as_json:
        for _ in generation:
            pass
        write_json(
            {
                "text": generation.prompt + generation.completion,
                "completion": generation.completion,
                "prompt_tokens": generation.prompt_tokens,
                "tokens": len(generation.ids),
                "finish_reason": generation.finish_reason,
                "seed": generation.seed,
                "timings": generation.timings._asdict(),
            }
        )
    else:
        write(prompt)
        stream(generation)
    click.echo(_summary(generation, llama), err=True)


def _summary(generation: Generation, llama: Llama) -> str:
    first, total, rate = generation.timings
    return (
        f"{generation.prompt_tokens} + {len(generation.ids)} tokens, first after {first:.2f} s, "
        f"then {rate:.1f} tokens/s{_bandwidth(generation, llama)}, {total:.2f} s in all, "
        f"ended by {generation.finish_reason}"
    )


def _bandwidth(generation: Generation, llama: Llama) -> str:
    """What decoding read a second, beside what `bench` has measured here."""
    read = llama.bytes_read(generation.prompt_tokens + len(generation.ids) / 2)
    rate = generation.timings.tokens_per_second
    if not read or not rate:
        return ""
    from model.insight.machine import reading_in_words

    return f" ({reading_in_words(cache_folder(), bytes=read, seconds=1 / rate)})"
