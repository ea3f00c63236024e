"""Each family has its own module, and every computation respects Qwen3-MoE's switch `norm_topk_prob`."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

import llamaspec.model.families
from llamaspec.model.candidates.walking import WalkableModel
from llamaspec.model.family import architectures, families, nearest_family
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.reference.backward.llama import loss_and_gradient
from llamaspec.reference.config import Config
from llamaspec.reference.llama import feed_forward
from llamaspec.reference.moe import route
from llamaspec.reference.rope import YarnScaling, yarn_magnitude
from llamaspec.verify.bounds.running_error import NO_BOUND, exactly, moe_add
from llamaspec.verify.judging.walk import walk
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.strategies import seeds

PLAIN = replace(SMALL, layers=1, experts=4, experts_per_token=2, renormalize_experts=False)


def test_a_family_is_a_file():
    files = {path.stem for path in Path(llamaspec.model.families.__path__[0]).glob("*.py")} - {"__init__"}
    assert families().keys() == files
    assert {"llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3", "olmo2"} <= set(architectures())


def test_code_that_knows_only_llamas_refuses_the_switches_of_others():
    config = replace(SMALL, logit_cap=5.0, post_norms=True)
    words = r" do not support post norms, logit cap yet$"
    with pytest.raises(ValueError, match="^walks" + words):
        never = cast(Any, lambda _: pytest.fail("nothing is computed"))
        next(walk(WalkableModel(None, None, XLA, never, never, never), [], config=config, unit=0.0))
    with pytest.raises(ValueError, match="^gradients" + words):
        params = load_reference_params(random_checkpoint(config, seed=0))
        loss_and_gradient(params, np.array([1, 2]), np.array([1.0, 1.0]), config=config)


@pytest.mark.parametrize("length", [1.0, 1.2])
def test_yarn_whose_magnitude_is_not_the_papers_is_no_gguf(length):
    config = replace(SMALL, scaling=YarnScaling(4.0, original_context=32, magnitude=length))
    assert families()["llama"].gguf.lacks(config) == "YaRN with other numbers than the paper's"
    usual = replace(SMALL, scaling=YarnScaling(4.0, original_context=32, magnitude=yarn_magnitude(4.0)))
    assert families()["llama"].gguf.lacks(usual) is None


# tests/model/families/test_family_goldens.py tests the switches of the other families.
@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_a_family_is_nearest_to_its_own_models(name):
    family = families()[name]
    switches: dict = dict(family.switches)
    if "experts" in family.keys:
        switches |= {"experts": 4, "experts_per_token": 2}
    if name == "mistral":  # without windows, a Mistral is a Llama
        switches |= {"windows": (5, 5)}
    config = replace(SMALL, **switches)
    assert nearest_family(config) == family
    assert family.differences(config) == []


@given(seed=seeds)
@example(seed=379)
def test_the_chosen_experts_may_keep_the_probabilities_of_the_router(seed):
    """Without renormalization, each expert's weight is the router's probability.

    The reference, JAX and the error bounds all use this weight.
    """

    def computed(config: Config) -> tuple[np.ndarray, np.ndarray]:
        """Return the exact outputs, and bounds on the errors of the computed outputs."""
        checkpoint = random_checkpoint(config, seed=seed)
        layer = load_params(checkpoint, dtype=np.dtype(np.float32), positions=1).layers[0]
        exact = load_reference_params(checkpoint).layers[0]
        x = np.random.default_rng(seed).normal(size=(3, config.dim)).astype(np.float32)
        together = XLA.moe_add(jnp.asarray(x[None]), layer, config=config)[0]
        single = XLA.moe_add(jnp.asarray(x[None, :1]), layer, config=config)[0]
        exact_sum = moe_add(exactly(x), exact, config=config, unit=0.0)
        # Both are float64 sums in different orders, so each is within the float32 bound times the ratio of roundoffs.
        twice = np.abs(exact_sum.value - feed_forward(x, exact, config=config))
        assert (twice <= 2 * 2.0**-29 * exact_sum.error).all()
        assert (np.abs(np.asarray(together) - exact_sum.value) <= exact_sum.error).all()
        assert (np.abs(np.asarray(single) - exact_sum.value[:1]) <= exact_sum.error[:1]).all()
        return exact_sum.value, exact_sum.error

    value, error = computed(PLAIN)
    renormalized, _ = computed(replace(PLAIN, renormalize_experts=True))
    clear = (error < NO_BOUND).all(axis=1)
    assert (np.abs(renormalized - value) > error)[clear].any(axis=1).all()


def test_without_renormalization_weights_are_probabilities():
    x, router = np.array([[1.0]]), np.log([[1.0], [6.0], [3.0]])
    _, probabilities = route(x, router, experts_per_token=2, renormalized=False)
    _, divided = route(x, router, experts_per_token=2)
    np.testing.assert_allclose(probabilities, [[0.6, 0.3]])
    np.testing.assert_allclose(divided, [[2 / 3, 1 / 3]])
