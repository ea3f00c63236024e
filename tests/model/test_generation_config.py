"""Sampling defaults in generation_config.json are used as transformers and vLLM use them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.open import BUILT_IN, open_checkpoint
from llamaspec.model.convert import convert
from llamaspec.model.generation_config import stated_sampling
from llamaspec.model.options import SamplingOptions

STORIES = BUILT_IN["stories"]
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def stories(folder: Path, **generation: Any) -> Path:
    """Copy the built-in model, with keys added to its generation_config.json."""
    shutil.copytree(STORIES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    return folder


STATED: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"temperature": None, "max_new_tokens": 7}, None),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),  # Llama 3.2
    ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"top_k": 64, "top_p": 0.95}),  # Gemma 3
    ({"temperature": 0.6, "min_p": 0.05}, {"temperature": 0.6, "min_p": 0.05}),
    ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ({"do_sample": True}, {}),
    ({"do_sample": False}, {"temperature": 0.0}),
    ({"do_sample": False, "temperature": 0.7, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_k": -1, "temperature": 1}, {}),
    ({"top_k": 20.0}, {"top_k": 20}),
]


@pytest.mark.parametrize(("generation", "expected"), STATED)
def test_the_defaults_that_a_file_states(tmp_path, generation, expected):
    """Options that a file leaves out are off if the file states at least one sampling option.

    With do_sample false, sampling is greedy.
    """
    stated = stated_sampling(stories(tmp_path, **generation))
    assert stated == (None if expected is None else SamplingOptions(**OFF | expected))
    assert stated_sampling(tmp_path / "model.safetensors") == stated


@pytest.mark.parametrize(
    ("generation", "what"),
    [
        ({"temperature": "hot"}, 'temperature is "hot", expected 0 or more'),
        ({"temperature": -1}, "temperature is -1, expected 0 or more"),
        ({"temperature": True}, "temperature is true, expected 0 or more"),
        ({"top_k": 2.5}, "top_k is 2.5, expected a whole number, 0 or more"),
        ({"top_p": 1.5}, "top_p is 1.5, expected above 0 and at most 1"),
        ({"min_p": [1]}, "min_p is a list, expected between 0 and 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected between 0.01 and 100"),
        ({"do_sample": "no"}, 'do_sample is "no", expected true or false'),
    ],
)
def test_values_that_cannot_be_used_are_refused(tmp_path, generation, what):
    with pytest.raises(CheckpointError) as caught:
        stated_sampling(stories(tmp_path, **generation))
    path = tmp_path / "generation_config.json"
    assert str(caught.value) == f"{path}: {what}; --no-generation-config ignores the file"


def test_a_gguf_file_has_no_defaults(tmp_path):
    write_gguf(open_checkpoint(stories(tmp_path, temperature=0.5)), tmp_path / "x.gguf")
    assert stated_sampling(tmp_path / "x.gguf") is None and stated_sampling(tmp_path / "nothing") is None


def test_a_converted_folder_keeps_the_defaults(tmp_path):
    source = stories(tmp_path / "source", do_sample=True, temperature=0.6, top_k=20)
    convert(open_checkpoint(source), tmp_path / "copy", to="safetensors")
    assert stated_sampling(tmp_path / "copy") == SamplingOptions(**OFF | {"temperature": 0.6, "top_k": 20})
    assert open_checkpoint(tmp_path / "copy").stops == open_checkpoint(source).stops


def test_generate_uses_the_defaults_of_the_model_and_says_so(run, tmp_path):
    """A command-line option overrides the model's default, and --no-generation-config restores our defaults."""
    folder = stories(tmp_path, do_sample=False, repetition_penalty=1.5)

    def generate(*options: str) -> tuple[str, list[str]]:
        request = ("--backend", "reference", "--max-new-tokens", "6", *options)
        code, out, err = run("generate", "Once upon a time, there was a", *request)
        assert code == 0, err
        return out, [line for line in err.splitlines() if "generation_config" in line]

    model = ("--model", str(folder))
    greedy = generate("--temperature", "0", "--repetition-penalty", "1.5")
    default_output = generate("--seed", "1")
    assert greedy[0] != default_output[0] and greedy[1] == default_output[1] == []
    text, (line,) = generate(*model)
    assert text == greedy[0]
    assert line == (
        "generation_config.json sets temperature 0, top_p 1, repetition_penalty 1.5; "
        "--no-generation-config ignores the file"
    )
    assert generate(*model, "--no-generation-config", "--seed", "1") == default_output
    flags = ("--temperature", "0.8", "--top-p", "0.95", "--repetition-penalty", "1")
    assert generate(*model, *flags, "--seed", "1") == default_output
    code, _, err = run("generate", "Once", "--model", str(stories(tmp_path / "bad", top_p=7)))
    assert code == 1 and len(err.splitlines()) == 1 and "top_p is 7" in err
