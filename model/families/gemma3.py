"""Gemma 3, as released with an image encoder. We read only the text model."""

from dataclasses import replace

from llamaspec.model.families import gemma3_text

FAMILY = replace(
    gemma3_text.FAMILY,
    name="gemma3",
    model="Gemma3ForConditionalGeneration",
    names={part: f"language_model.{name}" for part, name in gemma3_text.FAMILY.names.items()},
    # config.json of the models with 4B and more parameters leaves out these values, which all these models share.
    defaults={**gemma3_text.FAMILY.defaults, "heads": 8, "vocab": 262_208},
    within="text_config",
    beside=("vision_tower.", "multi_modal_projector."),
)
