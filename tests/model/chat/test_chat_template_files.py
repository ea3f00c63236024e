"""Chat templates in files next to a model are found as transformers finds them; otherwise we use a built-in one."""

import json

import pytest

from llamaspec.model.chat.template import BUILT_IN, BUILT_IN_NAMES, LARGEST, MOST_NAMED, SpecialTokens, find_template
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.tokenizers.load import load_tokenizer
from tests.goldens import chat_templates
from tests.model.chat.test_chat_template import GOLDEN, HELLO, LLAMA2, LLAMA3, TOKENIZERS
from tests.support import tiny_tokenizers


@pytest.mark.parametrize("case", GOLDEN["folders"], ids=lambda case: case["name"])
def test_a_folders_template_is_found_rendered_and_encoded_as_in_transformers(case, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=chat_templates.TOKENS))
    for name, contents in case["files"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))
    tokenizer = load_tokenizer(tmp_path)
    rendered = find_template(tokenizer, tmp_path).render(case["messages"], **case["variables"])
    assert rendered == case["rendered"]
    assert SpecialTokens(tokenizer).encode(rendered) == [int(id) for id in case["ids"].split()]


def test_a_template_file_takes_precedence(tmp_path):
    config = {"chat_template": "not this", "bos_token": {"content": "<x>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("[{{ bos_token }}|{{ eos_token }}]")
    template = find_template(LLAMA3, tmp_path)
    assert template.name == str(tmp_path / "chat_template.jinja")
    assert template.render(HELLO) == "[<x>|]"


def test_a_template_next_to_a_model_file_is_found(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token ~ eos_token }}")
    assert find_template(LLAMA3, tmp_path / "tokenizer.model").render(HELLO) == "<|begin_of_text|><|eot_id|>"
    assert find_template(LLAMA2, tmp_path / "none.bin").render(HELLO) == "<s></s>"


def test_template_locations_have_an_order(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "chat_template.jinja").write_text("found")
    assert find_template(LLAMA3, tmp_path / "a", tmp_path).source == "found"


@pytest.mark.parametrize("stated", ["T", [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]])
def test_in_the_tokenizers_configuration(tmp_path, stated):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    assert find_template(LLAMA3, tmp_path).source == "T"


def test_a_name_that_leads_out_of_a_folder_is_refused(tmp_path):
    stated = [{"name": "default", "template": "T"}, {"name": "../../evil", "template": "U"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    with pytest.raises(CheckpointError, match=r'"\.\./\.\./evil"'):
        find_template(LLAMA3, tmp_path)


def test_links_out_of_the_folder_and_too_many_others_are_refused(tmp_path):
    more_templates = tmp_path / "model/additional_chat_templates"
    more_templates.mkdir(parents=True)
    (tmp_path / "secret").write_text("not to be published")
    (more_templates / "a.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"a\.jinja: is a link to .*secret, outside the model's folder"):
        find_template(LLAMA3, tmp_path / "model")
    (more_templates / "a.jinja").unlink()
    (more_templates / "a.jinja").write_text("T")
    with pytest.raises(CheckpointError, match="has several chat templates, but none has the name default"):
        find_template(LLAMA3, tmp_path / "model")
    for i in range(MOST_NAMED):
        (more_templates / f"{i}.jinja").write_text("T")
    with pytest.raises(CheckpointError, match="more than 100 chat templates"):
        find_template(LLAMA3, tmp_path / "model")


def test_one_of_the_models_own_can_be_chosen(tmp_path):
    named = [{"name": "rag", "template": "R{{ bos_token }}"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chosen = find_template(LLAMA3, tmp_path, template="rag")
    assert chosen.name.endswith("tokenizer_config.json (rag)")
    assert chosen.render(HELLO, tools=[]) == "R<|begin_of_text|>"
    with pytest.raises(
        CheckpointError, match=r"neither a file nor the name of a chat template: .*llama3, .*, vicuna, rag"
    ):
        find_template(LLAMA3, tmp_path, template="tool_use")


def test_without_one_that_of_the_family_is_taken(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    for name, tokenizer in TOKENIZERS.items():
        assert find_template(tokenizer, tmp_path).source == (BUILT_IN / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", '{"chat_template": 7}', "expected a string as chat_template, got 7"),
        (
            "tokenizer_config.json",
            '{"chat_template": [7, {"name": "rag", "template": "x"}]}',
            "none has the name default",
        ),
        ("tokenizer_config.json", '{"chat_template": [{"name": {}, "template": "x"}]}', "none has the name default"),
        ("tokenizer_config.json", '{"chat_template": {"default": 7}}', "expected a string as chat_template, got 7"),
        ("tokenizer_config.json", '{"chat_template": "x", "bos_token": 7}', "bos_token is 7, expected a string"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", json.dumps({"chat_template": "x" * LARGEST + "x"}), "more than 1048576 bytes"),
        ("chat_template.jinja", "x" * LARGEST + "x", "more than 1048576 bytes"),
        ("chat_template.jinja", "", "is empty"),
        ("chat_template.jinja", "\udcff", "byte 0 is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError) as caught:
        find_template(LLAMA3, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert message in str(caught.value)


def test_a_model_without_one_says_so(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=("<x>",)))
    with pytest.raises(CheckpointError, match=r"has no chat template.*--template.*llama3, chatml"):
        find_template(load_tokenizer(tmp_path), tmp_path)


def test_a_default_template_is_announced(tmp_path):
    note = find_template(LLAMA2, tmp_path).note
    assert note and note.startswith(f"{tmp_path}: comes without a chat template")
    assert "llama2" in note and "--template" in note and "llama3, chatml" in note
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert find_template(LLAMA2, tmp_path).note is None


@pytest.mark.parametrize("name", BUILT_IN_NAMES)
def test_one_of_the_built_in_can_be_chosen(tmp_path, name):
    (tmp_path / "chat_template.jinja").write_text("its own")
    template = find_template(LLAMA2, tmp_path, template=name)
    assert (template.source, template.note) == ((BUILT_IN / f"{name}.jinja").read_text(), None)


def test_a_file_can_be_chosen(tmp_path):
    (tmp_path / "other.txt").write_text("{{ bos_token }}{{ messages[0].content }}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<x>"}')
    assert find_template(LLAMA2, tmp_path, template=tmp_path / "other.txt").render(HELLO) == "<x>Hello"
    with pytest.raises(
        CheckpointError,
        match="is neither a file nor the name of a chat template: expected a file or one of llama3, chatml",
    ):
        find_template(LLAMA2, tmp_path, template="alpaca")
