"""Models that were saved without their head, as embedding models are. Their tensors' names lack the prefix "model."."""

import json

import numpy as np
import pytest

from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference import llama
from tests.support.families import FAMILIES, random_tensors, write_safetensors


def written(folder, *, tied: bool, bare: bool, head: bool = True):
    """Write a Qwen 3 model. If `bare`, its names lack the prefix. If `head` is False, it lacks the head."""
    config = FAMILIES["qwen3"] | {"tie_word_embeddings": tied}
    tensors = random_tensors(config)
    if not head:
        tensors.pop("lm_head.weight", None)
    if bare:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def states(folder) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    params, config = load_reference_params(checkpoint), checkpoint.config
    return llama.hidden_states(params, np.array([1, 5, 7]), llama.empty_cache(config), config=config)[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_names_without_their_prefix_are_read(tmp_path, tied, head):
    usual = written(tmp_path / "usual", tied=tied, bare=False)
    bare = written(tmp_path / "bare", tied=tied, bare=True, head=head)
    np.testing.assert_array_equal(states(bare), states(usual))
    notes = open_checkpoint(bare).notes
    assert (notes != ()) == (not tied and not head)
    assert all("only its embeddings are right" in note for note in notes)


def test_a_usual_file_without_its_head_is_still_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head\.weight"):
        open_checkpoint(written(tmp_path / "usual", tied=False, bare=False, head=False))
