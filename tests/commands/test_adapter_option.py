"""The option `--adapter`: every command that runs a model applies the same adapter, and `convert` merges it."""

import json

import numpy as np
import pytest

from llamaspec.model.checkpoints.adapter import write_adapter
from llamaspec.model.checkpoints.open import open_checkpoint
from tests.support.random_models import SMALL, random_adapter

RUN = ("--backend", "reference", "--context", "16")
IDS = ("--tokens", "1,373,433,378")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    """Return a folder as `tune` makes it: the adapter is in a subfolder."""
    folder = tmp_path_factory.mktemp("tuned") / "adapter"
    folder.mkdir()
    config = open_checkpoint("stories").config
    write_adapter(random_adapter(config, parts=("q", "v", "up")), folder, config, base="stories")
    return str(folder.parent)


@pytest.fixture
def logits(run, tmp_path):
    def compute(*arguments: str) -> np.ndarray:
        out = str(tmp_path / "logits.npy")
        code, _, err = run("logits", *IDS, *RUN, "--out", out, *arguments)
        assert code == 0, err
        return np.load(out)

    return compute


@pytest.mark.parametrize("quantize", [(), ("--quantize", "q8")])
def test_a_merged_model_has_the_logits_of_the_model_with_the_adapter(run, logits, adapter, tmp_path, quantize):
    merged = str(tmp_path / "merged")
    code, _, err = run("convert", "stories", merged, "--to", "safetensors", "--adapter", adapter, *quantize)
    assert (code, "for" in err) == (0, False), err
    applied = logits("--adapter", adapter, *quantize)
    # The base is stored in bfloat16, and so is the merged model. With --quantize, it is quantized after merging.
    assert np.abs(logits("--model", merged) - applied).max() < 0.05 * np.abs(applied).max()
    assert np.abs(logits(*quantize) - applied).max() > 0.1 * np.abs(applied).max()


def test_merging_into_codes_writes_floats_and_says_so(run, logits, adapter, tmp_path):
    codes, merged = str(tmp_path / "codes"), str(tmp_path / "merged")
    assert run("convert", "stories", codes, "--to", "safetensors", "--quantize", "q4")[0] == 0
    code, _, err = run("convert", codes, merged, "--to", "safetensors", "--adapter", adapter)
    assert code == 0 and "30 quantized matrices become float32" in err, err
    assert f"{adapter} was made for stories" in err  # the folder of the codes has another name
    applied = logits("--model", codes, "--adapter", adapter)
    np.testing.assert_allclose(logits("--model", merged), applied, rtol=0, atol=1e-4 * np.abs(applied).max())


def test_commands_run_with_the_adapter(run, adapter, tmp_path):
    greedy = ("--temperature", "0", "--max-new-tokens", "12", *RUN)
    texts = [run("generate", "Once", *greedy, *arguments)[1] for arguments in ((), ("--adapter", adapter))]
    assert texts[0] != texts[1]
    (text := tmp_path / "text").write_text("Once upon a time")
    code, out, err = run(
        "eval", "stories", "--adapter", adapter, "--against", "stories", "--text", str(text), *RUN, "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["adapter"] == adapter and report["divergence"]["mean"] > 0.1


@pytest.mark.parametrize(
    "command", [("generate", "Once"), ("logits", *IDS, "--out", "x.npy"), ("verify", "--model", "stories")]
)
def test_an_adapter_for_another_model_is_refused_by_the_tensors_name(run, tmp_path, command):
    write_adapter(random_adapter(SMALL), tmp_path, SMALL, base="stories")
    code, out, err = run(*command, "--adapter", str(tmp_path))
    assert (code, out) == (2 if "verify" in command else 1, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "layers.0.mlp.down_proj.lora_A.weight' has shape [3, 40], expected [3, " in line


def test_an_adapter_needs_a_model_to_verify(run, adapter):
    code, _, err = run("verify", "softmax", "--adapter", adapter)
    assert code == 2 and "--adapter needs --model" in err
