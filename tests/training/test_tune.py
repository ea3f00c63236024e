"""Fine-tuning: gradients equal the definitions', packing changes nothing, and a killed run resumes exactly."""

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from llamaspec.model.checkpoints.adapter import CONFIG, WEIGHTS, adapted, read_adapter
from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.checkpoints.smaller import with_layers
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import load_params
from llamaspec.reference import llama as reference
from llamaspec.reference.backward.llama import loss_and_gradient
from llamaspec.reference.config import Config
from llamaspec.reference.losses import distillation as definition
from llamaspec.reference.losses import dpo
from llamaspec.training import saving
from llamaspec.training.conversations import Preference
from llamaspec.training.data import Example
from llamaspec.training.objectives.distillation import distillation
from llamaspec.training.objectives.preference import Scored, preference, scored
from llamaspec.training.objectives.supervised import supervised
from llamaspec.training.ops import PACKED
from llamaspec.training.optimizers import SCHEDULES, schedule
from llamaspec.training.steps import compile_step
from llamaspec.training.trainable import Trainable, adapters, all_weights
from llamaspec.training.tune import check_examples
from llamaspec.verify.bounds.running_error import gamma
from tests.support import tiny_tokenizers
from tests.support.random_models import random_checkpoint
from tests.support.strategies import assert_within
from tests.training.test_training import Killed, llamaspec, refusal

FLOAT32 = np.dtype(np.float32)
TINY = Config(
    dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=40, context=32, eps=1e-5, theta=1e4, tied=True
)
LENGTHS = (7, 3, 9, 2)
FFN = ("gate", "up", "down")
# Forward and backward, a number goes through every matrix once, in a sum over its rows or columns.
ROUNDINGS = gamma(2 * TINY.layers * sum((16, 32, 16, 16, 16, 48, 24, 40)) * 2)


def documents(seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(0, TINY.vocab, n).tolist(), [0.0, *rng.choice([0.0, 1.0, 2.0], n - 1).tolist()])
        for n in LENGTHS
    ]


def gradient(trainable: Trainable, *, rows: int, length: int) -> tuple[float, dict[str, np.ndarray]]:
    """Sum the loss and the gradient over packed batches."""
    objective = supervised(trainable.params, config=TINY, ops=PACKED, dtype=FLOAT32, rows=rows, length=length)
    step = compile_step(objective.loss, optax.sgd(1.0), platform="cpu")
    totals: Any = (jax.tree.map(jnp.zeros_like, trainable.tensors), {"loss": jnp.zeros(()), "right": jnp.zeros(())})
    for batch in objective.work(documents()).batches:
        totals = step.add_gradient(*totals, trainable.tensors, trainable.frozen, *batch)
    return float(totals[1]["loss"]), {name: np.asarray(slope) for name, slope in totals[0].items()}


def exact(
    checkpoint: Checkpoint, examples: Sequence[Example] = (), *, depths: Sequence[int] | None = None
) -> tuple[float, dict[str, np.ndarray]]:
    """Sum the reference's loss and its gradient over separate documents, by the names of matrices and norms."""
    total, slopes = 0.0, {}
    for document in examples or documents():
        loss, gradient = loss_and_gradient(
            load_reference_params(checkpoint),
            np.array(document.ids),
            np.array(document.weights),
            config=checkpoint.config,
            depths=depths,
        )
        total += loss
        named = {"model.embed_tokens.weight": gradient.embedding + gradient.head, "model.norm.weight": gradient.norm}
        for i, layer in enumerate(gradient.layers):
            at = f"model.layers.{i}"
            named |= {f"{at}.self_attn.{part}_proj.weight": getattr(layer, part).weight for part in "qkvo"}
            named |= {f"{at}.mlp.{part}_proj.weight": getattr(layer.ffn, part).weight for part in FFN}
            norms = {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.ffn_norm}
            named |= {f"{at}.{norm}.weight": np.asarray(slope) for norm, slope in norms.items()}
        slopes = {name: slope + slopes.get(name, 0) for name, slope in named.items()}
    return total, slopes


def assert_same_slopes(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compare gradients along a random direction of each tensor."""
    assert actual.keys() == expected.keys()
    rng = np.random.default_rng(5)
    for name, slope in actual.items():
        along = slope.astype(np.float64) * (direction := rng.normal(size=slope.shape))
        assert slope.shape == expected[name].shape
        assert_within(np.sum(along), np.sum(expected[name] * direction), ROUNDINGS * np.sum(np.abs(along)))


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return random_checkpoint(TINY, seed=1, few=3)


def test_the_gradient_of_packed_documents_is_the_sum_of_their_own(base):
    """Packed rows of documents have the loss and the gradient that the reference sums over separate documents."""
    trainable = all_weights(base, context=16, dtype=FLOAT32)
    loss, slopes = gradient(trainable, rows=2, length=16)
    expected, exact_slopes = exact(base)
    assert abs(loss - expected) <= ROUNDINGS * expected
    assert_same_slopes(slopes, exact_slopes)
    # One document per row, in more batches: the same sums, but for their order.
    loss, again = gradient(trainable, rows=1, length=9)
    assert abs(loss - expected) <= ROUNDINGS * expected
    assert_same_slopes(again, exact_slopes)


def test_the_gradient_of_an_adapter_follows_from_that_of_the_merged_matrix(base):
    """An adapter's gradient follows from dW', the reference's gradient at the merged matrix W' = W + s B A.

    dA = s B^T dW' and dB = s dW' A^T.
    """
    trainable = adapters(
        base, rank=2, alpha=3.0, parts=("q", "v", "gate", "down"), seed=0, context=16, dtype=FLOAT32, base="base"
    )
    rng = np.random.default_rng(2)
    tensors = {
        name: jnp.asarray(rng.normal(0, 0.3, a.shape), jnp.float32) if name.endswith(".b") else a
        for name, a in trainable.tensors.items()
    }
    _, slopes = gradient(trainable._replace(tensors=tensors), rows=2, length=16)
    pairs = {name[:-2]: (np.asarray(a, np.float64), np.asarray(tensors[f"{name[:-2]}.b"], np.float64))
             for name, a in tensors.items() if name.endswith(".a")}  # fmt: skip

    def moved(name: str, tensor: Tensor) -> Tensor:
        w = tensor.read().astype(np.float64) + (1.5 * pairs[name][1] @ pairs[name][0] if name in pairs else 0.0)
        return Tensor(tensor.shape, np.dtype(np.float64), lambda: w)

    _, dense = exact(replace(base, tensors={name: moved(name, tensor) for name, tensor in base.tensors.items()}))
    expected = {}
    for name, (a, b) in pairs.items():
        expected[f"{name}.a"], expected[f"{name}.b"] = 1.5 * b.T @ dense[name], 1.5 * dense[name] @ a.T
    assert_same_slopes(slopes, expected)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_rises_from_0_to_its_rate_and_ends_as_it_says(kind):
    rates = [np.asarray(schedule(kind, lr=2.0, steps=20, warm_up=4)(step)).item() for step in range(21)]
    assert rates[:5] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert all(later <= rate for rate, later in itertools.pairwise(rates[4:]))
    assert rates[20] == pytest.approx(2.0 if kind == "constant" else 0.0, abs=1e-6)
    assert (rates[12] == 2.0) == (kind in ("constant", "wsd"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("base") / "model", layers=1)


def write_tiny(folder: Path, *, layers: int) -> Path:
    """Write a random model with a tokenizer of bytes and a chat template."""
    config = replace(TINY, layers=layers, vocab=259, context=64)
    files = {
        "tokenizer.json": tiny_tokenizers.chatml().encode(),
        "chat_template.jinja": (
            b"{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
            b"{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
        ),
    }
    write_huggingface(replace(random_checkpoint(config, seed=1), stops=frozenset([258])), folder, files=files)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Write forty short conversations, in which the answer repeats the question."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    talks = [[{"role": role, "content": f"say {i % 7}"} for role in ("user", "assistant")] for i in range(40)]
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    return path


@pytest.fixture(scope="module")
def command(model, data) -> tuple[str, ...]:
    return ("tune", str(model), "--data", str(data), "--steps=8", "--batch=4", "--lr=0.02", "--save-every=2")


@pytest.fixture(scope="module")
def tuned(command, tmp_path_factory) -> tuple[Path, str]:
    """Train adapters without interruption; returns the folder and the printed JSON lines."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    plot = f"--plot={out.parent / 'loss.svg'}"
    code, printed, log = llamaspec(*command, "--lora=2", "--json", "--eval-every=4", plot, "--out", str(out))
    assert code == 0, log
    return out, printed


def test_the_loss_falls_and_each_step_is_a_json_object(tuned):
    steps = [json.loads(line) for line in tuned[1].splitlines()]
    ends = [step for step in steps if "held_out" in step]
    assert [step["step"] for step in ends] == [4, 8]
    assert ends[1]["held_out"]["loss"] < ends[0]["held_out"]["loss"] and steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["seconds_left"] == 0 and 0 <= steps[0]["right"] <= 1


def test_the_curves_have_every_step_and_every_evaluation(tuned):
    svg = (tuned[0].parent / "loss.svg").read_text()
    assert svg.count("<circle") == 8 + 2 and svg.count("<polyline") == 2
    assert ">loss</text>" in svg and ">held-out loss</text>" in svg


def test_an_adapter_that_was_killed_and_resumed_is_the_same(tuned, command, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = saving.save_state

    def save(folder: Path, step: int, *rest: Any) -> None:
        if step == 6:
            raise Killed
        real(folder, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("llamaspec.training.loop.save_state", save)
        with pytest.raises(Killed):
            llamaspec(*command, "--lora=2", "--out", str(out))
    assert [path.name for path in saving.checkpoints(out)] == ["step-00000002.safetensors", "step-00000004.safetensors"]
    assert "was made with a different lora_on, data" in refusal(
        *command, "--lora=2", "--lora-on=q", "--resume", "--out", str(out), "--data", str(_other(tmp_path))
    )
    code, _, log = llamaspec(*command, "--lora=2", "--resume", "--out", str(out))
    assert code == 0, log
    for name in (CONFIG, WEIGHTS):
        assert (out / name).read_bytes() == (tuned[0] / name).read_bytes()
    assert f"{CONFIG}: exists already: this training is done" in refusal(
        *command, "--lora=2", "--resume", "--out", str(out)
    )


def _other(folder: Path) -> Path:
    (folder / "other.jsonl").write_text('{"text": "another text"}')
    return folder / "other.jsonl"


def test_the_written_adapter_holds_the_trained_tensors(tuned, model):
    checkpoint = open_checkpoint(model)
    adapter = read_adapter(tuned[0], checkpoint.config)
    trained = load_file(saving.checkpoints(tuned[0])[-1])
    assert (adapter.rank, adapter.alpha, len(adapter.pairs)) == (2, 4.0, 7)
    for name, pair in adapter.pairs.items():
        for letter, array in zip("ab", pair, strict=True):
            [stored] = [a for key, a in trained.items() if f"{name}.{letter}" in key and key.startswith("[0]")]
            assert np.array_equal(array, stored)
    changed = adapted(checkpoint, adapter).tensors
    assert any(not np.array_equal(changed[name].read(), checkpoint.tensors[name].read()) for name in adapter.pairs)
    assert json.loads((tuned[0] / CONFIG).read_text())["base_model_name_or_path"] == str(model)


def test_all_weights_are_written_as_a_model_with_its_tokenizer(command, model, tmp_path):
    out = tmp_path / "out"
    code, printed, log = llamaspec(*command, "--accumulate=2", "--schedule=wsd", "--out", str(out))
    assert (code, printed) == (0, ""), log
    written, before = open_checkpoint(out / "model"), open_checkpoint(model)
    assert (written.config, written.stops) == (before.config, before.stops)
    assert (out / "model" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert all(not np.array_equal(t.read(), before.tensors[name].read()) for name, t in written.tensors.items())
    again = shutil.copytree(out, tmp_path / "again")
    shutil.rmtree(again / "model")
    code, _, log = llamaspec(*command, "--accumulate=2", "--schedule=wsd", "--resume", "--out", str(again))
    assert code == 0, log
    assert all(
        np.array_equal(t.read(), written.tensors[n].read()) for n, t in open_checkpoint(again / "model").tensors.items()
    )


def test_shown_examples_have_their_counted_tokens_marked(command):
    code, printed, log = llamaspec(*command, "--show=2")
    assert (code, log) == (0, "")
    answer = "<|im_start|>usersay {0}<|im_end|><|im_start|>assistant«say {0}<|im_end|>»"
    expected = [f"example {i + 1}: {len('user') + len('assistant') + 14} tokens, 6 to learn" for i in range(2)]
    assert printed.splitlines() == [expected[0], answer.format(0), "", expected[1], answer.format(1), ""]


def test_the_notes_of_a_model_are_printed(model, data, tmp_path):
    """A tensor that no layer uses is left out, and one line says so, as in every command that opens a model."""
    folder = shutil.copytree(model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"v_head.weight": np.ones(4, np.float32)}, folder / "model.safetensors", {"format": "pt"})
    code, _, log = llamaspec("tune", str(folder), "--data", str(data), "--show=1")
    assert code == 0
    assert log.splitlines() == [*open_checkpoint(folder).notes] and "v_head.weight" in log


def test_examples_that_are_cut_are_counted():
    examples = [Example([1] * length, [0.0] + [1.0] * (length - 1)) for length in (3, 4, 5)]
    assert check_examples("chat.jsonl", examples, 5) is None
    assert check_examples("chat.jsonl", examples, 3) == (
        "chat.jsonl: 2 of 3 examples are longer than 3 tokens and are cut"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either --out DIR or --show N"),
        (("--out=OUT", "--show=1"), "give either --out DIR or --show N"),
        (("--out=OUT", "--alpha=2"), "--alpha needs --lora"),
        (("--out=OUT", "--lora=2", "--lora-on=q,router"), "'router' is no matrix that LoRA can change"),
        (("--out=OUT", "--plot=OUT/none/loss.svg"), "its folder does not exist"),
        (("--out=OUT", "--beta=1"), "--beta needs --method preference"),
        (("--out=OUT", "--keep-layers=0"), "--keep-layers needs --method distill"),
        (("--out=OUT", "--method=distill", "--keep-layers=0,x"), "'0,x' is not a list of layers such as 0,2,4"),
        (("--out=OUT", "--method=distill", "--keep-layers=3"), "has no layer 3: its layers are 0 to 0"),
        (("--out=OUT", "--method=distill", "--teacher=stories"), "a teacher needs the student's tokens"),
        (("--out=OUT", "--method=preference"), "line 1: expected prompt, chosen and rejected; got messages"),
        (("--out=OUT", "--lora=0"), "'--lora': 0 is not in the range"),
        (("--out=OUT", "--schedule=step"), "'step' is not one of"),
        (("--out=OUT", "--data=NONE"), "No such file"),
        (("--out=OUT", "--context=3"), "has no token to learn within 3 tokens: try a larger --context"),
        (("--out=OUT", "--resume"), "contains no checkpoint"),
    ],
)
def test_impossible_requests_are_one_line(command, tmp_path, arguments, words):
    places = [
        argument.replace("OUT", str(tmp_path / "out")).replace("NONE", str(tmp_path / "none")) for argument in arguments
    ]
    assert words in refusal(*command, *places)
    assert not (tmp_path / "out").exists()


def preferences() -> list[Preference]:
    """Draw two pairs of documents; the pairs have answers of different lengths."""
    return [Preference(*documents(seed)[start : start + 2]) for seed, start in ((1, 0), (2, 2))]


def answer_weights(example: Example) -> Example:
    return example._replace(weights=[float(weight > 0) for weight in example.weights])


def test_the_gradient_of_a_preference_is_the_definitions(base):
    """DPO's loss and gradient equal the reference's.

    `losses.dpo` gives the slope with respect to each answer's log p, and the reference's backward pass gives the rest.
    """
    pairs = [Preference(*map(answer_weights, pair)) for pair in preferences()]
    trainable = all_weights(base, context=16, dtype=FLOAT32)
    static: dict[str, Any] = {"config": TINY, "ops": PACKED, "dtype": FLOAT32, "rows": 2, "length": 16}
    objective = preference(trainable.params, beta=0.3, **static)
    frozen = [(-20.0, -11.0), (-4.0, -9.0)]
    work = objective.work([Scored(pair, values) for pair, values in zip(pairs, frozen, strict=True)])
    step = compile_step(objective.loss, optax.sgd(1.0), platform="cpu")
    totals: Any = (jax.tree.map(jnp.zeros_like, trainable.tensors), {name: jnp.zeros(()) for name in objective.sums})
    for batch in work.batches:
        totals = step.add_gradient(*totals, trainable.tensors, trainable.frozen, *batch)
    assert work.divisor == 2

    total, margins, slopes, scores = 0.0, [], {}, []
    for pair, values in zip(pairs, frozen, strict=True):
        own = [-exact(base, [example])[0] for example in pair]
        (loss,), *ds = dpo(*np.array([*own, *values])[:, None], beta=0.3)
        total += loss
        scores.append(own)
        margins.append(0.3 * ((own[0] - values[0]) - (own[1] - values[1])))
        for example, (slope,) in zip(pair, ds, strict=True):  # the loss of weights -ds c is ds s
            _, part = exact(base, [example._replace(weights=[-slope * weight for weight in example.weights])])
            slopes = {name: a + slopes.get(name, 0) for name, a in part.items()}
    size = sum(abs(score) for own in scores for score in own)
    expected = {
        "loss": total,
        "margin": sum(margins),
        "accuracy": sum(margin > 0 for margin in margins),
        "chosen": sum(own[0] for own in scores),
        "rejected": sum(own[1] for own in scores),
    }
    for name, value in expected.items():
        assert abs(float(totals[1][name]) - value) <= ROUNDINGS * size, name
    assert_same_slopes({name: np.asarray(slope) for name, slope in totals[0].items()}, slopes)
    # At the start the model is its own reference: every margin is 0, whatever the padding.
    same = scored(pairs, trainable, **static, platform="cpu")
    for score, own in zip(same, scores, strict=True):
        np.testing.assert_allclose(score.frozen, own, rtol=ROUNDINGS * 10)


def test_the_gradient_of_a_distillation_is_the_definitions(base):
    """The loss of distillation and its gradient equal `losses.distillation`, summed over separate documents.

    The student has one of the two layers of its teacher.
    """
    student = with_layers(base, [1])
    trainable = all_weights(student, context=16, dtype=FLOAT32)
    teacher = load_params(base, dtype=FLOAT32, positions=16)
    static: dict[str, Any] = {"ops": PACKED, "dtype": FLOAT32, "rows": 2, "length": 16, "temperature": 2.0}
    objective = distillation(trainable.params, config=student.config, teacher_config=TINY, **static)
    step = compile_step(objective.loss, optax.sgd(1.0), platform="cpu")
    totals: Any = (jax.tree.map(jnp.zeros_like, trainable.tensors), {name: jnp.zeros(()) for name in objective.sums})
    work = objective.work(documents())
    for batch in work.batches:
        totals = step.add_gradient(*totals, trainable.tensors, (trainable.frozen, teacher), *batch)

    def logits(checkpoint: Checkpoint, ids: np.ndarray) -> np.ndarray:
        params, config = load_reference_params(checkpoint), checkpoint.config
        return reference.forward(params, ids, reference.empty_cache(config), config=config)[0]

    def loss(checkpoint: Checkpoint) -> float:
        return sum(
            definition(logits(checkpoint, ids), logits(base, ids), np.array(e.weights[1:]), temperature=2.0)
            for e in documents()
            for ids in [np.array(e.ids)[:-1]]
        )

    assert work.divisor == sum(sum(e.weights[1:]) for e in documents())
    assert abs(float(totals[1]["loss"]) - loss(student)) <= ROUNDINGS * work.divisor * np.log(TINY.vocab) * 4
    rng, size = np.random.default_rng(3), 2.0**-14
    for name, slope in totals[0].items():
        direction = rng.normal(size=slope.shape) * np.sqrt(np.mean(student.tensors[name].read() ** 2))
        further, back = (
            loss(replace(student, tensors={**student.tensors, name: moved_by(student, name, side * size * direction)}))
            for side in (1, -1)
        )
        along = np.asarray(slope, np.float64) * direction
        assert_within(np.sum(along), (further - back) / (2 * size), ROUNDINGS * np.sum(np.abs(along)))


def moved_by(checkpoint: Checkpoint, name: str, change: np.ndarray) -> Tensor:
    values = checkpoint.tensors[name].read().astype(np.float64) + change
    return Tensor(values.shape, values.dtype, lambda: values)


def test_the_layers_of_a_student_are_the_teachers(base):
    config = replace(TINY, windows=(3, None))
    student = with_layers(replace(base, config=config), [1])
    assert (student.config.layers, student.config.windows) == (1, (None,))
    for name, tensor in student.tensors.items():
        assert tensor is base.tensors[name.replace("layers.0", "layers.1")]
    with pytest.raises(CheckpointError, match="has no layer 2: its layers are 0 to 1"):
        with_layers(base, [0, 2])


def test_a_preference_is_learned_by_an_adapter(model, tmp_path):
    """The margin grows from 0, and in every held-out pair the chosen answer ends up ahead of the rejected one."""
    lines = [{"prompt": f"{i} ", "chosen": "yes", "rejected": "no"} for i in range(40)]
    (tmp_path / "pairs").write_text("\n".join(map(json.dumps, lines)))
    command = ("tune", str(model), "--data", str(tmp_path / "pairs"), "--method=preference", "--lora=2", "--json")
    code, printed, log = llamaspec(*command, "--steps=8", "--batch=4", "--lr=0.02", "--out", str(tmp_path / "out"))
    assert code == 0, log
    steps = [json.loads(line) for line in printed.splitlines()]
    assert abs(steps[0]["margin"]) < 1e-5 and steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert steps[-1]["held_out"]["measures"]["margin"] > 0 and steps[-1]["held_out"]["measures"]["accuracy"] == 1
    assert (tmp_path / "out" / WEIGHTS).exists()


def test_a_student_is_written_with_its_own_layers(model, data, tmp_path):
    command = ("tune", str(model), "--data", str(data), "--method=distill", "--json", "--steps=4", "--batch=4")
    code, printed, log = llamaspec(*command, "--keep-layers=0,0", "--lr=0.01", "--out", str(tmp_path / "out"))
    assert code == 0, log
    losses = [json.loads(line)["loss"] for line in printed.splitlines()]
    assert losses[-1] < losses[0]
    assert open_checkpoint(tmp_path / "out" / "model").config.layers == 2
