"""Finds faults of a checkpoint's tokenizer, control tokens and chat template."""

from pathlib import Path

from llamaspec.model.chat.template import SpecialTokens, template_of
from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError
from llamaspec.model.insight.weight_faults import Fault
from llamaspec.model.tokenizers.of_model import OtherVocabulary, tokenizer_if_any
from llamaspec.model.tokenizers.tokenizer import Tokenizer

ANSWER = "It is blue"  # the assistant's answer in the conversation that we render with a template
CONVERSATION = [{"role": "user", "content": "Which color is the sky?"}, {"role": "assistant", "content": ANSWER}]


def open_tokenizer(checkpoint: Checkpoint, tokenizer: str | Path | None) -> tuple[Tokenizer | None, list[Fault]]:
    """Open the tokenizer of a checkpoint. Returns None and a fault if the tokenizer is missing or cannot be used."""
    try:
        if chosen := tokenizer_if_any(checkpoint, tokenizer):
            return chosen, []
        measured = f"{checkpoint.path}: no tokenizer in the model's file, and none next to it"
        mend = "copy the tokenizer's files, such as tokenizer.json, into the model's folder; --tokenizer names others"
        return None, [
            Fault("tokenizer", "the model has no tokenizer, so it can neither read nor write", measured, mend)
        ]
    except OtherVocabulary as error:
        mend = "use the tokenizer that the model was trained with: --tokenizer PATH"
        return None, [Fault("tokenizer", "the tokenizer does not belong to this model", str(error), mend)]
    except CheckpointError as error:
        mend = "use an undamaged file of the same tokenizer: --tokenizer PATH"
        return None, [Fault("tokenizer", "the tokenizer cannot be read", str(error), mend)]


def text_faults(checkpoint: Checkpoint, tokenizer: Tokenizer, place: Path) -> list[Fault]:
    """Return faults of the BOS and stop ids, and of the chat template at `place`, if there is a template."""
    faults = []
    bos = tokenizer.bos
    if bos is not None and checkpoint.bos is not None and bos != checkpoint.bos:
        measured = f"the BOS id is {bos} ({tokenizer.piece(bos)}) in the tokenizer, {checkpoint.bos} in the model"
        mend = f'"bos_token_id": {bos} in generation_config.json, or another tokenizer'
        faults.append(Fault("tokenizer", "model and tokenizer begin texts with different tokens", measured, mend))
    try:
        template = template_of(tokenizer, place)
        rendered = template.render(CONVERSATION, add_generation_prompt=False) if template else ""
    except CheckpointError as error:
        return [
            *faults,
            Fault(
                "template",
                "the chat template cannot be used",
                str(error),
                "use another template: --template NAME or FILE",
            ),
        ]
    if ANSWER in rendered and (fault := _fault_of_ending(checkpoint, tokenizer, rendered)):
        faults.append(fault)
    return faults


def _fault_of_ending(checkpoint: Checkpoint, tokenizer: Tokenizer, rendered: str) -> Fault | None:
    """Return a fault if no stop id follows the assistant's answer in the rendered conversation."""
    after = rendered[rendered.rindex(ANSWER) + len(ANSWER) :]
    ids = SpecialTokens(tokenizer).encode(after, after=rendered[: -len(after)]) if after else []
    if checkpoint.stops.intersection(ids):
        return None
    stops = ", ".join(f"{id} ({tokenizer.piece(id)})" for id in sorted(checkpoint.stops)) or "none"
    measured = f"{after[:40]!r} follows an answer in the template, and the stop ids are {stops}"
    special = next((id for id in ids if id in tokenizer.special.values()), None)
    if special is None:
        what, mend = (
            "the chat template writes no token after an answer, so the model may not stop",
            "stop at a string: --stop TEXT",
        )
    else:
        what = "the token that ends an answer in the chat template is not a stop token of the model"
        ends = sorted({*checkpoint.stops, special})
        mend = f'"eos_token_id": {ends[0] if len(ends) == 1 else ends} in generation_config.json'
    return Fault("stops", what, measured, mend)
