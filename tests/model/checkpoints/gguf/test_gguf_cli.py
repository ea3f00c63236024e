"""GGUF on the command line.

A model converts to one file that includes its tokenizer, and generates the same text from this file.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from llamaspec.model.checkpoints.gguf.write import write_gguf
from tests.commands.test_cli import assert_refused
from tests.model.tokenizers.test_gguf_tokenizers import File, sentencepiece
from tests.support.random_models import SMALL, random_checkpoint
from tests.support.refusals import mentions

GREEDY = ["--temperature", "0", "--max-new-tokens", "12", "--backend", "reference"]


def test_a_model_in_one_file_tells_the_same_story(run, tmp_path):
    path = str(tmp_path / "stories.gguf")
    code, out, err = run("convert", "stories", path, "--to", "gguf")
    assert (code, out) == (0, "") and "tensors" in err and "no tokenizer" not in err
    code, text, _ = run("generate", "Once upon a time", "--model", path, *GREEDY)
    assert code == 0
    assert text == run("generate", "Once upon a time", "--model", "stories", *GREEDY)[1]
    assert run("tokens", "Once upon a time", "--model", path) == run("tokens", "Once upon a time", "--model", "stories")


def test_quantized_files(run, tmp_path):
    path, again, int8 = (str(tmp_path / name) for name in ("q8_0.gguf", "again", "int8.bin"))
    assert run("convert", "stories", path, "--to", "gguf", "--quantize", "q8_0")[0] == 0
    description = json.loads(run("inspect", path, "--json")[1])
    assert description["format"] == "gguf-v3"
    kinds = {tensor["name"]: tensor["dtype"] for tensor in description["tensors"]}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "int8"
    assert run("generate", "Once", "--model", path, *GREEDY)[0] == 0
    code, _, err = run("convert", path, again, "--to", "safetensors")
    assert code == 0 and err.count("\n") == 1 and mentions(err, f"wrote {len(kinds)} tensors {again}")
    assert run("tokens", "Once", "--model", again) == run("tokens", "Once", "--model", path)
    assert run("convert", "stories", int8, "--to", "llama2c", "--quantize", "q8_0")[0] == 0
    description = json.loads(run("inspect", int8, "--json")[1])
    assert description["format"] == "llama2c-v2"


@pytest.mark.slow  # 5 s each
@pytest.mark.parametrize("type", ["q8_0", "float16"])
def test_both_backends_compute_the_same(run, tmp_path, type):
    """Both backends compute the same logits from a GGUF file, up to a relative error of 1e-5."""
    checkpoint = random_checkpoint(replace(SMALL, dim=64, kv_heads=2, head_dim=16, ffn=96), seed=0)
    write_gguf(checkpoint, tmp_path / "x.gguf", to=type)
    rows = []
    for backend in ("jax", "reference"):
        out = tmp_path / f"{backend}.npy"
        arguments = ["--tokens", "1,2,3,4,5", "--out", str(out), "--backend", backend]
        assert run("logits", "--model", str(tmp_path / "x.gguf"), *arguments)[0] == 0
        rows.append(np.load(out).astype(np.float64))
    assert np.linalg.norm(rows[0] - rows[1]) < 1e-5 * np.linalg.norm(rows[1])


def test_a_story_of_stories260k(run, data, tmp_path):
    """stories260K converts to GGUF and generates its golden story.

    Its rows of 172 weights do not fill whole blocks, and its tokenizer's file name is unusual.
    """
    folder, path = data / "stories260K", str(tmp_path / "x.gguf")
    arguments = [str(folder / "stories260K.bin"), path, "--to", "gguf", "--tokenizer", str(folder / "tok512.model")]
    code, _, err = run("convert", *arguments, "--quantize", "q8_0")
    assert code == 0 and mentions(err, "5 matrices are stored in F32 ffn_down.weight q8_0")
    (tmp_path / "x.gguf").unlink()
    assert run("convert", *arguments)[0] == 0
    expected = (folder / "greedy_200_steps.txt").read_text()
    assert (
        run("generate", "", "--model", path, "--temperature", "0", "--max-new-tokens", "200", "--backend", "reference")[
            1
        ]
        == expected + "\n"
    )
    code, _, err = run("convert", *arguments[:1], str(tmp_path / "y.gguf"), "--to", "gguf")
    assert code == 0 and "no tokenizer was found" in err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            ["--to", "gguf", "--quantize", "q4"],
            "--quantize q4 is not supported for gguf (only q8_0, q4_0, mxfp4, q2_k,",
        ),
        (["--to", "llama2c", "--quantize", "q8"], "--quantize q8 is not supported for llama2c (only q8_0)"),
        (["--to", "safetensors", "--quantize", "q8_0"], "--quantize q8_0 is not supported for safetensors"),
        (["--to", "safetensors", "--dtype", "float16"], "--dtype works only with --to gguf"),
        (["--to", "llama2c", "--tokenizer", "x"], "--tokenizer works only with --to gguf"),
        (["--to", "gguf", "--dtype", "float16", "--quantize", "q8_0"], "--dtype float16 and --quantize q8_0"),
        (["--to", "coreml"], "'coreml' is not one of"),
    ],
)
def test_what_a_format_does_not_have_is_wrong_usage(run, tmp_path, options, what):
    assert_refused(run("convert", "stories", str(tmp_path / "x"), *options), what, status=2)


def test_a_file_that_is_a_vocabulary_alone_is_no_model(run, tmp_path):
    path = str(File(sentencepiece()[1], {}).write(tmp_path / "x.gguf"))
    assert_refused(run("inspect", path), path, "lacks the key general.architecture")
    assert run("tokens", "she", "--tokenizer", path)[0] == 0
