"""README and docs: the commands and code that they show run, and the files that they name exist.

The language of a fenced block decides how it is checked: a `console` block runs and its output is compared, `sh` and
`python` blocks run, and a `text` block is a drawing. A block that begins with "# download" needs a download and does
not run; the files that its commands name must come from commands that the documents show.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.processes import REPOSITORY

README = REPOSITORY / "README.md"
DOCUMENTS = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "model/stories/README.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
BUILT_IN = {"stories"}
PLACEHOLDER = re.compile(r"[A-Z0-9_]+(\.\w+)?")  # MODEL, FILE.gguf
# Arguments that name a model or a file: per command, how many leading positional arguments; and options.
MODELS_FIRST = {"inspect": 1, "convert": 1, "eval": 1, "bench": 1, "profile": 1}
FILE_OPTIONS = {"--model", "--tokenizer", "--text", "--against", "--calibration"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/?)`")
SUFFIXES = (".py", ".md", ".json", ".toml", ".svg")


class Block(NamedTuple):
    language: str
    text: str

    @property
    def needs_download(self) -> bool:
        return self.text.startswith("# download")


def blocks(document: Path) -> list[Block]:
    return [Block(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.M | re.S)]


def readme_blocks(language: str) -> list[str]:
    return [block.text for block in blocks(README) if block.language == language and not block.needs_download]


def commands(text: str) -> Iterator[list[str]]:
    """Split each command of a block into arguments, without comments."""
    for line in text.splitlines():
        if words := shlex.split(line.removeprefix("$ "), comments=True):
            yield words


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder that commands may write to, with the documents at the same paths as in a clone."""
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    return tmp_path


def run(line: str, folder: Path) -> str:
    """Run a command from a document and return its stdout.

    The exit status must be 0, or 1 if `verify` finds a violation.
    """
    if line.startswith("make "):
        line = makefile_command(line)
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or (done.returncode == 1 and "violated" in done.stdout), f"{line}\n{done.stderr}"
    return done.stdout


def makefile_command(line: str) -> str:
    """Return the last command that a Makefile target runs, without the `.venv/bin/` prefix."""
    dry = subprocess.run([*line.split(), "-n"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    *_, last = re.findall(r"\.venv/bin/(.*)", dry.replace("\\\n", ""))
    return last


def timeless(text: str) -> str:
    return re.sub(r"\d+\.\d s\b", "0.0 s", text)


@pytest.mark.slow  # 10 s
@pytest.mark.parametrize("text", readme_blocks("console"))
def test_a_shown_session_is_what_comes_out(text: str, folder: Path):
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        line, _, output = part.partition("\n")
        if line != "source .venv/bin/activate":
            assert timeless(run(line, folder)).split() == timeless(output).split()  # README breaks long lines


@pytest.mark.slow  # 9 s
@pytest.mark.parametrize("line", [line for text in readme_blocks("sh") for line in text.splitlines()])
def test_a_command_that_needs_no_download_runs(line: str, folder: Path):
    assert run(line, folder)


@pytest.mark.slow  # 8 s
@pytest.mark.parametrize("text", readme_blocks("python"))
def test_python_runs_and_prints_prompt_and_text(text: str, folder: Path):
    (folder / "block.py").write_text(text)
    out = run("python block.py", folder)
    assert out.startswith("Once upon a time") and len(out) > 100


def test_every_block_of_readme_has_a_language_that_is_checked():
    assert {block.language for block in blocks(README)} == {"console", "sh", "python", "text"}
    assert README.read_text().count("\n") <= 107


def made_by(words: list[str]) -> list[str]:
    """List the files and folders that a command creates."""
    match words:
        case ["hf", "download", _, *rest]:
            place = rest[rest.index("--local-dir") + 1]
            files = rest[: rest.index("--local-dir")]
            return [place, *(f"{place}/{file}" for file in files)]
        case ["curl", *rest]:
            return [rest[rest.index("-o") + 1]]
        case ["llamaspec", "convert", _, out, *_]:
            return [out]
        case ["llamaspec", "tune", *rest] if "--out" in rest and "--lora" not in rest:
            return [f"{rest[rest.index('--out') + 1]}/model"]
    return []


def named_by(words: list[str]) -> list[str]:
    """List the models and files that a `llamaspec` command reads."""
    if words[0] != "llamaspec":
        return []
    options = FILE_OPTIONS - ({"--against"} if words[1] == "verify" else set())  # for `verify` it is a function
    named = [words[i + 1] for i, word in enumerate(words[:-1]) if word in options]
    first = words[2 : 2 + MODELS_FIRST.get(words[1], 0)]
    return named + [word for word in first if not word.startswith("-")]


def test_commands_name_only_files_that_the_documents_tell_how_to_get():
    typed = [words for document in DOCUMENTS for block in blocks(document) for words in commands_of(block)]
    there = BUILT_IN | {file for words in typed for file in made_by(words)}
    named = {file for words in typed for file in named_by(words)}
    assert {"Qwen3-0.6B", "tinyllamas/stories15M.bin"} <= named
    missing = {file for file in named - there if not PLACEHOLDER.fullmatch(file) and not (REPOSITORY / file).exists()}
    assert missing == set()


def commands_of(block: Block) -> Iterator[list[str]]:
    if block.language in ("sh", "console", ""):
        lines = block.text.splitlines()
        typed = [line for line in lines if re.match(r"(\$ )?(llamaspec|hf|curl) ", line)]
        yield from (words for line in typed for words in commands(line))


def test_a_model_that_nobody_tells_how_to_get_would_be_seen():
    assert named_by(shlex.split("llamaspec chat --model Llama-9")) == ["Llama-9"]
    assert named_by(shlex.split("llamaspec convert Llama-9 out --to gguf")) == ["Llama-9"]
    assert made_by(shlex.split("hf download a/b c.bin --local-dir d")) == ["d", "d/c.bin"]


def test_docs_models_has_the_full_command_of_every_download():
    downloads = [words for block in blocks(README) for words in commands_of(block) if words[0] == "hf"]
    page = [words for block in blocks(REPOSITORY / "docs/models.md") for words in commands_of(block)]
    assert downloads and all(words in page for words in downloads)


def broken(document: Path) -> list[str]:
    """List the document's broken links, and the paths in backquotes that do not exist."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    wrong = [link for link in links if link and not (document.parent / link).exists()]
    paths = [path for path in PATH.findall(text) if "/" in path and path.endswith(("/", *SUFFIXES))]
    own_paths = [path for path in paths if not path.startswith(("benchmarks/results/raw", "tinyllamas", "stories260K"))]
    return wrong + [path for path in own_paths if not any((at / path).exists() for at in (REPOSITORY, document.parent))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.relative_to(REPOSITORY).as_posix() for path in DOCUMENTS])
def test_links_and_paths_lead_somewhere(document: Path):
    assert broken(document) == []


def test_a_path_that_leads_nowhere_would_be_seen(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "[a](nowhere.md), [b](page.md#here), [c](https://example.org), `reference/no.py`, `reference/rope.py`\n"
    )
    assert broken(page) == ["nowhere.md", "reference/no.py"]
