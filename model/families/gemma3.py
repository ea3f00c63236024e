"""Gemma 3 as released with a vision tower. We read only its text model."""

from dataclasses import replace

from llamaspec.model.families import gemma3_text

FAMILY = replace(
    gemma3_text.FAMILY,
    name="gemma3",
    model="Gemma3ForConditionalGeneration",
    names={part: f"language_model.{name}" for part, name in gemma3_text.FAMILY.names.items()},
    # The config.json of 4B and larger models leaves out these values, which all of them share.
    defaults={**gemma3_text.FAMILY.defaults, "heads": 8, "vocab": 262_208},
    within="text_config",
    beside=("vision_tower.", "multi_modal_projector."),
)
