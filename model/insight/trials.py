r"""Changes that may repair a checkpoint. We try them on a text, because a correct model predicts ordinary text well.

We report a change if it makes the text `ODDS` times as likely. If the unchanged model had generated the text, this
would happen by chance with a probability of at most 1 / ODDS for any change (Markov's inequality). But no checkpoint
generated the text, so there is a second condition: with the change, the model must predict the text better than the
frequencies of the text's own tokens do. The loss of the frequencies is

    -sum_v c_v / n ln(c_v / n)        c_v: how often token v is among the n tokens

A model with random weights, or a model for another language or tokenizer, never meets the second condition.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.insight.evaluation import EvalText, evaluate
from llamaspec.model.running.reference_backend import LazyLayers, ReferenceBackend, load_reference_params
from llamaspec.model.weights.loading import Progress, no_progress
from llamaspec.reference.config import Config
from llamaspec.reference.rope import halves_to_interleaved, interleaved_to_halves

ODDS = 1e9  # a change must make the text this many times as likely
THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)  # the RoPE bases of most released models
EPS = (1e-6, 1e-5)

# Formats of checkpoints whose configuration is not in config.json: the file with the configuration, and the names of
# its keys. Formats with configuration and weights in one file are missing here, because the user must convert such a
# file first.
FILES = {
    "mistral": (
        "params.json",
        {"tie_word_embeddings": "tied_embeddings", "rms_norm_eps": "norm_eps", "rope_scaling": "yarn"},
    )
}

# A text for models that know English. Its words are simple enough for the built-in model.
TEXT = """Far, far away, in a round house under a big oak, lived a little lamb named Luna. Luna had a purple ball from \
her mother. On a warm afternoon, Luna took the ball to the meadow. She wanted to play with her ball. Luna threw the \
ball up and caught it again. But the ball bounced away. The ball landed at the top of a tall tree. Luna was very sad. \
She shook the tree, but the ball did not fall down. Just then, a wise squirrel came by. "Do not cry," it said. "I can \
help you." The squirrel ran up the tree as fast as it could. A moment later, Luna had the ball back."""


class Change(NamedTuple):
    """A change to a checkpoint, and the fault that the change would repair."""

    fault: str  # the kind of fault; we report only the best change of each kind
    what: str  # the fault in words
    mend: str  # how the user can make the change
    config: Config
    layer: Callable[[Any], Any] | None = None  # changes a `reference.llama.Layer`
    outside: Callable[[Any], Any] | None = None  # changes a `reference.llama.Params`, except its layers


class LossTrial(NamedTuple):
    """The loss on the text, in nats per token, with one change to the checkpoint (or without, if `change` is None)."""

    change: Change | None
    loss: float


class Trials(NamedTuple):
    """The results of all trials on a text. Each round starts from the best change of the previous round."""

    tokens: int
    frequencies: float  # the loss of a predictor that knows only how often each token is in the text
    before: float  # the loss of the unchanged checkpoint
    best: list[LossTrial]  # the changes to report, in order; each loss includes all changes up to it
    tried: list[LossTrial]  # the trials of the first round

    @property
    def judged(self) -> bool:
        """True if the model, with the best changes, predicts the text better than token frequencies do."""
        return (self.best[-1].loss if self.best else self.before) < self.frequencies


def frequency_loss(ids: Sequence[int]) -> float:
    """Return the loss in nats of predicting each id with its frequency among `ids`.

    >>> round(frequency_loss([5, 5, 7, 7]) / math.log(2), 6)
    1.0
    """
    counts = np.array(list(Counter(ids).values()))
    return float(-np.sum(counts * np.log(counts / len(ids)))) / len(ids)


def setting(format: str, key: str, value: str) -> str:
    """Describe how to set a key of config.json for a checkpoint of this format.

    >>> setting("mistral", "rms_norm_eps", "1e-05")
    '"norm_eps": 1e-05 in params.json'
    >>> setting("gguf-v3", "rope_theta", "10000")
    '"rope_theta": 10000 in config.json, after convert --to safetensors'
    """
    file, names = FILES.get(format, ("config.json", {}))
    if format not in (*FILES, "safetensors"):
        file += ", after convert --to safetensors"
    return f'"{names.get(key, key)}": {value} in {file}'


def changes(config: Config, format: str) -> list[Change]:
    """Return the changes to try on a checkpoint with this configuration and format."""
    pairs = "reorder the rows of q and k, as `llamaspec.reference.rope.{}` does, and convert again"
    candidates = [
        Change(
            *(
                "rope pairing",
                "the rows of q and k that RoPE rotates together are neighbors; expected them in two halves",
            ),
            pairs.format("interleaved_to_halves"),
            config,
            layer=lambda layer: _reordered(layer, config, interleaved_to_halves),
        ),
        Change(
            *("rope pairing", "the rows of q and k were reordered for RoPE twice instead of once"),
            pairs.format("halves_to_interleaved"),
            config,
            layer=lambda layer: _reordered(layer, config, halves_to_interleaved),
        ),
        *(
            Change("norms", f"the weights of norms are stored {how}", mend, config, *_shifted(by))
            for by, how, mend in (
                (1.0, "minus 1, as Gemma's are", "add 1 to the weights of every norm"),
                (-1.0, "plus 1, which this family does not expect", "subtract 1 from the weights of every norm"),
            )
        ),
    ]
    if not config.tied:
        tied = {"outside": lambda params: params._replace(head=params.embedding)}
        mend = setting(format, "tie_word_embeddings", "true") + ", and remove the weights of the head"
        candidates.append(
            Change(
                "head",
                "the head does not belong to this model: the embedding predicts better in its place",
                mend,
                config,
                **tied,
            )
        )
    if config.scaling is not None:
        mend = setting(format, "rope_scaling", "null")
        plain = replace(config, scaling=None)
        candidates.append(
            Change(
                "rope scaling", "config.json sets rope_scaling, but the weights were trained without it", mend, plain
            )
        )
    for name, key, values in (("eps", "rms_norm_eps", EPS), ("theta", "rope_theta", THETAS)):
        for value in values:
            if value != getattr(config, name):
                mend = setting(format, key, f"{value:g}")
                what = f"{name} is {getattr(config, name):g}, but the weights were trained with another value"
                candidates.append(Change(name, what, mend, replace(config, **{name: value})))
    return candidates


def try_changes(checkpoint: Checkpoint, text: EvalText, *, progress: Progress = no_progress) -> Trials:
    """Try the changes on a text in float64, and keep the best one.

    Repeats this until no further change meets both conditions at the top of this module.
    """
    params = load_reference_params(checkpoint, lazily=True)
    frequencies = frequency_loss(text.ids[1:])
    before = _loss(params, checkpoint.config, text)
    best_trials: list[LossTrial] = []
    first: list[LossTrial] = []
    config, loss = checkpoint.config, before
    while True:
        mended = {trial.change.fault for trial in best_trials if trial.change}
        untried = [change for change in changes(config, checkpoint.format) if change.fault not in mended]
        trials = []
        for i, change in enumerate(untried):
            progress("trying changes", i / len(untried))
            trials.append(LossTrial(change, _loss(changed(params, change), change.config, text)))
        first = first or trials
        best = min(trials, key=lambda trial: trial.loss)
        gain = (loss - best.loss) * text.tokens
        if best.change is None or gain < math.log(ODDS) or best.loss >= frequencies:
            return Trials(text.tokens, frequencies, before, best_trials, first)
        best_trials.append(best)
        params, config, loss = changed(params, best.change), best.change.config, best.loss


def _loss(params: Any, config: Config, text: EvalText) -> float:
    """Return the loss on a text, or infinity if the logits are not finite."""
    backend = ReferenceBackend(params, config, capacity=max(config.context, len(text.ids)))
    try:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return evaluate(backend, text, context=len(text.ids)).loss
    except FloatingPointError:
        return math.inf


def changed(params: Any, change: Change) -> Any:
    """Return the weights with a change. We read and change a layer each time it is used."""
    if layer := change.layer:
        layers = params.layers
        params = params._replace(layers=LazyLayers(len(layers), lambda i: layer(layers[i])))
    return change.outside(params) if change.outside else params


def _reordered(layer: Any, config: Config, order: Callable[..., np.ndarray]) -> Any:
    """Return a layer in which `order` has reordered the rows, biases and norms of q and k."""

    def linear(projection: Any, heads: int) -> Any:
        bias = None if projection.bias is None else order(projection.bias, heads=heads)
        return projection._replace(weight=order(projection.weight, heads=heads), bias=bias)

    norms = {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(layer, name)) is not None}
    reordered = {name: order(norm, heads=len(norm) // config.head_dim) for name, norm in norms.items()}
    return layer._replace(q=linear(layer.q, config.heads), k=linear(layer.k, config.kv_heads), **reordered)


def _shifted(by: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return two functions that add `by` to the weights of norms: one for a layer, and one for the final norm."""

    def shifted(fields: Any) -> Any:
        return fields._replace(**{name: norm + by for name, norm in _norms(fields)})

    return shifted, shifted


def _norms(fields: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in fields._asdict().items():
        if name.endswith("norm") and value is not None:
            yield name, value
