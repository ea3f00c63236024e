"""`conform`: a verdict on a server that claims to serve a model."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from dataclasses import replace

import click

from llamaspec.commands.loading import open_with_tokenizer
from llamaspec.commands.options import (
    COUNT,
    POSITIVE,
    Verb,
    combined,
    json_option,
    model_option,
    template_option,
    tokenizer_option,
)  # fmt: skip
from llamaspec.commands.output import fail, save_text, write_json, write_rows
from llamaspec.commands.progress import progress_bar


@click.command(cls=Verb)
@click.argument("url")
@combined(model_option, tokenizer_option, template_option)
@click.option(
    "--arithmetic",
    type=click.Choice(["float32", "float16", "bfloat16", "ggml"]),
    help="The server claims to compute in this dtype, or as llama.cpp does (ggml).  [default: ggml for a GGUF file, "
    "else the dtype of the model's matrices]",
)
@click.option(
    "--cache",
    type=click.Choice(["float32", "float16", "bfloat16", "int8"]),
    help="The server claims to store its KV cache in this dtype.  [default: as --arithmetic says; float16 for ggml]",
)
@click.option("--served", metavar="NAME", default="", help="Name of the model on the server.  [default: its first]")
@click.option(
    "--api-key", metavar="KEY", default="", help="Key to send to the server.  [default: the variable OPENAI_API_KEY]"
)
@click.option(
    "--longest", type=COUNT, default=256, show_default=True, metavar="N", help="Tokens of the longest prompt."
)
@click.option(
    "--at-once", type=COUNT, default=8, show_default=True, metavar="N", help="Send at most N requests at a time."
)
@click.option(
    "--seconds",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    metavar="S",
    help="End the examination after S seconds.",
)
@click.option(
    "--html", "html_file", metavar="FILE", help="Write a page with plots of the errors by position and by probability."
)
@json_option
def conform(
    url: str, model: str, tokenizer: str | None, template: str | None, arithmetic: str | None, cache: str | None,
    served: str, api_key: str, longest: int, at_once: int, seconds: float, html_file: str | None,
    as_json: bool,
):  # fmt: skip
    """Judge whether the server at URL computes the model that it claims to serve.

    The server speaks OpenAI's API: llama.cpp, vLLM, SGLang, LM Studio, llamaspec. We compare its tokens with the
    model's tokenizer and chat template, its log-probabilities with the model's definition in float64, and its protocol
    with OpenAI's. A difference is an error if the arithmetic that the server claims does not explain it. If we know the
    fault, such as a doubled BOS or another theta, the report names it.

    The exit status is 0 if the server conforms, 1 if it does not, and 2 if there is no verdict.

    \b
    llamaspec conform http://127.0.0.1:8000 --model Llama-3.2-1B-Instruct
    llamaspec conform http://127.0.0.1:8080 --model model.gguf --at-once 32
    """
    from llamaspec.commands.conform_page import page
    from llamaspec.judge.arithmetic import arithmetic as arithmetic_of
    from llamaspec.judge.arithmetic import stored_arithmetic
    from llamaspec.judge.client import NoServerError, Server, TimeIsUpError
    from llamaspec.judge.conform import examine
    from llamaspec.judge.report import as_json as report_as_json
    from llamaspec.judge.report import as_rows
    from llamaspec.judge.tokens import ChatReader
    from llamaspec.model.chat.template import find_template, template_of
    from llamaspec.model.chat.template_process import Workers
    from llamaspec.model.checkpoints.open import place_of

    checkpoint, vocabulary = open_with_tokenizer(model, tokenizer)
    places = [place for place in (tokenizer, place_of(model)) if place]
    chat = find_template(vocabulary, *places, template=template) if template else template_of(vocabulary, *places)
    claimed = arithmetic_of(arithmetic or stored_arithmetic(checkpoint), cache)
    try:
        key = api_key or os.environ.get("OPENAI_API_KEY", "")
        server = Server(url, model=served, api_key=key, seconds=seconds)
    except (NoServerError, TimeIsUpError) as error:
        fail(str(error) or f"{url} did not answer within {seconds:g} seconds", 2)
    with closing(Workers()) as workers, progress_bar() as progress:
        reader = chat and ChatReader(vocabulary, replace(chat, workers=workers))
        report = examine(
            server, checkpoint, vocabulary, reader, name=model, arithmetic=claimed, longest=longest, at_once=at_once,
            seconds=seconds, progress=progress,
        )  # fmt: skip
    if as_json:
        write_json(report_as_json(report))
    else:
        write_rows(*as_rows(report))
    if html_file:
        try:
            save_text(html_file, page(report, as_rows(report)))
        except ValueError as error:
            fail(str(error), 2)
    sys.exit(report.status)
