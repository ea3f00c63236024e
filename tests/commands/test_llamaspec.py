"""`import llamaspec`: the public Python API."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import llamaspec
from tests.support.processes import REPOSITORY
from tests.support.refusals import mentions


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder `cwd`, with the repository on PYTHONPATH. Modules in `cwd` take precedence."""
    script = "import sys; sys.path.append(sys.argv.pop(1)); "
    if arguments[0] == "-m":
        module, *arguments_left = arguments[1:]
        script += f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    else:
        script, arguments_left = script + arguments[1], []
    command = [sys.executable, "-S", "-c", script, str(REPOSITORY), *arguments_left]
    packages = ":".join(path for path in sys.path if path.endswith("site-packages"))
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={"PYTHONPATH": f"{cwd}:{packages}"})


def test_each_name_is_there_and_is_listed():
    for name in llamaspec.__all__:
        assert callable(getattr(llamaspec, name))
        assert name in dir(llamaspec)
    assert {"main", "os", "leave"}.isdisjoint(dir(llamaspec))
    assert llamaspec.__doc__ and all(name in llamaspec.__doc__ for name in ("load", "Chat", "contract"))
    with pytest.raises(AttributeError, match="nothing"):
        llamaspec.nothing  # noqa: B018


def test_importing_is_quick(tmp_path):
    done = python("-c", "import llamaspec; print(*sys.modules)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"jax", "numpy", "click", "llamaspec.model", "llamaspec.verify"}.isdisjoint(done.stdout.split())


@pytest.mark.slow  # 8 s
def test_the_examples_run(capsys):
    """The examples in the package's docstring run; the test lets them generate fewer tokens."""
    assert llamaspec.__doc__
    blocks = re.findall(r"(?:^    .*\n|^\n)+", llamaspec.__doc__, re.MULTILINE)
    code = [textwrap.dedent(block) for block in blocks if block.strip()]
    generate, look, chat, _ = code
    assert "generate(" in generate and "Chat(" in chat
    space: dict = {}
    exec(generate.replace("max_new_tokens=100", "max_new_tokens=5"), space)
    assert capsys.readouterr().out.startswith("Once upon a time, ")
    exec(look, space)
    assert capsys.readouterr().out == "Once upon a time,\n"
    exec(chat.replace("reply(question,", "reply(question, max_new_tokens=5,"), space)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_encoding_and_decoding_round_trip():
    llama = llamaspec.load("stories", backend="reference", context=16)
    ids = llama.encode("Once upon a time")
    assert llama.decode(ids) == llama.decode(iter(ids[1:])) == "Once upon a time"
    with pytest.raises(ValueError, match=r"token id.* 0\b"):
        llama.decode([10_000])


def test_ids_and_texts_are_told_apart(tmp_path):
    """Methods that expect token ids refuse a string, and methods that expect a string refuse ids.

    The test uses a separate process, because beartype would refuse the arguments first.
    """
    script = textwrap.dedent("""
        from llamaspec import load
        llama = load("stories", backend="reference", context=16)
        for call in (lambda: llama.logits("Once"), lambda: llama.decode("Once"), lambda: llama.generate([1, 2])):
            try:
                call()
            except TypeError as error:
                print(error)
    """)
    done = python("-c", script, cwd=tmp_path)
    expected = ["ids Llama.encode", "ids Llama.encode", "list ids logits decode continue_ids"]
    messages = done.stdout.splitlines()
    assert len(messages) == 3 and all(map(mentions, messages, expected)), done.stderr


def test_loading_prints_its_stages_on_request(capsys):
    llamaspec.load("stories", backend="reference", context=8, progress=True)
    assert capsys.readouterr() == ("", "checking weights\n")


@pytest.mark.parametrize("name", ["model.py", "model/__init__.py", "reference.py", "verify/__init__.py", "cli.py"])
def test_a_users_module_with_our_name_does_not_conflict(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine = True")
    own = name.split(".")[0].split("/")[0]
    done = python("-c", f"import {own}; from llamaspec import contract, load; assert {own}.mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = python("-m", "llamaspec", "tokens", "Once", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
