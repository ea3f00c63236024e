"""`doctor MODEL` reports every fault with a measurement and a fix, and reports no fault of a good checkpoint."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import BUILT_IN, open_checkpoint
from llamaspec.model.insight.checkup import Checkup, check_up
from llamaspec.model.insight.evaluation import EvalText
from llamaspec.model.insight.text_faults import open_tokenizer, text_faults
from llamaspec.model.insight.trials import TEXT, try_changes
from llamaspec.model.insight.weight_faults import Fault
from llamaspec.model.tokenizers.of_model import tokenizer_of
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.rope import LinearScaling, halves_to_interleaved, interleaved_to_halves
from tests.model.checkpoints.test_quantized_checkpoints import LAYOUTS, write_layout
from tests.support import families, gguf_files, tiny_tokenizers
from tests.support.families import is_matrix
from tests.support.gguf_files import CODES, Tensor
from tests.support.processes import run_llamaspec
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.refusals import mentions

STORIES = BUILT_IN["stories"]
Tensors = dict[str, np.ndarray]


def damaged(folder: Path, *, weights: Callable[[Tensors], Tensors] = lambda tensors: tensors, **config: object) -> Path:
    """Write the built-in model with changed weights and with changed keys in its config.json."""
    shutil.copytree(STORIES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    values = json.loads((folder / "config.json").read_text())
    if "rope_theta" in config or "rope_scaling" in config:
        del values["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(values | config))
    tensors = {name: tensor.read() for name, tensor in open_checkpoint(STORIES).tensors.items()}
    (folder / "model.safetensors").unlink()
    families.write_safetensors(folder / "model.safetensors", weights(tensors))
    return folder


def story(folder: Path, *, characters: int = 200) -> Path:
    """Write the first characters of doctor's default text to a file. doctor evaluates a short text faster."""
    path = folder / "story.txt"
    path.write_text(TEXT[:characters])
    return path


def silent(folder: Path) -> Path:
    """Remove the tokenizer, so that doctor skips its trials on a text, which take seconds."""
    (folder / "tokenizer.model").unlink()
    return folder


def of_weights(model: Path) -> list[Fault]:
    """List the faults of a model without a tokenizer, except the fault that it has no tokenizer."""
    faults = check_up(model).faults
    assert [fault.fault for fault in faults].count("tokenizer") == 1
    return [fault for fault in faults if fault.fault != "tokenizer"]


def reordered(order: Callable[..., np.ndarray], tensors: Tensors) -> Tensors:
    heads = {"q_proj": 4, "k_proj": 2}
    kinds = {name: next((kind for kind in heads if kind in name), None) for name in tensors}
    return {name: order(a, heads=heads[kind]) if (kind := kinds[name]) else a for name, a in tensors.items()}


def norms_less(by: float, tensors: Tensors) -> Tensors:
    return {name: (a - np.asarray(by, a.dtype)) if "norm" in name else a for name, a in tensors.items()}


def other_head(tensors: Tensors) -> Tensors:
    embedding = tensors["model.embed_tokens.weight"]
    noise = np.random.default_rng(0).normal(0, 0.05, embedding.shape)
    return {**tensors, "lm_head.weight": noise.astype(embedding.dtype)}


def same_head(tensors: Tensors) -> Tensors:
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}


# The change to the weights or config.json, the kind of fault, and words of the measurement and the fix.
DAMAGES = {
    "the other pairing": ({"weights": partial(reordered, halves_to_interleaved)}, "rope pairing", "interleaved_to"),
    "reordered twice": ({"weights": partial(reordered, interleaved_to_halves)}, "rope pairing", "halves_to_inter"),
    "theta": ({"rope_theta": 500_000.0}, "theta", '"rope_theta": 10000 in config.json'),
    "scaling": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling", '"rope_scaling": null'),
    "eps": ({"rms_norm_eps": 0.1}, "eps", '"rms_norm_eps": 1e-0'),
    "norms less 1": ({"weights": partial(norms_less, 1.0)}, "norms", "add 1 to the weights"),
    "norms and 1": ({"weights": partial(norms_less, -1.0)}, "norms", "subtract 1"),
    "a head of noise": ({"weights": other_head, "tie_word_embeddings": False}, "head", '_embeddings": true'),
}


@pytest.mark.sampled(1)  # 8 to 15 s each
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damage_that_a_text_shows_is_named_and_nothing_else(tmp_path, damage):
    changes, kind, words = DAMAGES[damage]
    text = story(tmp_path, characters=280 if damage == "theta" else 200)  # a wrong theta shows only at long distances
    checkup = check_up(damaged(tmp_path / "model", **changes), text=text)
    assert [fault.fault for fault in checkup.faults] == [kind], checkup
    [fault] = checkup.faults
    assert words in fault.mend
    assert "perplexity" in fault.measured
    assert checkup.trials and checkup.trials.judged


def test_a_change_is_named_by_the_keys_of_its_own_file():
    """For a model in Mistral's layout, doctor suggests keys that Mistral's params.json has."""
    config = replace(SMALL, tied=False, scaling=LinearScaling(4.0))
    checkpoint = replace(random_checkpoint(config, seed=0), format="mistral")
    tried = try_changes(checkpoint, EvalText([1, 2, 3], 3)).tried
    mends = [trial.change.mend for trial in tried if trial.change and trial.change.mend.startswith('"')]
    assert all("in params.json" in mend for mend in mends)
    assert {mend.split('"')[1] for mend in mends} == {"tied_embeddings", "yarn", "norm_eps", "rope_theta"}


@pytest.mark.slow  # 13 s
def test_a_tied_flag_against_the_weights(tmp_path):
    contradicted = damaged(tmp_path / "noise", weights=other_head)
    checkup = check_up(contradicted, text=story(tmp_path))
    assert [fault.fault for fault in checkup.faults] == ["head", "head"]
    assert "lm_head.weight differs" in checkup.faults[0].measured
    assert "predicts better" in checkup.faults[1].what  # so the flag is right, and the head is wrong


def test_a_head_that_is_missing_or_there_twice(tmp_path):
    [missing] = of_weights(silent(damaged(tmp_path / "missing", tie_word_embeddings=False)))
    assert mentions(missing.measured, "lacks lm_head.weight") and mentions(missing.mend, "tie_word_embeddings true")
    [fault] = of_weights(silent(damaged(tmp_path / "same", tie_word_embeddings=False, weights=same_head)))
    assert "equals that of the embedding" in fault.measured


def changed(name: str, at: tuple[int, ...], value: float, dtype: type, tensors: Tensors) -> Tensors:
    values = tensors[name].astype(dtype)
    values[at] = value
    return {**tensors, name: values}


DOWN = "model.layers.3.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("value", "dtype", "kind", "words"),
    [
        (np.nan, ml_dtypes.bfloat16, "nan", "1 NaN"),
        (-np.inf, np.float16, "overflow", "1 infinities"),
        (65504.0, np.float16, "overflow", "1 of these"),
        (-1e20, np.float32, "overflow", "1 of these"),
    ],
)
def test_a_number_that_is_none(tmp_path, value, dtype, kind, words):
    checkup = check_up(damaged(tmp_path, weights=partial(changed, DOWN, (5, 7), value, dtype)))
    assert [fault.fault for fault in checkup.faults] == [kind]
    assert f"{words}, in {DOWN} (1)" in checkup.faults[0].measured
    assert (checkup.trials, "not finite" in checkup.note) == (None, True)


def test_scales_of_zero(tmp_path):
    write_huggingface(quantized(open_checkpoint(STORIES), "q8_row"), tmp_path / "q8")
    assert not of_weights(silent(tmp_path / "q8"))
    header = header_of(tmp_path / "q8" / "model.safetensors")
    entry = header["model.layers.0.mlp.up_proj.weight_scale"]
    raw = bytearray((tmp_path / "q8" / "model.safetensors").read_bytes())
    begin, _ = (8 + int.from_bytes(raw[:8], "little") + offset for offset in entry["data_offsets"])
    raw[begin : begin + 4] = bytes(4)
    (tmp_path / "q8" / "model.safetensors").write_bytes(raw)
    [fault] = of_weights(tmp_path / "q8")
    assert fault.fault == "scales"
    assert re.search(r"1 groups .*model\.layers\.0\.mlp\.up_proj\.weight \(1\)", fault.measured)


def test_a_code_that_is_no_number(tmp_path):
    """doctor reports a NaN as a fault, both as a code of e4m3 weights and as a scale of MXFP4 weights."""
    for scheme, part, nan in (("fp8", "weight", 0xFF), ("mxfp4", "weight_scale", 0xFF)):
        folder = tmp_path / scheme
        write_huggingface(quantized(open_checkpoint(STORIES), scheme), folder)
        raw = bytearray((silent(folder) / "model.safetensors").read_bytes())
        entry = header_of(folder / "model.safetensors")[f"{DOWN.removesuffix('.weight')}.{part}"]
        raw[8 + int.from_bytes(raw[:8], "little") + entry["data_offsets"][0]] = nan
        (folder / "model.safetensors").write_bytes(raw)
        [fault] = of_weights(folder)
        assert (fault.fault, f"1 NaN, in {DOWN} (1)") == ("nan", fault.measured)


def header_of(path: Path) -> dict:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def test_a_model_without_a_tokenizer(tmp_path):
    """doctor reports a missing tokenizer and exits with 1, because generate and serve refuse such a model."""
    families.write_checkpoint(tmp_path, families.FAMILIES["qwen3"])
    done = run_llamaspec("doctor", str(tmp_path))
    assert done.code == 1 and "the model has no tokenizer" in done.out
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "the tokenizer cannot be read" in run_llamaspec("doctor", str(tmp_path)).out


def test_a_tokenizer_of_another_vocabulary(tmp_path):
    folder = damaged(tmp_path)
    (folder / "tokenizer.json").write_text(tiny_tokenizers.chatml())
    (folder / "tokenizer_config.json").unlink()
    checkup = check_up(folder)
    assert [fault.fault for fault in checkup.faults] == ["tokenizer"]
    assert mentions(checkup.faults[0].measured, f"{folder} tokenizer 259 vocabulary 1024")
    assert "no tokenizer" in checkup.note


def faults_of_text(folder: Path) -> list[Fault]:
    """Return the faults that doctor finds in the tokenizer and the template.

    This skips doctor's trials on a text, which take seconds.
    """
    checkpoint = open_checkpoint(folder)
    return text_faults(checkpoint, tokenizer_of(checkpoint, None), folder)


def test_a_tokenizer_that_cannot_be_read_is_not_called_another_models(tmp_path):
    checkpoint = open_checkpoint(damaged(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("[]")
    tokenizer, (fault,) = open_tokenizer(checkpoint, tmp_path / "tokenizer.json")
    assert (tokenizer, fault.what) == (None, "the tokenizer cannot be read")
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml())
    tokenizer, (fault,) = open_tokenizer(checkpoint, tmp_path / "tokenizer.json")
    assert (tokenizer, fault.fault) == (None, "tokenizer")


def test_ids_that_are_not_the_tokenizers(tmp_path):
    folder = damaged(tmp_path)
    assert faults_of_text(folder) == []
    (folder / "generation_config.json").write_text('{"bos_token_id": 3, "eos_token_id": 4}')
    begins, stops = faults_of_text(folder)
    assert (begins.fault, "3 in the model" in begins.measured) == ("tokenizer", True)
    assert (stops.fault, stops.mend) == ("stops", '"eos_token_id": [2, 4] in generation_config.json')


def test_a_template_without_stops(tmp_path):
    folder = damaged(tmp_path)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("{{- eos_token -}}", "{{- '\n' -}}"))
    [fault] = faults_of_text(folder)
    assert (fault.fault, "writes no token after an answer" in fault.what) == ("stops", True)
    (folder / "chat_template.jinja").write_text("{% nonsense %}")
    [fault] = faults_of_text(folder)
    assert fault.fault == "template"


def test_a_llama_3_1_without_its_rescaling(tmp_path):
    config = families.FAMILIES["llama-3"] | {"vocab_size": 128_256, "hidden_size": 12, "intermediate_size": 8}
    long = config | {"max_position_embeddings": 131_072, "num_hidden_layers": 1}
    families.write_checkpoint(tmp_path, long)
    [fault] = of_weights(tmp_path)
    assert (fault.fault, "context 131072" in fault.measured) == ("rope scaling", True)
    families.write_checkpoint(tmp_path, long | {"max_position_embeddings": 8192})
    assert not of_weights(tmp_path)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_no_fault_is_found_in_the_good_goldens(tmp_path, name):
    families.write_checkpoint(tmp_path, families.FAMILIES[name], dtype="float16")
    assert of_weights(tmp_path) == []


def in_type(type: str, spoil: Callable[[np.ndarray], None], path: Path) -> Path:
    """Write a GGUF model with all matrices in `type` and row 3 set to 0; `spoil` changes the bytes of blk.0.ffn_up."""
    config = {**families.FAMILIES["llama-2"], "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    tensors = families.random_tensors(config)
    for name, tensor in tensors.items():
        if is_matrix(name):
            tensor[3] = 0
    file = gguf_files.file_of(config, tensors)
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 2:
            packed = ggml.encode(np.frombuffer(tensor.data, "<f4").reshape(tensor.shape), type)
            if name == "blk.0.ffn_up.weight":
                spoil(packed)
            file.tensors[name] = Tensor(tensor.shape, packed.tobytes(), CODES[type])
    return file.write(path)


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "TQ2_0"])
def test_rows_of_zeros_are_no_fault(tmp_path, type):
    assert of_weights(in_type(type, lambda packed: None, tmp_path / "x.gguf")) == []


def test_a_scale_of_a_superblock_may_be_0_but_not_all(tmp_path):
    """One group's scale of 0 in a superblock is no fault, because ggml may round a scale to 0.

    A superblock with d = 0 is a fault, because all its scales are 0.
    """

    def one_scale(packed: np.ndarray) -> None:
        packed[5, 192] = 0

    def all_scales(packed: np.ndarray) -> None:
        packed[5, 208:210] = 0  # d

    assert of_weights(in_type("Q6_K", one_scale, tmp_path / "good.gguf")) == []
    [fault] = of_weights(in_type("Q6_K", all_scales, tmp_path / "bad.gguf"))
    assert re.search(r"1 groups .*model\.layers\.0\.mlp\.up_proj\.weight \(1\)", fault.measured)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_no_fault_is_found_in_good_quantized_layouts(tmp_path, layout):
    write_layout(tmp_path, layout)
    assert of_weights(tmp_path) == []


def test_norms_of_a_model_without_a_tokenizer(tmp_path):
    config = families.FAMILIES["qwen3"]
    families.write_checkpoint(tmp_path, config)
    families.write_safetensors(tmp_path / "model.safetensors", norms_less(1.5, families.random_tensors(config)))
    [fault] = of_weights(tmp_path)
    assert (fault.fault, "0 or less in 9 of 9 norms" in fault.measured) == ("norms", True)


@pytest.mark.slow  # 4 s
def test_a_text_in_another_language_names_nothing(tmp_path):
    path = tmp_path / "text"
    path.write_text("In der Mitte der Stadt stand ein altes Haus.")
    checkup: Checkup = check_up("stories", text=path)
    assert (checkup.faults, "not conclusive" in checkup.note) == ([], True)


def test_the_command(run, tmp_path):
    text = str(story(tmp_path, characters=140))
    status, out, err = run("doctor", "stories", "--text", text)
    assert (status, err) == (0, "")
    assert out.startswith("stories: no likely faults\n")
    assert '"rope_theta": 500000 in config.json' in out
    bad = silent(damaged(tmp_path / "bad", weights=partial(changed, DOWN, (0, 0), np.nan, np.float16)))
    status, out, _ = run("doctor", str(bad), "--json")
    report = json.loads(out)
    assert (status, [fault["fault"] for fault in report["faults"]], report["loss"]) == (1, ["nan", "tokenizer"], None)
    assert run("doctor", "--text", text)[0] == 2
    status, out, err = run("doctor", str(tmp_path / "none"))
    assert (status, out, "No such file" in err) == (1, "", True)
