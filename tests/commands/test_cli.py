"""The command line: results go to stdout, messages to stderr, and the exit code tells the kind of failure."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from click.testing import CliRunner

from llamaspec import cli
from llamaspec.commands.inspect import folded
from llamaspec.commands.output import EXTRAS, one_line
from llamaspec.model.checkpoints.open import BUILT_IN
from llamaspec.model.insight.doctor import TYPICAL
from llamaspec.model.insight.shapes import SHAPES
from tests.support.families import FAMILIES, write_checkpoint
from tests.support.processes import REPOSITORY, Done, run_llamaspec, run_python

MEMORY = 600_000_000  # bytes that a command may use to refuse a bad file


@pytest.fixture
def stories(data) -> list[str]:
    folder = data / "stories260K"
    return ["--model", str(folder / "stories260K.bin"), "--tokenizer", str(folder / "tok512.model")]


def assert_refused(result: tuple | Done, *words: str, status: int = 1):
    """Assert that a command exited with `status`, and printed only an `error:` line with all `words`, on stderr."""
    code, out, err = result[:3]
    lines = err.strip().splitlines()
    assert (code, out, len(lines)) == (status, "", 1), err
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize("tokenizer", ["tok512.model", "tok512.bin"])
@pytest.mark.parametrize("backend", ["jax", "reference"])
def test_greedy_text_is_that_of_llama2c(run, data, backend, tokenizer):
    folder = data / "stories260K"
    expected = (folder / "greedy_200_steps.txt").read_text()
    arguments = ["--model", str(folder / "stories260K.bin"), "--tokenizer", str(folder / tokenizer)]
    request = ["--temperature", "0", "--max-new-tokens", "200", "--backend", backend]
    code, out, err = run("generate", "", *arguments, *request)
    assert (code, out) == (0, expected + "\n")
    assert "200 new" in err


def test_text_is_the_prompt_and_its_continuation(run, stories):
    prompt = "  Lily  saw a 🦊 "
    code, out, err = run("generate", prompt, *stories, "--seed", "1", "--max-new-tokens", "9")
    assert code == 0
    assert out.startswith(prompt)
    assert out.endswith("\n")
    _, as_json, _ = run("generate", prompt, *stories, "--seed", "1", "--max-new-tokens", "9", "--json")
    story = json.loads(as_json)
    assert set(story) == {"text", "completion", "prompt_tokens", "tokens", "finish_reason", "seed", "timings"}
    assert story["text"] + "\n" == out
    counted = rf"{story['prompt_tokens']} tokens of prompt \+ 9 new in [\d.]+ s: the first after [\d.]+ s, then "
    assert re.fullmatch(counted + r"[\d.]+ tokens/s \(.*\); ended by length", err.splitlines()[-1])
    assert story["text"] == prompt + story["completion"]
    assert (story["tokens"], story["finish_reason"], story["seed"]) == (9, "length", 1)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_drawn_seed_is_printed_and_repeats_the_text(run, stories, form):
    _, out, err = run("story", *stories, "--max-new-tokens", "20", *form)
    (seed,) = [line.removeprefix("seed ") for line in err.splitlines() if line.startswith("seed ")]
    _, again, _ = run("story", *stories, "--max-new-tokens", "20", "--seed", seed)
    assert again == (json.loads(out)["text"] + "\n" if form else out)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_seed_without_effect_is_not_printed(run, stories, form):
    _, _, err = run("generate", *stories, "--max-new-tokens", "2", "--temperature", "0", *form)
    assert "seed" not in err and err.count("\n") == 1


def test_a_full_context_ends_the_text_and_a_longer_prompt_is_refused(run, stories):
    code, out, _ = run("generate", "Once", *stories, "--context", "20", "--json", "--temperature", "0")
    story = json.loads(out)
    assert (code, story["finish_reason"]) == (0, "context")
    assert story["prompt_tokens"] + story["tokens"] == 21  # the last token is drawn but not fed, so it needs no room
    assert_refused(run("generate", "Once " * 30, *stories, "--context", "20"), "20", "31")


def test_stop_texts_end_a_story(run, stories):
    _, out, _ = run("generate", "", *stories, "--temperature", "0", "--stop", "Lily", "--stop", "zebra")
    assert out == "Once upon a time, there was a little girl named \n"


def test_prompt_from_standard_input(stories):
    request = [*stories, "--max-new-tokens", "1", "--temperature", "0"]
    done = run_llamaspec("generate", "-", *request, stdin="Tim had\na\n")
    assert done.code == 0
    assert done.out == run_llamaspec("generate", "Tim had\na", *request).out  # without the newline that `echo` adds


def test_chat_reads_lines_and_answers_each(stories):
    script = "Tell me about Lily.\n\nAnd then?\n/reset\nTell me about Lily.\n/exit\nnever read\n"
    done = run_llamaspec("chat", *stories, "--seed", "3", "--max-new-tokens", "12", stdin=script)
    assert done.code == 0, done.err
    first, second, third = done.out.splitlines()
    assert first == third != second
    assert all(line and line == line.lstrip() for line in (first, second))
    cut = "(answer cut after 12 tokens: raise --max-new-tokens for longer answers)\n"
    note, _, notes = done.err.partition("\n")
    assert "comes without a chat template; using the built-in llama2" in note
    assert notes == f"{cut}{cut}started a new conversation\n{cut}"


@pytest.mark.slow  # 8 s
def test_chat_takes_commands(tmp_path):
    saved = tmp_path / "talk.json"
    script = f"How are you?\n/save {saved}\n/help\nexit\nnever read\n"
    done = run_llamaspec("chat", "--temperature", "0", stdin=script)
    assert (done.code, done.out) == (0, "I am well, thank you. Ask me for a story.\n")
    assert "/reset" in done.err and "Tell me a story about Anna and a carrot." in done.err
    roles = [message["role"] for message in json.loads(saved.read_text())]
    assert roles == ["user", "assistant"]


@pytest.mark.slow  # 6 s
def test_chat_sets_regenerates_and_loads(stories, tmp_path):
    saved, other = tmp_path / "talk.json", tmp_path / "other.json"
    other.write_text('[{"role": "robot", "content": "hm"}]')
    lines = [
        "Tell me about Lily.", f"/save {saved}", "/regenerate", "/set temperature 0", "/regenerate", "/reset",
        "Tell me about Lily.", f"/load {saved}", "/regenerate", "/set top-k 4", "/set",
    ]  # fmt: skip
    done = run_llamaspec("chat", *stories, "--seed", "3", "--max-new-tokens", "12", stdin="\n".join(lines))
    assert done.code == 0, done.err
    first, second, *greedy = done.out.splitlines()
    assert first != second and len(greedy) == 3 and len({*greedy}) == 1
    notes = [line for line in done.err.splitlines()[1:] if "answer cut" not in line]
    assert notes[1:3] == ["seed 4", "temperature 0.0"]
    assert notes[4] == "started a new conversation" and notes[5] == f"read 2 messages from {saved}"
    assert notes[-2:] == [
        "top-k 4",
        "temperature 0.0, top-k 4, top-p 0.95, min-p 0.0, repetition-penalty 1.0, max-new-tokens 12, seed 4",
    ]
    failed = run_llamaspec("chat", *stories, stdin=f"/load {other}\n")
    assert failed.code == 1 and failed.err.splitlines()[-1].startswith(f"error: {other}: message 1 has role")


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/foo", ["/foo", "/help"]),
        ("/reset now", ["/reset"]),
        ("/save", ["/save", "file"]),
        ("/load", ["/load", "file"]),
        ("/load nothere.json", ["nothere.json"]),
        ("/regenerate", ["no question"]),
        ("/set temperature", ["temperature", "number"]),
        ("/set temperature -1", ["temperature", "0 or more"]),
        ("/set warmth 1", ["warmth", "top-k", "max-new-tokens"]),
        ("/save /no/such/folder/talk.json", ["/no/such/folder"]),
        ("/system Be brief.\nHi", ["system message"]),
    ],
)
def test_chat_refuses_a_command_by_name(line, words):
    done = run_llamaspec("chat", "--temperature", "0", stdin=f"{line}\n")
    last = done.err.splitlines()[-1]
    assert (done.code, done.out) == (1, "")
    assert last.startswith("error: ") and all(word in last for word in words)


@pytest.mark.parametrize("wrong", [["--template", "nothere.jinja"], ["--template-option", "nothing=1"]])
def test_chat_looks_at_the_template_before_it_reads_weights(run, monkeypatch, wrong):
    monkeypatch.setattr("llamaspec.model.llama.load_backend", lambda *_, **__: pytest.fail("weights were read"))
    code, out, err = run("chat", *wrong)
    assert (code != 0, out) == (True, "") and err.startswith("error: ") and wrong[1].partition("=")[0] in err


@pytest.mark.slow  # 9 s
def test_chat_drops_what_no_longer_fits_and_says_so(tmp_path):
    script = "Tell me a story about a fox.\nTell me another story.\n" + "Who was the story about?\n" * 2
    done = run_llamaspec("chat", "--seed", "1", "--context", "480", stdin=script)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 4
    assert "(the oldest turn was dropped: the context of 480 tokens was nearly full)" in done.err


def test_tokens(run, data):
    tokenizer = ["--tokenizer", str(data / "llama2-tokenizer" / "tokenizer.model")]
    assert run("tokens", "I have a dream", *tokenizer)[:2] == (0, "1 306 505 263 12561\n")
    assert run("tokens", "I have a dream", *tokenizer, "--no-bos")[1] == "306 505 263 12561\n"
    encoded = json.loads(run("tokens", "I have", *tokenizer, "--json")[1])
    assert encoded == {"ids": [1, 306, 505], "pieces": ["<s>", "▁I", "▁have"]}
    assert run("tokens", "--decode", "1,306,505,263,12561", *tokenizer)[1] == "I have a dream\n"
    assert_refused(run("tokens", "--decode", "1,32000", *tokenizer), "32000", "31999")
    assert_refused(run("tokens", "--decode", "1,-1", *tokenizer), "-1")
    assert json.loads(run("tokens", "--decode", "1,306", *tokenizer, "--json")[1]) == {"text": "I"}
    for ids in ("one", "1,,2", "1_0", "٣"):
        assert_refused(run("tokens", "--decode", ids, *tokenizer), ids, status=2)
    assert_refused(run("tokens", "--decode", "1", "--no-bos", *tokenizer), "--no-bos", status=2)
    assert_refused(run("tokens", *tokenizer), "TEXT", status=2)


@pytest.mark.parametrize(("backend", "dtype"), [("jax", np.float32), ("reference", np.float64)])
def test_logits(run, stories, tmp_path, backend, dtype):
    out = tmp_path / "logits.npy"
    for _ in range(2):  # the second replaces the first
        assert run("logits", "--prompt", "Once", *stories, "--out", str(out), "--backend", backend)[0] == 0
    rows = np.load(out)
    ids = [int(id) for id in run("tokens", "Once", *stories[2:])[1].split()]
    assert (rows.shape, rows.dtype) == ((len(ids), 512), dtype)
    run("logits", "--tokens", ",".join(map(str, ids)), *stories, "--out", str(out), "--backend", backend)
    np.testing.assert_array_equal(np.load(out), rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.npy"]


def test_logits_replace_a_file_and_nothing_else(run, stories, tmp_path):
    (tmp_path / "target.npy").write_bytes(b"old")
    (tmp_path / "link.npy").symlink_to("target.npy")
    assert run("logits", "--tokens", "1", *stories, "--out", str(tmp_path / "link.npy"))[0] == 0
    assert (tmp_path / "link.npy").is_symlink()
    assert np.load(tmp_path / "target.npy").shape == (1, 512)
    os.mkfifo(tmp_path / "pipe")
    assert_refused(run("logits", "--tokens", "1", *stories, "--out", str(tmp_path / "pipe")), "not a regular file")
    assert (tmp_path / "pipe").is_fifo()
    assert_refused(run("logits", "--tokens", "1", *stories, "--out", str(tmp_path / "no" / "x.npy")), "No such file")


def test_inspect(run, stories):
    model = stories[1]
    inspected = json.loads(run("inspect", model, "--json")[1])
    assert set(inspected) == {
        "format", "config", "tensors", "parameters", "bytes",
        "flops_per_token", "bytes_per_token", "cache_bytes_per_token",
    }  # fmt: skip
    assert inspected["parameters"] == sum(int(np.prod(tensor["shape"])) for tensor in inspected["tensors"]) == 260_032
    assert inspected["bytes"] == inspected["bytes_per_token"] == 4 * 260_032  # float32, tied: every weight is read
    norms = 64 * 11
    assert inspected["flops_per_token"] == 2 * (260_032 - norms)
    assert inspected["cache_bytes_per_token"] == 2 * 5 * 4 * 8 * 4
    text = run("inspect", model)[1]
    assert re.search(
        r"^model\.layers\.0-4\.mlp\.up_proj\.weight +\[172, 64\] +float32 +5 x 44\.0 kB$", text, re.MULTILINE
    )
    assert re.search(r"^model\.norm\.weight +\[64\] +float32 +256 B$", text, re.MULTILINE)
    assert re.search(r"^  renormalize_experts +True$", text, re.MULTILINE)


def test_inspect_has_separate_rows_for_different_layers():
    """`inspect` groups layers by their tensors: layers with a different dtype or with experts get their own row."""
    about = {"shape": [4, 4], "dtype": "q8", "bytes": 18}
    tensors = [{"name": f"layers.{layer}.up.weight", **about} for layer in range(4)]
    tensors[2]["dtype"] = "q4"
    tensors += [{"name": f"layers.{layer}.experts.{expert}.up", **about} for layer in (4, 5) for expert in range(8)]
    tensors += [{"name": f"layers.6.experts.{expert}.up", **about} for expert in range(4)]
    rows = [(name, dtype, count) for name, _, dtype, _, count in folded(tensors)]
    assert rows == [
        ("layers.0-1,3.up.weight", "q8", 3),
        ("layers.2.up.weight", "q4", 1),
        ("layers.4-5.experts.0-7.up", "q8", 16),
        ("layers.6.experts.0-3.up", "q8", 4),
    ]


def test_the_summary_is_the_last_that_inspect_shows(run):
    lines = run("inspect", "stories")[1].splitlines()
    assert lines[-1].startswith("cache_bytes_per_token")
    assert any("model.norm.weight" in line for line in lines[:-20])


def test_a_folder_that_hides_the_built_in_model_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("tokens", "Once")[2] == ""
    (tmp_path / "stories").mkdir()
    for arguments in (["tokens", "Once"], ["inspect"], ["inspect", "stories"]):
        code, _, err = run(*arguments)
        first, last = err.splitlines()
        assert (code, first) == (1, "using ./stories, because it has the name of the built-in model")
        assert last.startswith("error: stories: ")


def test_a_model_is_found_in_the_cache_of_the_hub(run, tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    folder = cache / "models--owner--a-name"
    assert_refused(run("inspect", "owner/a-name"), "owner/a-name", "hf download owner/a-name --local-dir a-name")
    for name, count in (("old", 1), ("new", 2)):
        (folder / "snapshots" / name).mkdir(parents=True)
        write_checkpoint(folder / "snapshots" / name, FAMILIES["llama-2"] | {"num_hidden_layers": count})
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("new")

    def layers(model: str) -> int:
        return json.loads(run("inspect", model, "--json")[1])["config"]["layers"]

    assert (layers("owner/a-name"), layers("owner/a-name@old")) == (2, 1)
    assert_refused(run("inspect", "owner/a-name@other"), "--revision other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "a-name").mkdir(parents=True)
    write_checkpoint(tmp_path / "owner" / "a-name", FAMILIES["llama-2"] | {"num_hidden_layers": 3})
    assert layers("owner/a-name") == 3  # a path that exists wins


def test_a_missing_tokenizer_names_the_option_and_what_is_there(run, data):
    folder = data / "stories260K"
    result = run("generate", "Once", "--model", str(folder / "stories260K.bin"))
    assert_refused(result, str(folder), "--tokenizer", "tok512.model")


@pytest.mark.parametrize(("arguments", "word"), [("generate --model", "sto"), ("inspect", "x"), ("convert", "x")])
def test_shell_completion_of_models_lists_files(arguments, word):
    environment = {"COMP_WORDS": f"llamaspec {arguments} {word}", "COMP_CWORD": str(1 + len(arguments.split()))}
    script = "from llamaspec import cli; cli.llamaspec.main(prog_name='llamaspec')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        **{"cwd": REPOSITORY, "capture_output": True, "text": True},
        env=os.environ | environment | {"_LLAMASPEC_COMPLETE": "bash_complete"},
    )
    assert f"file,{word}" in done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(("word", "completion"), [("--hel", "--help"), ("--mod", "--model"), ("--cache i", "int8")])
def test_the_shell_completes_options_and_their_choices(shell, word, completion, monkeypatch):
    """Shell completion lists options and their values.

    The test sets the variable that the script in docs/models.md sets.
    """
    monkeypatch.setenv("COMP_WORDS", words := f"llamaspec generate {word}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    for kind, expected in (("source", f"_LLAMASPEC_COMPLETE={shell}_complete"), ("complete", completion)):
        done = CliRunner(env={"_LLAMASPEC_COMPLETE": f"{shell}_{kind}"}).invoke(cli.llamaspec, prog_name="llamaspec")
        assert expected in done.output.replace("plain,", "").split() and not done.exception, done.output


def test_convert_asks_for_a_format(run, tmp_path):
    code, out, err = run("convert", "stories", str(tmp_path / "new"), "--quantize", "q8")
    assert (code, out) == (2, "") and "Missing option '--to'. Choose from: safetensors, llama2c, gguf" in err


def test_convert_names_the_tokenizer_that_it_does_not_copy(run, tmp_path):
    code, _, err = run("convert", "stories", str(single := tmp_path / "x.bin"), "--to", "llama2c")
    assert code == 0
    line = "the tokenizer is not copied: to run {}, give --tokenizer {}"
    assert line.format(single, BUILT_IN["stories"] / "tokenizer.model") in err.splitlines()
    _, _, err = run("convert", str(single), str(folder := tmp_path / "hf"), "--to", "safetensors")
    assert line.format(folder, "PATH") in err.splitlines()
    assert run("convert", "stories", str(tmp_path / "x.gguf"), "--to", "gguf")[0] == 0
    _, _, err = run("convert", str(tmp_path / "x.gguf"), str(back := tmp_path / "y.bin"), "--to", "llama2c")
    assert line.format(back, tmp_path / "x.gguf") in err.splitlines()
    _, _, err = run("convert", str(tmp_path / "x.gguf"), str(tmp_path / "hf2"), "--to", "safetensors")
    assert "not copied" not in err and (tmp_path / "hf2" / "tokenizer.model").exists()


def test_convert_prints_no_hint_if_it_copied_the_tokenizer(run, tmp_path):
    single, folder = tmp_path / "x.bin", tmp_path / "hf"
    assert run("convert", "stories", str(single), "--to", "llama2c")[0] == 0
    (tmp_path / "tokenizer.model").write_bytes((BUILT_IN["stories"] / "tokenizer.model").read_bytes())
    code, _, err = run("convert", str(single), str(folder), "--to", "safetensors")
    assert code == 0 and "not copied" not in err and (folder / "tokenizer.model").exists()


def test_convert_there_and_back(run, stories, tmp_path):
    model, folder, back = stories[1], tmp_path / "hf", tmp_path / "back.bin"
    assert run("convert", model, str(folder), "--to", "safetensors")[0] == 0
    assert run("convert", str(folder), str(back), "--to", "llama2c")[0] == 0
    assert run("convert", str(back), str(tmp_path / "hf2"), "--to", "safetensors")[0] == 0
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "hf2" / "model.safetensors").read_bytes()
    request = ["--tokenizer", stories[3], "--temperature", "0", "--max-new-tokens", "30"]
    texts = [run("generate", "", "--model", str(m), *request)[1] for m in (model, folder, back)]
    assert len(set(texts)) == 1
    assert_refused(run("convert", model, str(folder), "--to", "safetensors"), "hf", "exists")


@pytest.mark.parametrize("backend", ["jax", "reference"])
def test_a_temperature_beyond_float32_prints_no_warning(backend):
    options = ["--temperature", "1e39", "--seed", "1", "--max-new-tokens", "2", "--backend", backend]
    done = run_llamaspec("generate", "Once", *options)
    assert done.code == 0 and len(done.err.splitlines()) == 1 and "2 new" in done.err


def test_doctor(run, monkeypatch):
    """`doctor` prints all its sections, and names the ops for one model. The next test covers the ops of all models."""
    monkeypatch.setattr("llamaspec.model.insight.doctor.SHAPES", {TYPICAL: SHAPES[TYPICAL]})
    code, out, err = run("doctor")
    assert code == 0, err
    assert all(word in out for word in ("jaxlib", "processor", "norm_qkv", "caches", "verdict"))


@pytest.mark.slow  # 8 s
def test_doctor_for_a_program(run):
    assert json.loads(run("doctor", "--json")[1])["versions"]["numpy"] == np.__version__


def test_version_and_help(run):
    assert run("--version")[1].startswith("llamaspec, version ")
    code, out, _ = run("--help")
    assert code == 0
    for command in cli.VERBS:
        assert command in out
        assert run(command, "--help")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["top-p"]),
        (["--top-p", "nan"], ["top-p"]),
        (["--top-k", "-1"], ["top-k"]),
        (["--min-p", "2"], ["min-p"]),
        (["--repetition-penalty", "0"], ["repetition-penalty"]),
        (["--seed", str(2**70)], ["seed"]),
        (["--seed", "-1"], ["seed"]),
        (["--max-new-tokens", "-1"], ["max-new-tokens"]),
    ],
)
def test_requests_out_of_range_are_refused_before_anything_is_read(run, arguments, words):
    assert_refused(run("generate", "x", "--model", "/no/such/model", *arguments), *words, status=2)


def test_requests_that_this_model_cannot_serve_are_refused(run, stories):
    assert_refused(run("generate", "x", *stories, "--context", "513"), "context", "512")
    assert_refused(run("generate", "x", *stories, "--context", "0"), "context")
    assert_refused(run("generate", "x", *stories, "--kernels", "pallas"), "pallas")
    assert_refused(run("logits", "--tokens", "1,512", *stories, "--out", "x.npy"), "512", "511")
    assert_refused(run("logits", "--tokens", "", *stories, "--out", "x.npy"), "at least one token")


@pytest.mark.sampled(1)  # 2 s each
@pytest.mark.parametrize(("prompt", "hint"), [(__file__, f"--model {__file__}"), ("Once", "")])
def test_a_prompt_that_names_a_file_gets_a_hint(prompt, hint):
    done = run_llamaspec("generate", prompt, "--max-new-tokens", "1", "--temperature", "0")
    assert done.code == 0 and hint in done.err and ("--model" in done.err) == bool(hint)


@pytest.mark.parametrize("verb", ["inspect", "doctor", "bench", "profile", "serve", "chat"])
def test_a_model_is_named_with_or_without_its_option(run, verb):
    refusals = [
        run(verb, *words) for words in (["nothere.gguf"], ["--model", "nothere.gguf"], ["--model=nothere.gguf"])
    ]
    assert_refused(refusals[0], "nothere.gguf")
    assert refusals[1:] == refusals[:1] * 2


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_a_missing_package_names_the_extra_that_installs_it(package, extra):
    missing = ModuleNotFoundError(f"No module named '{package}'", name=package)
    assert one_line(missing) == f"{package} is missing: pip install 'llamaspec[{extra}]'"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.split(r"\W", line.replace("-", "_"))[0] for line in project["optional-dependencies"][extra]}
    assert {"flint": "python_flint"}.get(package, package) in named


def test_wrong_usage(run):
    assert_refused(run("generate", "--temperatur", "1"), "--temperatur", status=2)
    assert_refused(run("generate", "--temperature", "warm"), "warm", status=2)
    assert_refused(run("tell"), "tell", status=2)
    assert_refused(run("generat"), "generat", "Did you mean 'generate'?", status=2)
    assert_refused(run("convert", "a", "b"), "--to", status=2)
    assert_refused(run("inspect", "a", "--model", "b"), "two models: a and b", status=2)
    for verb in (["tune", "stories", "--data", "a", "--out", "b"], ["bench"], ["inspect"]):
        option = "--graph" if verb == ["inspect"] else "--plot"
        assert_refused(run(*verb, option, __file__), option, "ends in .svg", status=2)
    assert_refused(run("eval", __file__), "--text", f"llamaspec eval --text {__file__}", status=2)
    assert_refused(run("eval", "nothere"), "--text FILE", status=2)
    assert_refused(run("tune", "--data", "a", "--out", "b"), "Missing argument 'MODEL'", status=2)
    assert_refused(run("tokens", "Once", "--modle", "a"), "No such option '--modle'", status=2)
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err.startswith("Usage:")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_streams(stories, closed):
    command = [sys.executable, str(REPOSITORY / "cli.py"), "generate", "-", *stories, "--max-new-tokens", "1"]
    done = subprocess.run(f"echo Once | {' '.join(command)} {closed}", shell=True, capture_output=True, text=True)
    assert "fault" not in done.stderr
    if closed == "2>&-":
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Once")
    else:
        assert_refused((done.returncode, done.stdout, done.stderr), "closed", status=1 if closed == ">&-" else 2)


def test_chat_without_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert_refused(run("chat"), "standard input is closed", status=2)


def test_system_errors_are_printed_without_errno(run, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = run("lab", "start", "1", "--into", str(tmp_path / "file"))
    assert (code, err) == (1, f"error: {tmp_path / 'file'}: File exists\n")


def test_sigterm_during_a_conversion_leaves_no_files(stories, tmp_path):
    script = """
import os, signal; from llamaspec import cli
from llamaspec.model.checkpoints.huggingface import write as huggingface_writer
huggingface_writer.check_finite = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
cli.main()
"""
    done = run_python(script, "convert", stories[1], str(tmp_path / "copy"), "--to", "safetensors")
    assert done.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_bad_files_cost_a_line_and_little_memory(data, tmp_path):
    """`generate` refuses each bad file with a one-line error and little memory.

    Each command runs in a separate process, because the test measures the peak memory of a process.
    """
    tokenizer = str(data / "stories260K" / "tok512.model")
    page = tmp_path / "page.bin"
    page.write_text("<!DOCTYPE html><html><body>404</body></html>")
    cut = tmp_path / "cut.bin"
    cut.write_bytes((data / "stories260K" / "stories260K.bin").read_bytes()[:-1])
    huge = tmp_path / "huge.bin"
    huge.write_bytes(np.array([2**30, 2**30, 2**30, 4, 4, 2**30, 2**30], np.int32).tobytes() + bytes(1000))
    for path in (page, cut, huge, tmp_path / "absent.bin"):
        result = run_llamaspec("generate", "x", "--model", str(path), "--tokenizer", tokenizer)
        assert_refused(result, path.name)
        assert result.peak < MEMORY
    other_tokenizer = str(data / "llama2-tokenizer" / "tokenizer.model")
    result = run_llamaspec(
        "generate", "x", "--model", str(data / "stories260K" / "stories260K.bin"), "--tokenizer", other_tokenizer
    )
    assert_refused(result, "32000", "512")


def test_a_context_that_does_not_fit_is_refused_before_it_is_allocated(tmp_path):
    """A tiny model with 2^30 positions in its config is refused before its KV cache of several TB is allocated."""
    config = FAMILIES["llama-2"] | {"max_position_embeddings": 2**30}
    write_checkpoint(tmp_path, config)
    result = run_llamaspec(
        "logits", "--tokens", "1,2", "--model", str(tmp_path), "--context", str(2**30), "--out", str(tmp_path / "x")
    )
    assert_refused(result, "do not fit", "context")
    assert result.peak < MEMORY


def test_a_closed_pipe_is_no_error(stories):
    arguments = " ".join(["generate", "''", *stories, "--seed", "1"])
    done = subprocess.run(
        f"{sys.executable} {REPOSITORY / 'cli.py'} {arguments} | head -c 4",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout) == 4
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
