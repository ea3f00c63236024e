"""Writes the X-ray page: a folder that a browser opens from the file system and that loads nothing else.

    recording = record(model, tokens, config=config, dtype="float32", layers=default_layers(config))
    index = write_page(Path("xray"), recording, checkpoint, name="stories", text_of=text_of)

A page that is opened as a file may load scripts, but may not read data. So the data are scripts, too: `model.js`, and
`token-N.js` for each token, which the page loads when a reader chooses that token. All files except index.html are in a
folder next to it. A new page gets a different folder from the old page, and becomes visible when we write its
index.html.
"""

import json
import math
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from llamaspec.learn.trace import Recording
from llamaspec.learn.xray.content import Progress, TextOf, model_content, token_content
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.staging import new_directory, new_file

MARK = '<meta name="generator" content="llamaspec xray">'
BUDGET = 12_000_000  # bytes for the data of tokens; a reader can choose the newest tokens that fit
MOST = 32  # largest number of tokens that a reader can choose
DATA = ("data-1", "data-2")  # folders for the data; a new page uses the folder that the old page does not use
UNFINISHED = re.compile(rf"\.({'|'.join(DATA)}|index\.html)\.[0-9a-f]{{8}}\.partial")  # of `model.checkpoints.staging`


def check_folder(folder: Path) -> None:
    """Raise FileExistsError unless the folder is missing, empty, or contains an older page."""
    if not folder.exists() or (folder.is_dir() and all(map(_is_left, folder.iterdir()))):
        return
    index = folder / "index.html"
    if not index.is_file() or MARK not in index.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{folder} contains files that xray did not write: choose a different folder")


def write_page(
    folder: Path,
    recording: Recording,
    checkpoint: Checkpoint,
    *,
    name: str,
    text_of: TextOf,
    progress: Progress = lambda stage, share: None,
) -> Path:
    """Write the page of a recording into `folder`, and return the path of its index.html.

    Raises FileExistsError as `check_folder` does. The page appears, or replaces an older one, only when it is complete.
    """
    check_folder(folder)
    tokens = _tokens(recording, text_of, progress)
    model = model_content(recording, checkpoint, name=name, text_of=text_of, progress=progress)
    model["chosen"] = sorted(tokens)
    scripts = {"model": f"XRAY.model = {_json(model)};"}
    scripts |= {f"token-{position}": script for position, script in tokens.items()}
    if folder.exists():
        _fill(folder, scripts)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_directory(folder) as staged:
            _fill(staged, scripts)
    return folder / "index.html"


def data_of(index: Path) -> Path:
    """Return the data folder that index.html names: one of the two in `DATA`.

    A new page always uses the other folder. If there is no page yet, this function returns the second folder, so that
    the new page uses the first.
    """
    page = index.read_text(encoding="utf-8", errors="replace") if index.exists() else ""
    return index.parent / next((name for name in DATA if f'"{name}/' in page), DATA[-1])


def _is_left(file: Path) -> bool:
    """Return whether a killed process left this file or folder behind.

    The name decides. A data folder must also have a file state.js, because a user's own folder may have this name.
    """
    return bool(UNFINISHED.fullmatch(file.name)) or (file.name in DATA and (file / "state.js").is_file())


def _fill(folder: Path, scripts: dict[str, str]) -> None:
    """Write a page into a folder that is empty or contains an older page.

    The older page works until the new one is complete.
    """
    index = folder / "index.html"
    older = data_of(index)
    data = next(folder / name for name in DATA if folder / name != older)
    if data.exists():  # left behind by a killed process
        shutil.rmtree(data)
    page = {file.name: file.read_bytes() for file in files("llamaspec.learn.xray").joinpath("page").iterdir()}
    start = page.pop(index.name).replace(b'"data/', f'"{data.name}/'.encode())
    with new_directory(data) as staged:
        for name, content in page.items():
            (staged / name).write_bytes(content)
        for name, script in scripts.items():
            (staged / f"{name}.js").write_text(script + "\n", encoding="utf-8", newline="\n")
    with new_file(index, replace=True) as staged:
        staged.write_bytes(start)
    if older.exists():
        shutil.rmtree(older)


def _tokens(recording: Recording, text_of: TextOf, progress: Progress) -> dict[int, str]:
    """Make a script for each of the last tokens of the text: as many as fit into `BUDGET`, but at least one."""
    scripts: dict[int, str] = {}
    newest = range(len(recording.tokens))[::-1][:MOST]
    budget = BUDGET
    for done, position in enumerate(newest):
        script = f"XRAY.tokens[{position}] = {_json(token_content(recording, position, text_of=text_of))};"
        budget -= len(script)
        if budget < 0 and scripts:
            break
        scripts[position] = script
        progress("tokens", done / len(newest))
    return scripts


def _json(value: Any) -> str:
    return json.dumps(_without_infinities(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _without_infinities(value: Any) -> Any:
    """Replace infinities and NaN by None, because JSON lacks them. The error of a broken op may be infinite."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _without_infinities(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_infinities(item) for item in value]
        case _:
            return value
