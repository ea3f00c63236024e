"""Opening a path: folders without a model, the Hub's cache, links, and files that change while open."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.open import place_of
from llamaspec.model.checkpoints.staging import new_directory, new_file
from llamaspec.model.convert import convert
from tests.support import families, llama2c_files
from tests.support.gguf_files import file_of
from tests.support.processes import REPOSITORY
from tests.support.refusals import mentions

CONFIG = families.FAMILIES["llama-3.1"]

FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "has no config.json"),
    "a llama2.c file": ({"stories.bin": "", "tok512.bin": ""}, "has no config.json; has stories.bin .bin llama2.c"),
    "Meta's": ({"consolidated.00.pth": "", "params.json": "{}"}, "convert convert_llama_weights_to_hf.py"),
    "Mistral's": ({"consolidated.00.pth": "", "params.json": "{}"}, "Mistral's convert_mistral_weights_to_hf.py"),
    "Mistral's without weights": ({"params.json": "{}"}, "lacks weights consolidated.safetensors"),
    "GGUF files": (
        {"b-Q8_0.gguf": "", "a-Q4_K_M.gguf": ""}, "folder GGUF files one a-Q4_K_M.gguf b-Q8_0",
    ),
    "an adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "meta/llama"}', "adapter_model.safetensors": ""},
        "adapter (LoRA) give base model 'meta/llama' --adapter",
    ),
    "a cache of two": (
        {"snapshots/aa/config.json": "{}", "snapshots/bb/config.json": "{}"},
        "snapshot snapshots/aa snapshots/bb",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_no_model_is_refused_by_what_it_is(kind, tmp_path):
    files, what = FOLDERS[kind]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ") and mentions(str(caught.value), what)
    assert str(caught.value).isprintable()


def test_a_misspelt_name_is_answered_by_the_one_that_it_may_mean(tmp_path, monkeypatch):
    (tmp_path / "Llama-3.2-1B.gguf").touch()
    (tmp_path / "Llama-3.2-1B.txt").touch()  # not a model
    (tmp_path / "tinyllama").mkdir()
    monkeypatch.chdir(tmp_path)
    hint = "No such file or directory. Did you mean"
    for name, meant in {
        "storis": "stories",
        "tinylama": "tinyllama",
        f"{tmp_path}/lama-3.2-1B.guf": f"{tmp_path}/Llama-3.2-1B.gguf",
    }.items():
        with pytest.raises(CheckpointError, match=f"^{name}: {hint} {meant}\\?$"):
            open_checkpoint(name)
    for name in ("fox", "Llama.txt", "none/storis", "storis/storis"):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(name)
        assert "mean" not in str(caught.value)


def cached(folder: Path) -> tuple[Path, Path]:
    """Write a model in the layout of Hugging Face's cache; return its folder, and the snapshot with links to blobs."""
    model = folder / "models--owner--name"
    snapshot, blobs = model / "snapshots" / "abc", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "plain").mkdir()
    families.write_checkpoint(folder / "plain", CONFIG)
    (folder / "plain" / "special_tokens_map.json").write_text("{}")
    for number, file in enumerate(sorted((folder / "plain").iterdir())):
        file.rename(blobs / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return model, snapshot


def test_a_folder_of_the_hubs_cache_stands_for_its_snapshot(tmp_path):
    model, snapshot = cached(tmp_path)
    assert place_of(model) == snapshot  # the only snapshot
    (model / "snapshots" / "older").mkdir()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    assert place_of(model) == snapshot
    assert open_checkpoint(model).path == str(snapshot)


def test_convert_follows_no_link_out_of_the_folder(tmp_path):
    source, secret = tmp_path / "model", tmp_path / "secret"
    source.mkdir()
    families.write_checkpoint(source, CONFIG)
    secret.write_text("a key")
    (source / "special_tokens_map.json").symlink_to(secret)
    (source / "added_tokens.json").write_text("{}")
    (source / "chat_template.jinja").symlink_to("added_tokens.json")
    (note,) = convert(open_checkpoint(source), tmp_path / "there", to="safetensors")
    assert "special_tokens_map.json" in note and str(secret) in note
    assert not (tmp_path / "there" / "special_tokens_map.json").exists()
    assert (tmp_path / "there" / "chat_template.jinja").read_text() == "{}"


def test_convert_copies_what_the_hubs_cache_links_to(tmp_path):
    model, _ = cached(tmp_path)
    assert convert(open_checkpoint(model), tmp_path / "there", to="safetensors") == []
    assert (tmp_path / "there" / "special_tokens_map.json").read_text() == "{}"


def test_no_template_from_outside_gets_into_a_gguf_file(tmp_path):
    from tests.model.tokenizers.test_gguf_tokenizers import model_with, sentencepiece

    source = tmp_path / "model"
    source.mkdir()
    (tmp_path / "secret").write_text("a key")
    (source / "chat_template.jinja").symlink_to(tmp_path / "secret")
    checkpoint = open_checkpoint(model_with(source, sentencepiece()[1]))
    (note,) = convert(checkpoint, tmp_path / "out.gguf", to="gguf")
    assert "is not copied" in note and b"a key" not in (tmp_path / "out.gguf").read_bytes()
    notes = convert(checkpoint, tmp_path / "out", to="safetensors")
    assert any("is not copied" in note for note in notes)
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_cut_short_while_it_is_read_is_an_error(kind, tmp_path):
    """Reading a file that another process truncates meanwhile raises an error. No SIGBUS ends the process."""
    if kind == "gguf":
        path = place = file_of(CONFIG, families.random_tensors(CONFIG)).write(tmp_path / "x.gguf")
    else:
        families.write_checkpoint(tmp_path, CONFIG)
        place, path = tmp_path, tmp_path / "model.safetensors"
    checkpoint = open_checkpoint(place)
    os.truncate(path, 100)
    for tensor in checkpoint.tensors.values():
        with pytest.raises(CheckpointError, match=r"cut short while it was read.*\b100 bytes"):
            tensor.read()
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        checkpoint.release()


WRITER = """
import sys, time
from llamaspec.model.checkpoints.staging import new_directory, new_file
with {maker}(sys.argv[1]) as staged:
    ({written}).write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("maker", "written"), [("new_file", "staged"), ("new_directory", "staged / 'x'")])
def test_leftovers_of_a_killed_writer_are_removed(maker, written, tmp_path):
    """Writing to a path removes leftovers of killed writers to the same path, but no other unfinished files."""
    code = WRITER.format(maker=maker, written=written)
    command = [sys.executable, "-c", code, str(tmp_path / "there")]
    killed, living = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) for _ in range(2))
    try:
        for process in (killed, living):
            assert process.stdout and process.stdout.readline() == "ready\n"
        assert len(partials(tmp_path)) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        make = new_file if maker == "new_file" else new_directory
        with make(tmp_path / "other") as staged:
            (staged if maker == "new_file" else staged / "x").write_text("whole")
        assert len(partials(tmp_path)) == 2  # of another place
        with make(tmp_path / "there") as staged:
            (staged if maker == "new_file" else staged / "x").write_text("whole")
            assert len(partials(tmp_path)) == 2  # this writer's, and the living process's
        assert len(partials(tmp_path)) == 1
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".partial")]


def test_a_link_named_like_an_unfinished_file_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / ".there.0123abcd.partial").symlink_to(tmp_path / "precious")
    with new_file(tmp_path / "there") as staged:
        staged.write_text(json.dumps({}))
    assert (tmp_path / "precious").read_text() == "keep"


@pytest.mark.parametrize("layers", [123, 379])
def test_a_number_of_layers_that_begins_with_a_brace(tmp_path, layers):
    """A llama2.c file loads even if its number of layers is 379, which is stored with "{" as its first byte.

    At this place, a safetensors file has JSON, which begins with "{".
    """
    sizes = llama2c_files.Sizes(dim=8, ffn=4, layers=layers)
    assert open_checkpoint(llama2c_files.write(tmp_path / "x.bin", 0, sizes=sizes)).config.layers == layers


@pytest.mark.parametrize("dim", [379, 0x407B])
def test_a_width_that_begins_with_a_brace(tmp_path, dim):
    path = tmp_path / "x.bin"
    path.write_bytes(llama2c_files.header(llama2c_files.Sizes(dim=dim), version=1, tied=True))
    with pytest.raises(CheckpointError, match=f"llama2.c file, it would have dim {dim} and 4 heads"):
        open_checkpoint(path)
