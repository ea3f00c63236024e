"""A model on several devices: every op is within the error bounds of one device, and sharding mistakes are detected."""

from dataclasses import replace

import numpy as np
import pytest

from llamaspec.model.parallel.reading import share_of
from llamaspec.model.parallel.share import possible, share
from llamaspec.model.tensors import EMBEDDING, HEAD, row_order, stacks
from tests.model.parallel.device_mutants import MUTANTS
from tests.model.parallel.on_devices import (
    FAMILIES,
    GRADIENTS,
    MORE,
    SERVED,
    SHARED_BY,
    SPREAD,
    TRAINED,
    TUNED,
    WALKS,
    results,
)
from tests.support.random_models import CONFIGS, SMALL, random_checkpoint

# One process computes all cases of a kind, so one test checks them all; two workers would compute them twice.


@pytest.mark.slow  # 14 s
def test_every_op_is_within_the_bound_of_one_device():
    for case, walked in zip(WALKS, results("walk"), strict=True):
        assert (walked["wrong"], walked["ratio"] < 1) == (None, True), case
        assert walked["steps"] > 10


@pytest.mark.slow  # 63 s
def test_every_op_of_more_models_is_within_the_bound():
    for case, walked in zip(MORE, results("more"), strict=True):
        assert (walked["wrong"], walked["ratio"] < 1) == (None, True), case


@pytest.mark.slow  # 4 s
def test_a_family_without_bounds_has_the_logits_of_its_definition():
    for case, result in zip(FAMILIES, results("families"), strict=True):
        assert result["error"] < 1e-5, case


@pytest.mark.slow  # 16 s
def test_a_mistake_is_found():
    for (name, mutant), walked in zip(MUTANTS.items(), results(module="device_mutants"), strict=True):
        assert walked["wrong"] and walked["ratio"] > mutant.least, name


@pytest.mark.slow  # 31 s
def test_a_story_does_not_depend_on_the_number_of_devices():
    single, *shared = results("stories")
    for (way, devices), story in zip(SHARED_BY[1:], shared, strict=True):
        assert (story["drawn"], story["greedy"]) == (single["drawn"], single["greedy"])
        assert np.allclose(story["logits"], single["logits"], rtol=0, atol=1e-4)
        dealt = ", the cache sharded by positions" * (way == "context")
        assert story["run"] == f"{single['run']}, {devices} devices{dealt}"
    assert len(single["drawn"]) > 40 and single["drawn"] != single["greedy"]


@pytest.mark.slow  # 8 s
def test_the_engine_on_several_devices_answers_as_on_one():
    """On several devices, the engine answers as on one device, whether requests come together or one by one."""
    single, *several = results("served")
    for devices, served in zip(SERVED[1:], several, strict=True):
        assert served["same"] and served["paged"] and served["texts"] == single["texts"], devices
    assert single["same"] and single["paged"] and len(set(map(tuple, single["texts"]))) == 5


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["1 to 1, biases, scaled, tied", "experts"])
def test_shares_are_the_rows_and_columns_of_the_whole(name, devices):
    checkpoint = random_checkpoint(replace(CONFIGS[name], kv_heads=4), seed=1)
    config, full = checkpoint.config, {n: t.read() for n, t in checkpoint.tensors.items()}
    shares = [share_of(checkpoint, device=i, devices=devices) for i in range(devices)]
    orders = row_order(config, devices)
    for stack in stacks(share(config, devices)):
        for weights in (stack.weights, stack.biases):
            names = [weight.name for weight in weights]
            if not names or names == [HEAD]:
                continue
            parts = [np.concatenate([part.tensors[n].read() for n in names]) for part in shares]
            joined = np.concatenate([full[n] for n in names])
            if stack.field in orders:
                assert np.array_equal(np.concatenate(parts), joined[orders[stack.field]])
            elif "ffn" in weights[0].axes or "heads" in weights[0].axes:
                assert np.array_equal(np.concatenate(parts, axis=1), joined)
            else:
                assert all(np.array_equal(part, joined) for part in parts)
    head = np.concatenate([part.tensors[HEAD].read() for part in shares])
    tied = full[EMBEDDING if config.tied else HEAD]
    assert np.array_equal(head[: config.vocab], tied) and not head[config.vocab :].any()


@pytest.mark.parametrize(
    ("sizes", "devices", "words"),
    [
        ({}, 3, "4 heads.* 3 .*1, 2 or 4 devices"),
        ({"ffn": 42}, 4, "42 columns of the feed-forward layers.* 4 "),
        (
            {"heads": 12, "kv_heads": 6},
            4,
            "6 kv heads.* 4 devices.* 1 or 2 devices",
        ),
        (
            {"heads": 3, "kv_heads": 1},
            2,
            "3 heads.* 2 .* one device",
        ),
        ({"experts": 2, "experts_per_token": 1, "shared_ffn": 6}, 4, "6 columns.* expert"),
        ({}, 0, "expected at least 1 device, got 0"),
    ],
)
def test_a_wrong_number_of_devices_is_refused_with_possible_numbers(sizes, devices, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        share(replace(SMALL, **sizes), devices)


def test_numbers_that_are_named_can_share_the_model():
    assert possible(replace(SMALL, heads=16, kv_heads=2, ffn=64)) == [1, 2, 4, 8, 16]


@pytest.mark.slow  # 24 s
def test_a_gradient_is_that_of_one_device():
    for (name, right), result in zip(GRADIENTS.items(), results("gradients"), strict=True):
        assert result["error"] < 1e-5 if right else result["error"] > 0.5, name


@pytest.mark.slow  # 18 s
def test_a_training_that_was_killed_ends_with_the_same_bits():
    for kind, trained in zip(TRAINED, results("trained"), strict=True):
        assert (trained["same"], trained["steps"], trained["opens"]) == (True, 4, True), kind
        assert trained["losses"] < 1e-4 and 0 < trained["weights"] < 1e-3


@pytest.mark.slow  # 20 s
def test_a_fine_tuning_on_two_devices_takes_the_step_of_one():
    """A step along the gradient changes the weights as on one device, up to the proven bound of rounded sums."""
    for method, result in zip(TUNED, results("tuned"), strict=True):
        assert result["reports"] <= 1 and result["weights"] <= 1 and result["change"] > 0.1, (method, result)


@pytest.mark.slow  # 15 s
def test_a_cache_on_several_devices_gives_the_logits_of_one():
    for (name, right), result in zip(SPREAD.items(), results("caches"), strict=True):
        most = 2e-2 if name == "bfloat16" else 1e-5
        assert result["error"] < most if right else result["error"] > 0.1, name


@pytest.mark.slow  # 8 s
def test_every_device_draws_the_token_that_one_draws():
    right, own_key = results("drawn")
    assert right["same"] and right["drawn"] == right["alone"] and len(set(right["alone"])) > 1
    assert not own_key["same"]
