"""`generate` and `story`: continue a prompt."""

from __future__ import annotations

import sys
from os.path import exists
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.loading import cache_folder, checked_request, load, print_seed
from llamaspec.commands.options import BUILT_IN, Verb, generation_options, json_option
from llamaspec.commands.output import say, stream, write_json

if TYPE_CHECKING:
    from llamaspec.model.generation import Generation
    from llamaspec.model.llama import Llama


@click.command(cls=Verb)
@click.argument("prompt", default="")
@generation_options(256)
@json_option
def generate(prompt: str, as_json: bool, timings: bool, **options: Any):
    """Continue PROMPT with a model.

    Prints PROMPT and then each token as it is drawn. Without PROMPT, the model begins a new text. If
    PROMPT is -, it is read from standard input, without the newline at its end.

    \b
    llamaspec generate "Once upon a time"
    llamaspec generate "The capital of France is" --model path/to/Llama-3.2-1B --temperature 0
    """
    if prompt == "-":
        if sys.stdin is None:
            raise click.UsageError("standard input is closed")
        prompt = sys.stdin.read().removesuffix("\n")
    elif options["model"] == BUILT_IN and exists(prompt):
        say(f"continuing {prompt!r} as a text; if it is a model: --model {prompt}")
    _generate(prompt, as_json=as_json, timings=timings, wrap=False, **options)


@click.command(cls=Verb)
@click.argument("prompt", default="")
@generation_options(512)
@json_option
def story(prompt: str, as_json: bool, timings: bool, **options: Any):
    """Tell a new story, or continue PROMPT as a story.

    Works like `generate`, but by default with up to 512 tokens. On a terminal, lines break between words.

    \b
    llamaspec story --seed 7
    llamaspec story "One day, a little fox found a kite"
    """
    _generate(prompt, as_json=as_json, timings=timings, wrap=True, **options)


def _generate(prompt: str, *, as_json: bool, timings: bool, wrap: bool, **options: Any):
    from llamaspec.model.running.start_clock import StartClock

    clock = StartClock.of_process()
    request = checked_request(options)
    llama = load(options, prompt=prompt, greedy=request["sampling"].greedy, clock=clock)
    clock.begin("first token")
    generation = llama.generate(prompt, **request)
    print_seed(options, request)
    if as_json:
        for _ in generation:
            pass
        clock.end(generation.first_at)
        write_json(
            {
                "text": generation.prompt + generation.completion,
                "completion": generation.completion,
                "prompt_tokens": generation.prompt_tokens,
                "tokens": len(generation.ids),
                "finish_reason": generation.finish_reason,
                "seed": generation.seed,
                "timings": generation.timings._asdict(),
                **({"speculation": drafts.counts()} if (drafts := generation.speculation) else {}),
                **({"start": clock.as_json()} if timings else {}),
            }
        )
    else:
        stream(generation, prompt=prompt, wrap=wrap)
        clock.end(generation.first_at)
    if timings:
        say(str(clock))
    say(_summary(generation, llama))


def _summary(generation: Generation, llama: Llama) -> str:
    first, total, rate = generation.timings
    read, drawn = generation.prompt_tokens, len(generation.ids)
    then = f", then {rate:.1f} tokens/s{_bandwidth(generation, llama)}" if rate else ""  # a rate needs two tokens
    return (
        f"{read} token{'s' * (read != 1)} of prompt + {drawn} new in {total:.2f} s: "
        f"the first after {first:.2f} s{then}; ended by {generation.finish_reason}"
        + (f"; {drafts}" if (drafts := generation.speculation) else "")
    )


def _bandwidth(generation: Generation, llama: Llama) -> str:
    """Describe how fast decoding read memory, compared with the memory bandwidth that `bench` measured on this
    machine.
    """
    read = llama.bytes_read(generation.prompt_tokens + len(generation.ids) / 2)
    rate = generation.timings.tokens_per_second
    if not read or not rate:
        return ""
    from llamaspec.model.insight.machine import reading_in_words

    return f" ({reading_in_words(cache_folder(), bytes=read, seconds=1 / rate)})"
