"""`tune`: a model learns from examples."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.loading import open_to_run, open_with_tokenizer, prepare_jax
from llamaspec.commands.options import (
    COUNT,
    MODEL,
    POSITIVE,
    SCHEME_NAMES,
    SVG,
    Verb,
    devices_option,
    template_option,
    tokenizer_option,
)
from llamaspec.commands.output import save_text, say, write
from llamaspec.commands.progress import progress_bar, training_progress

if TYPE_CHECKING:
    from llamaspec.training.loop import StepReport

PARTS = ("q", "k", "v", "o", "gate", "up", "down")
ROUNDED = ("q8", "q8_row", "q4")  # schemes that all weights can learn
METHODS_OF = {  # options, and the methods that read them
    "beta": ("preference",),
    "teacher": ("distill",),
    "keep_layers": ("distill",),
    "temperature": ("distill", "reward"),
    "group": ("reward",),
    "answer_tokens": ("reward",),
    "elastic_depth": ("supervised", "distill"),
}
DEPTH = "loss_at_"  # before the number of layers, in the names of measures
RATE, ADAPTER_RATE = 1e-4, 1e-3  # default learning rates: of all weights, of adapters


def matrices(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Parse names of matrices, separated by commas. Raises BadParameter for an unknown name."""
    names = tuple(name.strip() for name in value.split(","))
    if wrong := [name for name in names if name not in PARTS]:
        raise click.BadParameter(f"{wrong[0]!r} is no matrix that LoRA can change, expected some of {', '.join(PARTS)}")
    return names


def layer_numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Parse numbers of layers, separated by commas. Raises BadParameter for other text."""
    if value is None:
        return None
    numbers = [number.strip() for number in value.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise click.BadParameter(f"{value!r} is not a list of layers such as 0,2,4")
    return tuple(map(int, numbers))


def pruning(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any]:
    """Parse what pruning keeps, and return fields of `TuneRecipe`.

    It is a share of the weights between 0 and 1, or "2:4", or shares of whole parts such as "heads:0.5,channels:0.5".
    Raises BadParameter for other text.
    """
    if value is None:
        return {"prune": None}
    names = {"heads": "keep_heads", "channels": "keep_channels", "": "prune"}
    fields: dict[str, Any] = {}
    for part in map(str.strip, value.split(",")):
        name, _, share = ("", "", part) if part == "2:4" else part.rpartition(":")
        field = names.get(name)
        if field in fields:
            raise click.BadParameter(f"{value!r} has two shares of the same parts")
        with suppress(ValueError):
            if field and (part == "2:4" or 0 < float(share) < 1):
                fields[field] = (2, 4) if part == "2:4" else float(share)
                continue
        raise click.BadParameter(f"{part!r} is neither a share between 0 and 1, nor 2:4, heads:SHARE or channels:SHARE")
    return fields


@click.command(cls=Verb)
@click.argument("model", type=MODEL)
@click.option("--data", metavar="FILE.jsonl", required=True, help="Learn from the examples in FILE, one per line.")
@click.option("--out", metavar="DIR", help="Write checkpoints and the result to DIR.")
@click.option(
    "--method",
    type=click.Choice(["supervised", "preference", "distill", "reward"]),
    default="supervised",
    show_default=True,
    help="Train on answers (supervised), on pairs of a chosen and a rejected answer (preference: DPO), on a teacher's "
    "predictions (distill), or on the model's own answers, with a reward for exact ones (reward: GRPO).",
)
@click.option("--steps", type=COUNT, default=100, show_default=True, metavar="N", help="Stop after N steps.")
@click.option("--batch", type=COUNT, default=8, show_default=True, metavar="N", help="Take N examples per step.")
@click.option("--lora", type=COUNT, metavar="R", help="Train adapters of rank R instead of all weights.")
@click.option(
    "--lora-on",
    default=",".join(PARTS),
    show_default=True,
    callback=matrices,
    metavar="LIST",
    help="With --lora: put adapters on these matrices.",
)
@click.option("--alpha", type=POSITIVE, help="With --lora: scale the adapters by ALPHA / R.  [default: twice R]")
@click.option(
    "--quantize",
    type=click.Choice(SCHEME_NAMES),
    help="With --lora: store the frozen model in this scheme (QLoRA). Without --lora: learn weights that survive "
    "rounding to q8, q8_row or q4, for `convert --quantize` (QAT).",
)
@click.option(
    "--prune",
    callback=pruning,
    metavar="SHARE|2:4|heads:SHARE|channels:SHARE",
    help="Keep only the largest weights of each matrix, and train them: a share such as 0.5, or 2 of every 4 (2:4). Or "
    "keep only a share of the attention heads or of the feed-forward channels, such as heads:0.5,channels:0.5, which "
    "makes the model smaller.",
)
@click.option(
    "--beta", type=POSITIVE, help="With --method preference: multiply the margin of a pair by BETA.  [default: 0.1]"
)
@click.option(
    "--teacher", type=MODEL, help="With --method distill: learn from this model.  [default: MODEL with all layers]"
)
@click.option(
    "--keep-layers",
    callback=layer_numbers,
    metavar="LIST",
    help="With --method distill: the student has only these layers, such as 0,2,4.  [default: all]",
)
@click.option(
    "--elastic-depth",
    callback=layer_numbers,
    metavar="LIST",
    help="Train the first N layers as a model, too, for each N in LIST, such as 4,7. `convert --layers N` writes it.",
)
@click.option(
    "--temperature",
    type=POSITIVE,
    help="With --method distill: soften both distributions. With reward: draw answers at this temperature. "
    " [default: 1]",
)
@click.option(
    "--group", type=COUNT, metavar="N", help="With --method reward: draw N answers per question.  [default: 8]"
)
@click.option(
    "--answer-tokens",
    type=COUNT,
    metavar="N",
    help="With --method reward: end answers after N tokens.  [default: 64]",
)
@click.option(
    "--lr", type=POSITIVE, help=f"Set the highest learning rate.  [default: {ADAPTER_RATE} with --lora, or {RATE}]"
)
@click.option(
    "--schedule",
    type=click.Choice(["cosine", "linear", "constant", "wsd"]),
    default="cosine",
    show_default=True,
    help="Let the learning rate fall to 0 along a cosine or a line, stay constant, or fall to 0 in the last fifth of "
    "the steps (wsd).",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Let the learning rate rise from 0 in the first N steps.",
)
@click.option("--decay", type=click.FloatRange(0), default=0.0, show_default=True, help="Set AdamW's weight decay.")
@click.option("--accumulate", type=COUNT, metavar="N", help="Compute each step in N parts: less memory, same gradient.")
@click.option("--context", type=click.IntRange(2), metavar="N", help="Cut examples after N tokens.  [default: none]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Compute in this dtype. The trained weights stay in float32.  [default: float32 on a CPU, bfloat16 on a GPU]",
)
@devices_option
@click.option("--remat", is_flag=True, help="Recompute activations for the gradient: less memory, more time.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Set the seed that decides the order of the examples.",
)
@click.option("--eval-every", type=COUNT, default=100, show_default=True, metavar="N", help="Evaluate every N steps.")
@click.option(
    "--save-every", type=COUNT, default=100, show_default=True, metavar="N", help="Write a checkpoint every N steps."
)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint in DIR.")
@click.option("--show", type=COUNT, metavar="N", help="Only print N examples, with « and » around the tokens to learn.")
@click.option("--plot", type=SVG, metavar="FILE.svg", help="Draw the loss of each step, and of the held-out examples.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step on stdout.")
@tokenizer_option
@template_option
def tune(model: str, out: str | None, show: int | None, plot: str | None, as_json: bool, **options: Any):
    """Fine-tune a model on your examples.

    A line of FILE is a JSON object: {"prompt": ..., "completion": ...}, {"text": ...}, or {"messages":
    [{"role": "user", "content": "..."}, ...]}. From messages, the model learns only the assistant's answers.
    Every twentieth example is held out to measure the loss. Run with --show 3 first, to see what will be
    learned.

    For --method preference, a line is {"prompt": ..., "chosen": ..., "rejected": ...}, with texts or lists of
    messages. For --method reward, it is {"prompt": ..., "answer": "..."}, and only this exact answer gets a
    reward. With --lora, DIR gets an adapter in PEFT's format, otherwise DIR/model gets a whole model.

    \b
    llamaspec tune stories --data chat.jsonl --show 3
    llamaspec tune stories --data chat.jsonl --lora 8 --out tuned
    """
    from llamaspec.model.chat.template import find_template, template_of
    from llamaspec.model.checkpoints.checkpoint import CheckpointError
    from llamaspec.model.checkpoints.open import place_of

    if (out is None) == (show is None):
        raise click.UsageError("give either --out DIR or --show N")
    if plot and not Path(plot).absolute().parent.is_dir():
        raise click.BadParameter(f"{plot}: its folder does not exist", param_hint="--plot")
    if options["alpha"] and not options["lora"]:
        raise click.UsageError("--alpha needs --lora")
    for name, methods in METHODS_OF.items():
        if options[name] is not None and options["method"] not in methods:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --method {' or '.join(methods)}")
    if options["quantize"] and not options["lora"] and options["quantize"] not in ROUNDED:
        raise click.UsageError(
            f"--quantize {options['quantize']} needs --lora; without --lora, --quantize takes {', '.join(ROUNDED)}"
        )
    options |= (pruned := options.pop("prune"))
    if any(pruned.values()) and (options["lora"] or options["quantize"]):
        raise click.UsageError("--prune cannot be combined with --lora or --quantize")
    checkpoint, tokenizer = open_with_tokenizer(model, options["tokenizer"])
    places = [place for place in (options.pop("tokenizer"), place_of(model)) if place]
    named = options.pop("template")
    own = template_of(tokenizer, *places)
    try:
        template = find_template(tokenizer, *places, template=named)
    except CheckpointError:
        if named or own:
            raise
        template = None  # Only conversations need a template.
    if template and template.note:
        say(template.note)
    data, eos = options.pop("data"), min(checkpoint.stops, default=None)
    if show is not None:
        from llamaspec.training.conversations import Reader, marked_text, read_data

        if options["method"] == "reward":
            raise click.UsageError(
                "--show does not apply to --method reward, because the model itself writes the answers"
            )
        if options["method"] == "preference":
            pairs = read_data(data, tokenizer, template, Reader.preference, eos=eos)
            examples = [example for pair in pairs for example in pair][: 2 * show]  # chosen and rejected in turn
        else:
            examples = read_data(data, tokenizer, template, Reader.example, eos=eos)[:show]
        for number, example in enumerate(examples, 1):
            counted = sum(weight > 0 for weight in example.weights[1:])
            write(f"example {number}: {len(example.ids)} tokens, {counted} to learn\n")
            write(f"{marked_text(tokenizer, example)}\n\n")
        return
    assert out is not None
    teacher = options.pop("teacher")
    running: dict[str, Any] = {"teacher": open_to_run(teacher, None) if teacher else None}
    running |= {name: options.pop(name) for name in ("devices", "resume", "eval_every", "save_every")}
    prepare_jax()
    with progress_bar() as progress:
        import jax

        from llamaspec.training.tune import TuneRecipe
        from llamaspec.training.tune import tune as tune_model

        options["lr"] = options["lr"] or (ADAPTER_RATE if options["lora"] else RATE)
        options["dtype"] = options["dtype"] or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    curves: dict[str, list[tuple[float, float]]] = {}
    drifts: list[float] = []  # of each step of the method reward
    recipe = TuneRecipe(**{name: value for name, value in options.items() if value is not None})
    with training_progress(recipe.steps) as show_step:

        def report(step: StepReport) -> None:
            show_step(step)
            drifts.extend([step.measures["drift"]] if "drift" in step.measures else [])
            for name, loss in losses(step).items():
                if loss > 0 and not step.skipped:  # the axes are logarithmic
                    curves.setdefault(name, []).append((float(step.step), loss))
            if as_json:
                write(json.dumps(summary(step, recipe.steps)) + "\n")

        running |= {"report": report, "note": say, "progress": progress}
        result = tune_model(checkpoint, tokenizer, template, data, out, recipe, base=model, **running)
    if plot:
        draw(plot, f"{model}, {recipe.method}", curves)
    kind = "an adapter" if recipe.lora else "a model"
    if drifts:
        say(
            "between drawing and learning, the log probabilities of an answer's tokens changed by at most "
            f"{max(drifts):.2g} (the sum over an answer)"
        )
    say(f"{result.folder}: {kind}, {result.trained:,} weights were trained")


def losses(step: StepReport) -> dict[str, float]:
    """Return the losses to draw by their names: of the step or of its evaluation, for each elastic depth if any."""
    name, result = ("held-out loss", step.evaluation) if step.evaluation else ("loss", step)
    depths = {key.removeprefix(DEPTH): value for key, value in result.measures.items() if key.startswith(DEPTH)}
    return {f"{name}, {depth} layers": loss for depth, loss in depths.items()} or {name: result.loss}


def draw(path: str, title: str, curves: dict[str, list[tuple[float, float]]]) -> None:
    """Draw `curves`, each a list of (step, loss), in an SVG file. If the curves have no points, write no file."""
    from llamaspec.benchmarks.common.svg import lines

    if curves:
        save_text(path, lines(title, "per token, pair or answer", curves, x="step", y="loss"))


def summary(step: StepReport, steps: int) -> dict[str, Any]:
    """Make the JSON object of a step."""
    numbers = {
        "step": step.step,
        "loss": step.loss,
        **step.measures,
        "tokens_per_second": round(step.rate, 1),
        "seconds": round(step.seconds, 3),
        "seconds_left": round(step.seconds / step.step * (steps - step.step), 1),
        "skipped": step.skipped,
    }
    return numbers | ({"held_out": step.evaluation._asdict()} if step.evaluation else {})
