"""A training from its beginning, or from its last checkpoint, to a directory that holds the model.

    DIR/tokenizer.model, chat_template.jinja …   as the model will have them
    DIR/step-00001200.safetensors              weights and optimizer, the last two; a run goes on from the last
    DIR/model/                                 at the end: what `load` takes, in bfloat16

What a step trains on is a function of the seed and of the step's number, so a run that was killed and goes on ends
with the weights of one that was not.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.checkpoints.checkpoint import Checkpoint, Tensor, os_errors, refused
from model.checkpoints.checks import check_model
from model.checkpoints.huggingface.write import COMPANIONS, write_huggingface
from model.checkpoints.open import BUILT_IN, open_checkpoint
from model.checkpoints.staging import new_file
from model.tensors import tensor_shapes
from model.text import read_text
from model.tokenizers.sentencepiece_model import read_sentencepiece
from model.tokenizers.tokenizer import Tokenizer
from model.weights.params import check_weights
from reference.config import Config
from training.objective import (
    WHOLE,
    Batch,
    Example,
    Tensors,
    batches,
    compile_step,
    initial_tensors,
    optimizer,
    remat,
    summed_loss,
)
from training.stories import vocabulary
from training.stories.corpus import AFTERWARDS, SOCIAL, Message
from training.stories.vocabulary import BOS, EOS, Document, documents, encode, entropy_rate, messages

HELD_OUT = 400  # documents of the built-in corpus that the loss is measured on
QUESTIONS = 200
KEPT = 2  # checkpoints
CHECKPOINT = re.compile(r"step-(\d{8})\.safetensors")
ROWS = {"cpu": 1, "gpu": 32}  # documents in one batch: on a CPU what the caches hold, and no padding
STREAMS = 2  # of batches, computed side by side: one leaves parts of two cores idle
SPREAD = 2**40  # between the first documents of two seeds


@dataclass(frozen=True)
class Recipe:
    """All that the weights depend on, beside the documents."""

    config: Config
    steps: int
    batch: int  # documents a step
    lr: float
    seed: int = 0
    warm_up: int = 100  # steps
    decay: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; weights are float32
    remat: bool = False
    answers: float = 1.0  # how much more than others the tokens count that answer a question about a story


@runtime_checkable
class Source(Protocol):
    """Documents, and the tokenizer that spells them."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def files(self) -> Mapping[str, bytes]:
        """What the model needs beside its weights."""
        ...

    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def floor(self) -> float | None:
        """Nats per counted token of the held-out documents, where that is known: no model's mean loss is less."""
        ...

    def training(self, step: int, recipe: Recipe) -> list[Example]: ...
    def held_out(self) -> list[Example]: ...


class Stories:
    """The corpus that this repository writes: it never ends, and no story comes twice. Nothing is made before it is
    asked for: who trains on a text of their own does not wait for these."""

    bos, eos = BOS, EOS

    @property
    def files(self) -> Mapping[str, bytes]:
        return _stories_files()

    @property
    def tokenizer(self) -> Tokenizer:
        return _stories_tokenizer()

    @property
    def floor(self) -> float:
        return entropy_rate(_stories_held_out(HELD_OUT))

    def training(self, step: int, recipe: Recipe) -> list[Example]:
        first = recipe.seed * SPREAD + step * recipe.batch
        # Even seeds train; of those, 4 n are stories and 4 n + 2 conversations. Three in four are conversations, which
        # hold stories, too: answers are what takes longest to learn.
        seeds = [4 * n + (0 if n % 4 == 0 else 2) for n in range(first, first + recipe.batch)]
        return [self._example(messages(seed), answers=recipe.answers) for seed in seeds]

    def held_out(self) -> list[Example]:
        return [Example(ids, [float(c) for c in counted]) for ids, counted, _ in _stories_held_out(HELD_OUT)]

    def _example(self, said: list[Message], *, answers: float) -> Example:
        """The conversation, its answers about stories more important than the rest."""
        ids, counted, _ = encode(said, self.tokenizer)
        weights = [float(c) for c in counted]
        end = len(ids)
        for message in reversed(said):  # each ends where the next begins
            start = end - len(encode([message], self.tokenizer).ids) + 1  # less the <s>
            if decided_by_a_story(message):
                weights[start:end] = [w * answers for w in weights[start:end]]
            end = start
        return Example(ids, weights)


@cache
def _stories_files() -> dict[str, bytes]:
    kept = ("tokenizer_config.json", "chat_template.jinja")  # the first for transformers alone
    files = {name: (BUILT_IN["stories"] / name).read_bytes() for name in kept}
    return {"tokenizer.model": vocabulary.train_tokenizer(), **files}


@cache
def _stories_tokenizer() -> Tokenizer:
    return read_sentencepiece(_stories_files()["tokenizer.model"], path="the stories' tokenizer")


@cache
def _stories_held_out(count: int) -> list[Document]:
    return list(documents(range(1, 2 * count, 2), _stories_tokenizer()))


class Text:
    """The paragraphs of a file, in a new order every time round; every twentieth is held out."""

    def __init__(self, file: str | Path, tokenizer: Tokenizer, files: Mapping[str, bytes], *, context: int):
        check_context(context)
        text = read_text(file).replace("\r\n", "\n").replace("\r", "\n")
        self.tokenizer, self.files = tokenizer, files
        self.bos = tokenizer.bos
        self.eos = next((tokenizer.special[n] for n in ("</s>", "<|end_of_text|>") if n in tokenizer.special), None)
        self.floor = None
        paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)]
        all = [part for text in paragraphs if text for part in self._documents(text, context)]
        if len(all) < 2:
            raise refused(file, "has less than two paragraphs: one to train on, one to hold out")
        self._held_out, self._training = all[::20], [d for i, d in enumerate(all) if i % 20]

    def _documents(self, text: str, context: int) -> list[Example]:
        ids = [*self.tokenizer.encode(text), *([] if self.eos is None else [self.eos])]
        begin = [] if self.bos is None else [self.bos]
        size = context - len(begin)
        parts = [[*begin, *ids[i : i + size]] for i in range(0, len(ids), size)]
        predicting = [part for part in parts if len(part) > 1]  # without a <s>, one id is predicted from nothing
        return [Example(part, [float(i >= len(begin)) for i in range(len(part))]) for part in predicting]

    def training(self, step: int, recipe: Recipe) -> list[Example]:
        count = len(self._training)
        return [
            self._training[np.random.default_rng([recipe.seed, n // count]).permutation(count)[n % count]]
            for n in range(step * recipe.batch, (step + 1) * recipe.batch)
        ]

    def held_out(self) -> list[Example]:
        return self._held_out


class Evaluation(NamedTuple):
    loss: float  # nats per counted token of held-out documents
    floor: float | None  # what no model can get below
    right: int  # questions about a story answered to the letter, each word the likeliest
    questions: int

    def __str__(self):
        """
        >>> print(Evaluation(0.2, 0.19, 181, 200))
        held-out loss 0.2000 (floor 0.1900, +5.3 %), 181 of 200 questions
        """
        floor = f" (floor {self.floor:.4f}, {self.loss / self.floor - 1:+.1%})".replace("%", " %") if self.floor else ""
        answers = f", {self.right} of {self.questions} questions" if self.questions else ""
        return f"held-out loss {self.loss:.4f}{floor}{answers}"


class Progress(NamedTuple):
    step: int  # steps done
    loss: float  # nats per counted token of the last
    rate: float  # tokens a second, padding not counted
    seconds: float  # since the beginning, pauses not counted
    evaluation: Evaluation | None = None


def train(
    recipe: Recipe,
    source: Source,
    out: str | Path,
    *,
    resume: bool = False,
    eval_every: int = 200,
    save_every: int = 100,
    report: Callable[[Progress], object] = lambda progress: None,
) -> Path:
    """Train, and give the directory of the model. Raises CheckpointError, one line, where a file cannot be used."""
    out = Path(out)
    check_recipe(recipe, source)
    check_at_least_one(eval_every=eval_every, save_every=save_every)
    transform = optimizer(lr=recipe.lr, steps=recipe.steps, warm_up=recipe.warm_up, decay=recipe.decay)
    tensors = initial_tensors(recipe.config, seed=recipe.seed)
    state, begun, seconds = transform.init(tensors), 0, 0.0
    saved = checkpoints(out)
    if saved and not resume:
        raise refused(out, "holds a training already: --resume goes on with it")
    if resume and not saved:
        raise refused(out, "holds no checkpoint to resume from")
    if (out / "model").exists():
        raise refused(out / "model", "exists already: this training is done")
    if saved:
        tensors, state, begun, seconds = load_state(saved[-1], recipe, tensors, state)
    else:
        with os_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        for name, data in source.files.items():
            with new_file(out / name, replace=True) as staged:
                staged.write_bytes(data)
    ops = remat(WHOLE) if recipe.remat else WHOLE
    step = compile_step(recipe.config, transform, ops=ops, dtype=np.dtype(recipe.dtype))
    rows = min(recipe.batch, ROWS.get(jax.default_backend(), ROWS["gpu"]))
    context = recipe.config.context
    zeros = jax.jit(lambda: (jax.tree.map(jnp.zeros_like, tensors), jnp.zeros(())))

    def add_up(parts: list[Batch]) -> tuple[Tensors, Any]:
        """Gradient and nats of all predictions of `parts`."""
        sums = zeros()
        for part in parts:
            sums = step.add_gradient(*sums, tensors, part.ids, part.weights)
        return jax.block_until_ready(sums)

    pool = ThreadPoolExecutor(STREAMS)
    for number in range(begun, recipe.steps):
        start = time.perf_counter()
        chosen = source.training(number, recipe)
        parts = list(batches(chosen, rows=rows, context=context))
        count = sum(int(part.counted.sum()) for part in parts)
        if not count:
            raise ValueError(f"step {number + 1} has nothing to learn within {context} tokens: try a larger context")
        streams = pool.map(add_up, (parts[first::STREAMS] for first in range(STREAMS)))
        gradient, nats = jax.tree.map(lambda *sums: sum(sums), *streams)
        tensors, state = step.update(tensors, state, gradient, jnp.float32(count))
        loss = float(nats) / count
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss of step {number + 1} is {loss}: try a smaller --lr")
        took = time.perf_counter() - start
        seconds += took
        done = number + 1
        progress = Progress(done, loss, sum(min(len(d.ids), context) for d in chosen) / took, seconds)
        report(progress)
        if done % eval_every == 0 or done == recipe.steps:
            evaluation = evaluate(tensors, recipe.config, source, score=step.score)
            report(progress._replace(evaluation=evaluation))
        if done % save_every == 0 or done == recipe.steps:
            save_state(out, done, seconds, recipe, tensors, state)
    write_model(out, recipe, source, tensors)
    return out / "model"


def check_recipe(recipe: Recipe, source: Source) -> None:
    """Raise ValueError for a number that cannot be."""
    check_at_least_one(steps=recipe.steps, batch=recipe.batch)
    check_context(recipe.config.context)
    for name, value in {"lr": recipe.lr, "answers": recipe.answers}.items():
        if not 0 < value < np.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    if recipe.seed < 0:
        raise ValueError(f"seed must not be negative, got {recipe.seed}")
    check_model("the model to train", recipe.config, bos=source.bos, stops=_stops(source))


def check_at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_context(context: int) -> None:
    if context < 2:
        raise ValueError(f"context must be at least 2, an id and the one that follows it, got {context}")


def evaluate(tensors: Tensors, config: Config, source: Source, *, score: Callable) -> Evaluation:
    """The loss on the held-out documents; of the stories' questions, how many the model answers to the letter."""
    rows = ROWS.get(jax.default_backend(), ROWS["gpu"])
    nats, count = 0.0, 0
    for batch in batches(source.held_out(), rows=rows, context=config.context):
        nats += float(score(tensors, batch.ids, batch.weights)[1][0])
        count += int(batch.counted.sum())
    asked = questions(source.tokenizer) if source.floor is not None else []
    right = 0
    if asked:
        for batch in batches(asked, rows=rows, context=config.context):
            likeliest = np.asarray(score(tensors, batch.ids, batch.weights)[1][1])  # [batch, seq - 1]
            wrong = np.any((likeliest != batch.ids[:, 1:]) & batch.counted, axis=1)
            whole = np.any(batch.counted, axis=1)  # not of an empty row, nor of one too long for the context
            right += int(np.sum(whole & ~wrong))
    return Evaluation(nats / count, source.floor, right, len(asked))


def evaluate_model(path: str | Path, source: Source) -> Evaluation:
    """`evaluate` a model in a file or directory."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if config.vocab < source.tokenizer.vocab:
        raise refused(path, f"knows {config.vocab} ids, not the {source.tokenizer.vocab} of the documents' tokenizer")
    check_weights(checkpoint)
    tensors = {name: jnp.asarray(tensor.read(), jnp.float32) for name, tensor in checkpoint.tensors.items()}
    score = jax.jit(partial(summed_loss, config=config, ops=WHOLE, dtype=np.dtype(np.float32)))
    return evaluate(tensors, config, source, score=score)


def questions(tokenizer: Tokenizer, count: int = QUESTIONS) -> list[Example]:
    """Held-out conversations, each cut behind an answer that a story decides; the answer alone is counted.

    As each of its ids must be the likeliest after those before it, to be right throughout is what decoding at
    temperature 0 to the same answer is.
    """
    found: list[Example] = []
    seed = 1
    while len(found) < count:
        said = messages(seed)
        for turn, message in enumerate(said):
            if decided_by_a_story(message):
                before, all = encode(said[:turn], tokenizer), encode(said[: turn + 1], tokenizer)
                header = len(before.ids) + 1  # the name of the role
                found.append(Example(all.ids, [float(i >= header) for i in range(len(all.ids))]))
        seed += 2
    return found[:count]


def decided_by_a_story(message: Message) -> bool:
    manners = {answer for _, answers in (*SOCIAL, *AFTERWARDS) for answer in answers}
    return message.role == "assistant" and message.nats == 0.0 and message.content not in manners


def checkpoints(out: Path) -> list[Path]:
    """Those in a directory, the last at the end."""
    with os_errors(out):
        names = os.listdir(out) if out.exists() else []
    return [out / name for name in sorted(names) if CHECKPOINT.fullmatch(name)]


def save_state(out: Path, step: int, seconds: float, recipe: Recipe, tensors: Tensors, state: optax.OptState) -> None:
    """Write a checkpoint, and remove those before the last two once it is there."""
    about = {"recipe": json.dumps(asdict(recipe)), "step": str(step), "seconds": f"{seconds:.3f}"}
    arrays = {name: np.asarray(leaf) for name, leaf in _named(tensors, state).items()}
    with new_file(out / f"step-{step:08}.safetensors", replace=True) as staged:
        try:
            save_file(arrays, staged, metadata=about)
        except SafetensorError as error:  # its own word for what the system refuses
            raise refused(out, " ".join(str(error).split())) from error
    for old in checkpoints(out)[:-KEPT]:
        old.unlink(missing_ok=True)


def load_state(path: Path, recipe: Recipe, tensors: Tensors, state: Any) -> tuple[Tensors, Any, int, float]:
    """Weights, optimizer, steps done and seconds taken, as `save_state` wrote them; `tensors` and `state` are alike."""
    try:
        with os_errors(path), safe_open(path, "np") as file:
            about = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        step, seconds, written = int(about["step"]), float(about["seconds"]), json.loads(about["recipe"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise refused(path, "is no checkpoint of a training, or a damaged one: the one before it may serve") from error
    asked = json.loads(json.dumps(asdict(recipe)))
    if differing := [name for name in asked if asked[name] != written.get(name)]:
        raise refused(path, f"was made with another {', '.join(differing)}")
    expected = _named(tensors, state)
    if {name: a.shape for name, a in arrays.items()} != {name: np.shape(a) for name, a in expected.items()}:
        raise refused(path, "holds other tensors than this training")
    leaves = [jnp.asarray(arrays[name]) for name in expected]
    tensors, state = jax.tree.unflatten(jax.tree.structure((tensors, state)), leaves)
    return tensors, state, step, seconds


def _named(tensors: Tensors, state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path((tensors, state))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def write_model(out: Path, recipe: Recipe, source: Source, tensors: Tensors) -> None:
    """Write DIR/model, with weights in bfloat16."""
    narrow = np.dtype(ml_dtypes.bfloat16)

    def read(name: str) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(tensors[name]).astype(narrow)

    named = {name: Tensor(shape, narrow, read(name)) for name, shape in tensor_shapes(recipe.config).items()}
    made = Checkpoint(str(out), "safetensors", recipe.config, named, bos=source.bos, stops=_stops(source))
    write_huggingface(made, out / "model")


def companions(tokenizer: str | Path) -> dict[str, bytes]:
    """The files of a tokenizer, as a model that uses it will have them."""
    place = Path(tokenizer)
    files = [place / name for name in COMPANIONS] if place.is_dir() else [place]
    with os_errors(place):
        return {file.name: file.read_bytes() for file in files if file.is_file() and file.name in COMPANIONS}


def _stops(source: Source) -> frozenset[int]:
    return frozenset() if source.eos is None else frozenset([source.eos])


def parameters(config: Config) -> int:
    return sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
