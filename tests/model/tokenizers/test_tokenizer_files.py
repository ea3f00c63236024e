"""A tokenizer in a GGUF file keeps its ids when it is converted to a folder."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llamaspec.model.chat.template import template_of
from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.convert import convert
from llamaspec.model.tokenizers.huggingface_writer import tokenizer_files
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.of_model import tokenizer_of
from tests.model.tokenizers.test_gguf_tokenizers import KINDS
from tests.support import families, llama2c_files, tiny_tokenizers
from tests.support.gguf_files import ARRAY, BOOL, STRING, U32, File, file_of

TEXTS = ["", " ", "she said", "  two spaces", "Ünïcode 12345 \U0001f600\n\n", "<s> is text", "1 + 1"]


def keys_of(kind: str, *, begins: bool) -> dict:
    """Return a tokenizer's GGUF keys; `begins` says whether texts begin with BOS."""
    _, keys = KINDS[kind][1]()
    name = "<s>" if kind == "sentencepiece" else "<|begin_of_text|>"
    bos = keys["tokenizer.ggml.tokens"][1][1].index(name)
    return {**keys, "tokenizer.ggml.bos_token_id": (U32, bos), "tokenizer.ggml.add_bos_token": (BOOL, begins)}


def written(folder: Path, kind: str, *, begins: bool) -> tuple[Path, Path]:
    """Write the same tokenizer into a GGUF file and into a folder."""
    inside = File(keys_of(kind, begins=begins), {}).write(folder / "x.gguf")
    files = tokenizer_files(load_tokenizer(inside), named={}, templates={})
    (folder / "there").mkdir()
    for name, data in files.items():
        (folder / "there" / name).write_bytes(data)
    assert KINDS[kind][0] in files
    return inside, folder / "there"


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_stays_the_same(kind, begins, tmp_path):
    copy, source = map(load_tokenizer, written(tmp_path, kind, begins=begins))
    assert (copy.vocab, copy.bos, copy.special) == (source.vocab, source.bos, source.special)
    assert (copy.bos is not None) == begins
    assert copy.dummy_prefix == source.dummy_prefix
    for text in TEXTS:
        for start in (True, False):
            assert copy.encode(text, start=start) == source.encode(text, start=start)
    assert [copy.bytes_of(id) for id in range(copy.vocab)] == [source.bytes_of(id) for id in range(copy.vocab)]


def test_the_library_begins_texts_with_bos(tmp_path):
    _, there = written(tmp_path, "llama-bpe", begins=True)
    tokenizer = load_tokenizer(there)
    assert Tokenizer.from_file(str(there / "tokenizer.json")).encode("she").ids == [
        tokenizer.bos,
        *tokenizer.encode("she"),
    ]


@pytest.mark.parametrize("beside", [True, False])
def test_a_directory_gets_what_is_inside(beside, tmp_path):
    """A folder converted from a GGUF file gets the tokenizer and templates in that file, not the files next to it."""
    keys = keys_of("llama-bpe", begins=True)
    vocab = len(keys["tokenizer.ggml.tokens"][1][1])
    config = {**families.FAMILIES["llama-3.1"], "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 1}
    file = file_of(config, families.random_tensors(config))
    file.keys |= {**keys, "tokenizer.chat_template": (STRING, "{{ messages[0].content }}")}
    file.keys["tokenizer.chat_templates"] = (ARRAY, (STRING, ["rag"]))
    file.keys["tokenizer.chat_template.rag"] = (STRING, "{{ documents }}")
    file.keys["tokenizer.ggml.eos_token_id"] = (U32, vocab - 1)
    source = open_checkpoint(file.write(tmp_path / "x.gguf"))
    if beside:
        (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
        (tmp_path / "tokenizer.model").write_bytes(b"of another model")
    assert convert(source, tmp_path / "there", to="safetensors") == []
    names = {path.name for path in (tmp_path / "there").iterdir()}
    assert names - {"config.json", "generation_config.json", "model.safetensors"} == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates",
    }  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "there")
    template = template_of(tokenizer, tmp_path / "there")
    assert template and template.source == "{{ messages[0].content }}"
    assert template.named == {"rag": "{{ documents }}"}
    stated = json.loads((tmp_path / "there" / "tokenizer_config.json").read_text())
    assert stated["eos_token"] == tokenizer.piece(vocab - 1)


def test_named_templates_are_copied_but_for_links_out_of_the_folder(tmp_path):
    config = families.FAMILIES["llama-3.1"]
    folder = tmp_path / "snapshots/1"
    more_templates = folder / "additional_chat_templates"
    more_templates.mkdir(parents=True)
    families.write_checkpoint(folder, config)
    for name, place in (("cached", "blobs/a"), ("secret", "secret")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(name)
        (more_templates / f"{name}.jinja").symlink_to(tmp_path / place)
    notes = convert(open_checkpoint(folder), tmp_path / "there", to="safetensors")
    assert [path.read_text() for path in (tmp_path / "there/additional_chat_templates").iterdir()] == ["cached"]
    assert any("secret.jinja" in note for note in notes)


def test_without_a_tokenizer_inside_what_lies_beside_comes_along(tmp_path):
    config = families.FAMILIES["llama-3.1"]
    source = open_checkpoint(file_of(config, families.random_tensors(config)).write(tmp_path / "x.gguf"))
    (tmp_path / "tokenizer.bin").write_bytes(b"pieces")
    convert(source, tmp_path / "there", to="safetensors")
    assert (tmp_path / "there" / "tokenizer.bin").read_bytes() == b"pieces"


def test_a_tokenizer_of_another_kind_is_not_written(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizers.llama3())
    with pytest.raises(TypeError, match="a tokenizer of type TiktokenTokenizer cannot"):
        tokenizer_files(load_tokenizer(tmp_path), named={}, templates={})


def test_a_model_without_a_tokenizer_is_named(tmp_path, monkeypatch):
    """The error about a missing tokenizer names the model's file, or the folder that was searched.

    The path `.` is called "the current folder".
    """
    llama2c_files.write(tmp_path / "a.bin")
    (tmp_path / "tok512.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    looked = r"\(looked for tokenizer\.json, .*\): .* --tokenizer; .* tok512\.bin$"
    with pytest.raises(CheckpointError, match=rf"^a\.bin: no tokenizer was found next to it {looked}"):
        tokenizer_of(open_checkpoint("a.bin"), None)
    with pytest.raises(CheckpointError, match=rf"^the current folder: no tokenizer was found in it {looked}"):
        tokenizer_of(open_checkpoint("a.bin"), ".")


def test_a_model_without_a_tokenizer_is_written(tmp_path):
    config = families.FAMILIES["llama-3.1"]
    source = open_checkpoint(file_of(config, families.random_tensors(config)).write(tmp_path / "x.gguf"))
    write_huggingface(source, tmp_path / "there")
    assert not list((tmp_path / "there").glob("tokenizer*"))


NAMES_IN_TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"


def there_and_back(tmp_path: Path, *, eos: str, stops: tuple[str, ...]) -> list[Path]:
    """Write a GGUF model with a template that uses bos_token and eos_token, and convert it twice; return all paths.

    Texts do not begin with BOS, and several tokens end a text.
    """
    keys = keys_of("llama-bpe", begins=False)
    for key, value in (("tokens", "<|end_of_text|>"), ("token_type", 3)):
        array, (kind, values) = keys[f"tokenizer.ggml.{key}"]
        keys[f"tokenizer.ggml.{key}"] = (array, (kind, [*values, value]))
    tokens = keys["tokenizer.ggml.tokens"][1][1]
    config = {**families.FAMILIES["llama-3.1"], "vocab_size": len(tokens), "bos_token_id": None}
    config["eos_token_id"] = [tokens.index(name) for name in stops]
    file = file_of(config, families.random_tensors(config))
    file.keys = {key: value for key, value in file.keys.items() if "token_id" not in str(key)} | keys
    file.keys["tokenizer.chat_template"] = (STRING, NAMES_IN_TEMPLATE)
    for key, name in zip(("eos", "eot", "eom"), (eos, *(name for name in stops if name != eos)), strict=False):
        file.keys[f"tokenizer.ggml.{key}_token_id"] = (U32, tokens.index(name))
    paths = [file.write(tmp_path / "x.gguf"), tmp_path / "there", tmp_path / "back.gguf"]
    for source, destination, to in zip(paths, paths[1:], ("safetensors", "gguf"), strict=False):
        convert(open_checkpoint(source), destination, to=to)
    return paths


@pytest.mark.parametrize("eos", ["<|eot_id|>", "<|end_of_text|>"])
def test_the_tokens_that_a_template_writes_stay(eos, tmp_path):
    for path in there_and_back(tmp_path, eos=eos, stops=("<|eot_id|>", "<|end_of_text|>")):
        tokenizer = load_tokenizer(path)
        template = template_of(tokenizer, path)
        assert template and template.render([{"role": "user", "content": "a"}]) == f"<|begin_of_text|>a{eos}"
        assert tokenizer.bos is None
        ends = {tokenizer.special[name] for name in ("<|eot_id|>", "<|end_of_text|>")}
        assert ends <= open_checkpoint(path).stops


@pytest.mark.parametrize("prefix", [True, False])
def test_a_folder_says_whether_texts_begin_with_a_space(prefix, tmp_path):
    """tokenizer_config.json decides whether a space precedes a text; LlamaTokenizer ignores tokenizer.model's flag."""
    keys = keys_of("sentencepiece", begins=True) | {"tokenizer.ggml.add_space_prefix": (BOOL, prefix)}
    tokenizer = load_tokenizer(File(keys, {}).write(tmp_path / "x.gguf"))
    files = tokenizer_files(tokenizer, named={}, templates={})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert json.loads(files["tokenizer_config.json"]).get("add_prefix_space", True) == prefix
    assert load_tokenizer(tmp_path / "tokenizer.model").dummy_prefix == prefix
