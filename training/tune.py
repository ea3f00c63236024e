"""Fine-tuning: training a model's weights, or a low-rank adapter for them, on examples.

DIR/step-00000100.safetensors                            the last two checkpoints: trained tensors and optimizer
DIR/adapter_config.json, adapter_model.safetensors       at the end: the adapter, in PEFT's format
DIR/model/                                               at the end, without an adapter: the model, in its own dtypes
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.chat.template import ChatTemplate, turn_stops
from llamaspec.model.checkpoints.adapter import CONFIG, PARTS, adaptable
from llamaspec.model.checkpoints.checkpoint import Checkpoint, os_errors, refused
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.huggingface.write_config import format_config
from llamaspec.model.checkpoints.smaller import with_layers, without_weakest
from llamaspec.model.device import default_device
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.model.weights.loading import Progress, check_weights, load_params, no_progress
from llamaspec.reference.config import for_sequences
from llamaspec.training.constraints import FREE, ROUNDED, pruning, rounding
from llamaspec.training.conversations import Reader, read_data
from llamaspec.training.data import Example, digest, indices_of_step, tokenizer_digest
from llamaspec.training.loop import StepReport, Task, Work, run
from llamaspec.training.objectives.distillation import distillation
from llamaspec.training.objectives.objective import HeldOut, evaluator
from llamaspec.training.objectives.preference import preference, scored, sides
from llamaspec.training.objectives.reward import Sampler, drawn_work, exact_share, rewarded
from llamaspec.training.objectives.supervised import supervised
from llamaspec.training.ops import PACKED, remat
from llamaspec.training.optimizers import SCHEDULES, optimizer
from llamaspec.training.parallel import Spread, replicated, round_up
from llamaspec.training.recipe import check_at_least_one, check_context
from llamaspec.training.steps import Tensors, compile_step
from llamaspec.training.trainable import Trainable, adapters, all_weights

METHODS = ("supervised", "preference", "distill", "reward")
READERS = {"preference": Reader.preference, "reward": Reader.question}  # of lines; else `Reader.example`
HELD_OUT = 20  # one document in so many is held out, if there are as many
LENGTHS = [32 << n for n in range(8)]  # of rows, unless the recipe says: 32 to 4096 tokens
SAMPLES = 4096  # numbers of each tensor that stand for all in a digest


@dataclass(frozen=True)
class TuneRecipe:
    """The hyperparameters of a fine-tuning. With the model and the data, they determine the result."""

    steps: int
    batch: int  # examples per step
    lr: float
    method: str = "supervised"  # one of `METHODS`
    schedule: str = "cosine"
    warm_up: int = 0  # steps
    decay: float = 0.0
    seed: int = 0
    context: int | None = None  # tokens per row; None: the smallest of `LENGTHS` that holds the longest example
    lora: int | None = None  # rank; None: train all weights
    alpha: float | None = None  # None: twice the rank
    lora_on: tuple[str, ...] = PARTS
    dtype: str = "float32"  # of the computation
    remat: bool = False
    quantize: str | None = None  # a scheme: of the frozen model under adapters, or to round all weights by
    prune: float | tuple[int, int] | None = None  # the share of weights that stay, or n of every m
    keep_heads: float = 1.0  # the share of attention heads that stay
    keep_channels: float = 1.0  # the share of feed-forward channels that stay
    accumulate: int | None = None  # parts of a step; None: as many as keep the device busy
    beta: float = 0.1  # of the method preference: how strongly a margin counts
    temperature: float = 1.0  # of the methods distill and reward
    group: int = 8  # of the method reward: answers per question
    answer_tokens: int = 64  # of the method reward: the most tokens of an answer
    keep_layers: tuple[int, ...] | None = None  # of the method distill: the layers of the student; None: all
    elastic_depth: tuple[int, ...] = ()  # the first layers of the model, these numbers of them, are models, too


class Tuning(NamedTuple):
    """The result of `tune`."""

    folder: Path
    trained: int  # numbers that were trained


def check_tune_recipe(recipe: TuneRecipe) -> None:
    """Raise ValueError for a number out of range."""
    check_at_least_one(steps=recipe.steps, batch=recipe.batch, group=recipe.group, answer_tokens=recipe.answer_tokens)
    if recipe.method not in METHODS:
        raise ValueError(f"method is {recipe.method!r}, expected one of {', '.join(METHODS)}")
    for name in ("lr", "alpha", "beta", "temperature"):
        value = getattr(recipe, name)
        if value is not None and not 0 < value < np.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    if recipe.keep_layers is not None and (recipe.method != "distill" or not recipe.keep_layers):
        raise ValueError(
            "keep_layers works only with the method distill: it names at least one layer that the student keeps"
        )
    if recipe.elastic_depth and recipe.method not in ("supervised", "distill"):
        raise ValueError("elastic_depth works only with the methods supervised and distill")
    if recipe.schedule not in SCHEDULES:
        raise ValueError(f"schedule is {recipe.schedule!r}, expected one of {', '.join(SCHEDULES)}")
    if recipe.lora is not None:
        check_at_least_one(lora=recipe.lora)
        if wrong := [part for part in recipe.lora_on if part not in PARTS]:
            raise ValueError(f"lora_on names {wrong[0]!r}, expected some of {', '.join(PARTS)}")
        if not recipe.lora_on:
            raise ValueError("lora_on names no matrix")
    if recipe.quantize is not None and recipe.lora is None and recipe.quantize not in ROUNDED:
        raise ValueError(f"quantize is {recipe.quantize!r}; without lora, expected one of {', '.join(ROUNDED)}")
    for name in ("keep_heads", "keep_channels"):
        if not 0 < getattr(recipe, name) <= 1:
            raise ValueError(f"{name}: expected a share above 0, up to 1, got {getattr(recipe, name)}")
    pruned = recipe.prune is not None or min(recipe.keep_heads, recipe.keep_channels) < 1
    if pruned and (recipe.lora is not None or recipe.quantize is not None):
        raise ValueError("pruning does not work with lora or quantize")
    if isinstance(recipe.prune, float) and not 0 < recipe.prune < 1:
        raise ValueError(f"prune: expected a share between 0 and 1, or a pair such as (2, 4), got {recipe.prune}")
    if recipe.accumulate is not None:
        check_at_least_one(accumulate=recipe.accumulate)
    if recipe.context is not None:
        check_context(recipe.context)


def split(examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split examples into two lists: to train on, and held out. Every twentieth example is held out.

    With fewer than 20 examples, none is held out.

    >>> [len(part) for part in split(range(40))], [len(part) for part in split(range(19))]
    ([38, 2], [19, 0])
    """
    if len(examples) < HELD_OUT:
        return list(examples), []
    return [e for i, e in enumerate(examples) if i % HELD_OUT], list(examples[::HELD_OUT])


def row_length(recipe: TuneRecipe, examples: Sequence[Example], most: int) -> int:
    """Return the number of tokens in a row of a batch.

    This is `recipe.context` if it is set, otherwise the smallest of `LENGTHS` that fits the longest example, but at
    most `most`.
    """
    if recipe.context is not None:
        return recipe.context
    longest = max(len(example.ids) for example in examples)
    return min(most, next((length for length in LENGTHS if length >= longest), LENGTHS[-1]))


def check_examples(path: str | Path, examples: Sequence[Example], context: int) -> str | None:
    """Raise CheckpointError if the loss counts none of an example's first `context` tokens.

    Returns a line about the examples that are longer than `context`; None if there is none.
    """
    for number, example in enumerate(examples, 1):
        if not any(weight > 0 for weight in example.weights[1:context]):
            raise refused(
                path, f"example {number} has no token to learn within {context} tokens: try a larger --context"
            )
    long = sum(len(example.ids) > context for example in examples)
    return f"{path}: {long} of {len(examples)} examples are longer than {context} tokens and are cut" if long else None


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """Return a digest of a model: its configuration, and a sample of the numbers in each tensor."""
    sums = [json.dumps(asdict(checkpoint.config), default=str, sort_keys=True).encode()]
    for name, tensor in checkpoint.tensors.items():
        numbers = tensor.read().reshape(-1)
        sums += [name.encode(), np.ascontiguousarray(numbers[:: max(1, numbers.size // SAMPLES)]).tobytes()]
        checkpoint.release()
    return digest(*sums)


def data_digest(path: str | Path) -> str:
    """Return a digest of a file's bytes."""
    with os_errors(path):
        return digest(Path(path).read_bytes())


def tune(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    data: str | Path,
    out: str | Path,
    recipe: TuneRecipe,
    *,
    base: str,
    teacher: Checkpoint | None = None,
    devices: int = 1,
    resume: bool = False,
    eval_every: int = 100,
    save_every: int = 100,
    report: Callable[[StepReport], object] = lambda step: None,
    note: Callable[[str], object] = lambda line: None,
    progress: Progress = no_progress,
) -> Tuning:
    """Fine-tune a model on the examples of a JSON lines file, and write the result into `out`.

    `base` is the name of the model, for the adapter's files. `teacher` is for the method distill (None: the model
    itself). `devices` is the number of devices that share the rows of a batch. Calls `note` with a line about examples
    that are cut. Calls `report` and raises exceptions as `loop.run` does. Also raises ValueError for an invalid recipe,
    and CheckpointError for a file that cannot be used.
    """
    out = Path(out)
    check_tune_recipe(recipe)
    for finished in (out / CONFIG, out / "model"):
        if finished.exists():
            raise refused(finished, "exists already: this training is done")
    student = student_of(checkpoint, recipe)
    check_trainable(student, recipe)
    read: Callable[[Reader, dict[str, Any]], Any] = READERS.get(recipe.method, Reader.example)
    examples: list[Any] = read_data(data, tokenizer, template, read, eos=min(checkpoint.stops, default=None))
    if recipe.method == "reward":
        context = max(len(question.ids) for question in examples) + recipe.answer_tokens
        if context > checkpoint.config.context:
            what = f"has a prompt that needs {context} tokens with an answer of {recipe.answer_tokens} tokens"
            raise refused(data, f"{what}; the model's context is {checkpoint.config.context}")
    else:
        documents = sides(examples) if recipe.method == "preference" else examples
        context = row_length(recipe, documents, checkpoint.config.context)
        if line := check_examples(data, documents, context):
            note(line)
    check_weights(student, progress=progress)
    # Sampling pads prompts and answers to `context` each.
    positions = 2 * context if recipe.method == "reward" else context
    trainable = make_trainable(student, recipe, context=positions, base=base, progress=progress)
    over = replicated(devices) if devices > 1 else None
    if over:
        trainable = trainable._replace(frozen=over.place(trainable.frozen))
    platform = default_device().platform
    rows = rows_at_once(recipe, platform, devices)
    static: dict[str, Any] = {
        "config": for_sequences(student.config, positions),
        "ops": remat(PACKED) if recipe.remat else PACKED,
        "dtype": np.dtype(recipe.dtype),
        "rows": rows,
        "length": context,
    }
    lesson = Lesson(checkpoint, student, tokenizer, template, trainable, recipe, static, platform, over)
    parts = lesson.rewards(examples) if recipe.method == "reward" else lesson.documents(examples, teacher, progress)
    transform = optimizer(
        lr=recipe.lr, steps=recipe.steps, warm_up=recipe.warm_up, decay=recipe.decay, kind=recipe.schedule
    )
    task = Task(
        steps=recipe.steps,
        tensors=trainable.tensors,
        frozen=parts.frozen,
        transform=transform,
        step=compile_step(parts.loss, transform, platform=platform),
        sums=parts.sums,
        documents=parts.documents,
        identity=identity(recipe, checkpoint, teacher, tokenizer, template, data),
        evaluate=parts.evaluate,
        over=over,
        draws=recipe.method == "reward",
    )
    tensors = run(task, out, resume=resume, eval_every=eval_every, save_every=save_every, report=report)
    trainable.write(out, tensors)
    return Tuning(out, sum(int(a.size) for a in tensors.values()))


class TaskParts(NamedTuple):
    """The parts of a task that depend on the method."""

    loss: Callable
    sums: tuple[str, ...]
    frozen: Any
    documents: Callable[[int, Tensors | None], Work]
    evaluate: Callable[[Tensors], HeldOut] | None


class Lesson(NamedTuple):
    """A model to fine-tune, and the settings for it."""

    checkpoint: Checkpoint
    student: Checkpoint  # the checkpoint, or some of its layers
    tokenizer: Tokenizer
    template: ChatTemplate | None
    trainable: Trainable
    recipe: TuneRecipe
    static: Mapping[str, Any]  # config, ops, dtype, rows and length of the loss
    platform: str
    over: Spread | None  # several devices

    def on_devices(self, loss: Callable) -> Callable:
        """Make the loss a sum over the devices, if there are several."""
        return self.over.sums(loss) if self.over else loss

    def choose(self, examples: Sequence[Any], step: int) -> list[Any]:
        """Return the examples of a step."""
        indices = indices_of_step(len(examples), step, batch=self.recipe.batch, seed=self.recipe.seed)
        return [examples[i] for i in indices]

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of all models to train: of those in the recipe, and of the whole model."""
        return (*sorted(set(self.recipe.elastic_depth)), self.static["config"].layers)

    def documents(self, examples: list[Any], teacher: Checkpoint | None, progress: Progress) -> TaskParts:
        """Make the parts for the methods that learn from the data itself."""
        recipe, trainable, static = self.recipe, self.trainable, self.static
        frozen = trainable.frozen
        if recipe.method == "preference":
            examples = scored(examples, trainable, **static, platform=self.platform)
            objective = preference(trainable.params, beta=recipe.beta, **static)
        elif recipe.method == "distill":
            teacher = teacher or self.checkpoint
            check_teacher(teacher, self.student)
            length = static["length"]
            teaching = load_params(teacher, dtype=static["dtype"], positions=length, progress=progress)
            frozen = frozen, self.over.place(teaching) if self.over else teaching
            config = for_sequences(teacher.config, length)
            elastic = {"temperature": recipe.temperature, "depths": self.depths}
            objective = distillation(trainable.params, teacher_config=config, **elastic, **static)
        else:
            objective = supervised(trainable.params, depths=self.depths, **static)
        objective = objective._replace(loss=self.on_devices(objective.loss))
        training, held_out = split(examples)

        def documents(step: int, _: Tensors | None) -> Work:
            return objective.work(self.choose(training, step))

        evaluate = evaluator(objective, held_out, frozen, platform=self.platform) if held_out else None
        return TaskParts(objective.loss, objective.sums, frozen, documents, evaluate)

    def rewards(self, questions: list[Any]) -> TaskParts:
        """Make the parts for the method reward: the model itself writes the answers of each step."""
        recipe, trainable = self.recipe, self.trainable
        rows, length = self.static["rows"], self.static["length"]
        sampler = Sampler(
            trainable,
            self.tokenizer,
            config=self.static["config"],
            dtype=self.static["dtype"],
            rows=recipe.group,
            length=length,
            stops=self.checkpoint.stops | turn_stops(self.tokenizer, self.template),
            temperature=recipe.temperature,
            platform=self.platform,
        )
        draw = drawn_work(sampler, group=recipe.group, rows=rows, length=length, seed=recipe.seed)
        fixed = {name: self.static[name] for name in ("config", "ops", "dtype")}
        training, held_out = split(questions)

        def documents(step: int, tensors: Tensors | None) -> Work:
            assert tensors is not None  # by `Task.draws`
            return draw(step, self.choose(training, step), tensors)

        evaluate = exact_share(sampler, held_out) if held_out else None
        loss = rewarded(trainable.params, temperature=recipe.temperature, **fixed)
        return TaskParts(self.on_devices(loss), ("loss", "reward", "drift"), trainable.frozen, documents, evaluate)


def rows_at_once(recipe: TuneRecipe, platform: str, devices: int) -> int:
    """Choose the number of rows per batch, a multiple of `devices`.

    If `recipe.accumulate` is set, it is the number of batches of a step. Otherwise a batch has 1 row per
    device on a CPU, and up to 8 rows per device elsewhere.
    """
    if recipe.accumulate is not None:
        return round_up(-(-recipe.batch // recipe.accumulate), devices)
    return round_up(min(recipe.batch, devices * (1 if platform == "cpu" else 8)), devices)


def make_trainable(
    checkpoint: Checkpoint, recipe: TuneRecipe, *, context: int, base: str, progress: Progress
) -> Trainable:
    """Choose the tensors to train: adapters, or all weights."""
    dtype = np.dtype(recipe.dtype)
    if recipe.lora is None:
        constraint = FREE
        if recipe.quantize:
            constraint = rounding(checkpoint, recipe.quantize)
        if recipe.prune:
            constraint = pruning(checkpoint, recipe.prune)
        return all_weights(checkpoint, context=context, dtype=dtype, constraint=constraint)
    return adapters(
        quantized(checkpoint, recipe.quantize) if recipe.quantize else checkpoint,
        rank=recipe.lora,
        alpha=2.0 * recipe.lora if recipe.alpha is None else recipe.alpha,
        parts=recipe.lora_on,
        seed=recipe.seed,
        context=context,
        dtype=dtype,
        base=base,
        progress=progress,
    )


def student_of(checkpoint: Checkpoint, recipe: TuneRecipe) -> Checkpoint:
    """Return the model to train: `checkpoint`, or the part of it that the recipe keeps.

    Raises CheckpointError if `checkpoint` has no such part, if pruning would remove no head or no channel, or if no
    format of the result can express it.
    """
    student = checkpoint if recipe.keep_layers is None else with_layers(checkpoint, recipe.keep_layers)
    if min(recipe.keep_heads, recipe.keep_channels) < 1:
        whole, student = student.config, without_weakest(student, heads=recipe.keep_heads, ffn=recipe.keep_channels)
        parts = (("key-value heads", "kv_heads", recipe.keep_heads), ("channels", "ffn", recipe.keep_channels))
        for plural, field, share in parts:
            if share < 1 and getattr(student.config, field) == getattr(whole, field):
                count = getattr(whole, field)
                raise refused(student.path, f"with {count} {plural}, a share of {share} removes none of them")
    if student is not checkpoint:
        format_config(student, dtype="float32")
    return student


def check_trainable(checkpoint: Checkpoint, recipe: TuneRecipe) -> None:
    """Raise CheckpointError if training in general, or with this recipe, does not support the model."""
    if recipe.lora is not None and not adaptable(checkpoint.config, recipe.lora_on):
        raise refused(checkpoint.path, f"has no matrix {', '.join(recipe.lora_on)} that LoRA can change")
    if checkpoint.config.sinks:
        raise refused(checkpoint.path, "has attention sinks, which training does not support")
    layers = checkpoint.config.layers
    if wrong := [depth for depth in recipe.elastic_depth if not 0 < depth < layers]:
        raise refused(checkpoint.path, f"with a depth of {layers}, no smaller model has depth {wrong[0]}")


def check_teacher(teacher: Checkpoint, student: Checkpoint) -> None:
    """Raise CheckpointError if the vocabularies of teacher and student differ."""
    if teacher.config.vocab != student.config.vocab:
        raise refused(
            teacher.path,
            f"has {teacher.config.vocab} tokens, but the student {student.path} has {student.config.vocab}: "
            "a teacher needs the student's tokens",
        )


def identity(
    recipe: TuneRecipe,
    checkpoint: Checkpoint,
    teacher: Checkpoint | None,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    data: str | Path,
) -> Mapping[str, Any]:
    """Return all that the trained tensors depend on: the recipe, and digests of the model and of the data."""
    source = template.source if template else ""
    return asdict(recipe) | {
        "model": checkpoint_digest(checkpoint),
        "teacher": checkpoint_digest(teacher) if teacher else "",
        "tokenizer": tokenizer_digest(tokenizer, {}),
        "template": digest(source.encode()),
        "data": data_digest(data),
    }
