"""A checkup of a checkpoint: its likely faults, the measurement that shows each fault, and how to repair it."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError
from llamaspec.model.checkpoints.huggingface.read import open_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint, place_of
from llamaspec.model.insight.evaluation import EvalText
from llamaspec.model.insight.text_faults import open_tokenizer, text_faults
from llamaspec.model.insight.trials import TEXT, Trials, try_changes
from llamaspec.model.insight.weight_faults import Fault, norm_faults, same_head_and_embedding, weight_faults
from llamaspec.model.text import read_text
from llamaspec.model.tokenizers.tokenizer import encode_text
from llamaspec.model.weights.loading import Progress, no_progress
from llamaspec.reference.config import Config

LONGEST = 512  # largest number of tokens of the text: each change takes a float64 pass over them
LLAMA_3_VOCAB, LLAMA_3_THETA, LLAMA_3_CONTEXT = 128_256, 500_000.0, 8_192  # https://arxiv.org/abs/2407.21783


class Checkup(NamedTuple):
    """The result of a checkup."""

    model: str
    faults: list[Fault]
    trials: Trials | None  # None: we tried no changes on a text; `note` says why
    note: str

    def as_json(self) -> dict[str, Any]:
        """Return the checkup for JSON. A loss that is not finite becomes null."""
        tried = self.trials.tried if self.trials else []
        return {
            "model": self.model,
            "faults": [fault._asdict() for fault in self.faults],
            "loss": _finite(self.trials.before) if self.trials else None,
            "tried": [
                {"fault": change.fault, "mend": change.mend, "loss": _finite(loss)} for change, loss in tried if change
            ],
            "note": self.note,
        }


def check_up(
    model: str | Path,
    *,
    tokenizer: str | Path | None = None,
    text: str | Path | None = None,
    progress: Progress = no_progress,
) -> Checkup:
    """Examine the weights, tokenizer and chat template of a checkpoint, and try changes that may lower its loss.

    We measure the loss on at most `LONGEST` tokens of the file `text`; None means the built-in story `TEXT`. Raises
    CheckpointError, with the reason, if the checkpoint cannot be opened.
    """
    words = TEXT if text is None else read_text(text)
    checkpoint, faults = _opened(model)
    faults += weight_faults(checkpoint, progress=progress)
    faults += _scaling_faults(checkpoint.config)
    vocabulary, wrong = open_tokenizer(checkpoint, tokenizer)
    faults += wrong
    if vocabulary:
        faults += text_faults(checkpoint, vocabulary, Path(tokenizer) if tokenizer else place_of(model))
    trials, note = None, ""
    if any(fault.fault in ("nan", "overflow") for fault in faults):
        note = "the loss on a text was not measured, because the weights, or values computed from them, are not finite"
    elif vocabulary is None:
        note = "the loss on a text was not measured, because no tokenizer fits this model"
    else:
        ids = encode_text(vocabulary, words)[: min(LONGEST, checkpoint.config.context)]
        trials = try_changes(checkpoint, EvalText(ids, len(words.encode())), progress=progress)
        faults += _named(trials)
        if not trials.judged:
            note = (
                f"the trials are not conclusive: the model's loss on the text, {trials.before:,.4g} nats per token, "
                f"is not below {trials.frequencies:.4g}, the loss of predicting tokens by their frequency; "
                "check the text's language and the tokenizer"
            )
    if not (trials and trials.judged):
        faults += norm_faults(checkpoint)
    return Checkup(str(model), faults, trials, note)


def _opened(model: str | Path) -> tuple[Checkpoint, list[Fault]]:
    """Open a checkpoint. If tie_word_embeddings contradicts the weights, also return a fault.

    If the checkpoint cannot be opened with the value in config.json, we open it with the other value.
    """
    try:
        checkpoint = open_checkpoint(model)
    except CheckpointError as error:
        folder = place_of(model)
        if not folder.is_dir():
            raise
        for tied in (True, False):
            try:
                checkpoint = open_huggingface(folder, tied=tied)
            except CheckpointError:
                continue
            mend = f'"tie_word_embeddings": {str(tied).lower()} in config.json'
            return checkpoint, [
                Fault("head", "tie_word_embeddings in config.json contradicts the weights", str(error), mend)
            ]
        raise
    if checkpoint.format == "safetensors" and same_head_and_embedding(checkpoint):
        what = "the head equals the embedding, although tie_word_embeddings is false"
        measured = "every number of lm_head.weight equals that of the embedding"
        return checkpoint, [Fault("head", what, measured, '"tie_word_embeddings": true in config.json')]
    return checkpoint, []


def _scaling_faults(config: Config) -> list[Fault]:
    """Return a fault if a model with Llama 3's vocabulary and theta has a long context but no RoPE scaling.

    Measuring the loss would not find this fault, because it appears only in long texts.
    """
    of_llama_3 = config.vocab == LLAMA_3_VOCAB and config.theta == LLAMA_3_THETA
    if not of_llama_3 or config.context <= LLAMA_3_CONTEXT or config.scaling is not None:
        return []
    measured = f"vocabulary {config.vocab}, theta {config.theta:g}, context {config.context}, and no rope_scaling"
    mend = '"rope_scaling" of type llama3 in config.json (factor 8 in Llama 3.1 and 3.3, 32 in 3.2), or '
    mend += f'"max_position_embeddings": {LLAMA_3_CONTEXT} (Llama 3)'
    return [
        Fault(
            "rope scaling", f"a Llama 3 model with a context above {LLAMA_3_CONTEXT} needs rope_scaling", measured, mend
        )
    ]


def _named(trials: Trials) -> list[Fault]:
    """Return a fault for each change that the trials kept, with the perplexity before and after the change."""
    faults, before = [], trials.before
    for change, loss in trials.best:
        assert change
        measured = f"perplexity {_perplexity(before)} on the text, {_perplexity(loss)} with the change"
        measured += f" ({trials.tokens} tokens)"
        faults.append(Fault(change.fault, change.what, measured, change.mend))
        before = loss
    return faults


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.4g}" if loss < 700 else "beyond float64"


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def as_text(checkup: Checkup) -> str:
    """Format a checkup for people to read."""
    trials, count = checkup.trials, len(checkup.faults)
    lines = [f"{checkup.model}: {count or 'no'} likely fault{'s' * (count != 1)}"]
    for fault in checkup.faults:
        lines += ["", f"{fault.fault}: {fault.what}", f"  measured  {fault.measured}", f"  repair    {fault.mend}"]
    if trials:
        lines += ["", f"perplexity on {trials.tokens} tokens: {_perplexity(trials.before)}; with one change at a time:"]
        lines += [f"  {_perplexity(loss):>14}  {change.mend}" for change, loss in trials.tried if change]
        if not trials.judged:
            lines += ["", checkup.note]
    elif checkup.note:
        lines += ["", checkup.note]
    return "\n".join(lines) + "\n"
