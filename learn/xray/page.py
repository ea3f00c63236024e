"""The X-ray page: a folder that a browser opens from the file system, with nothing loaded from elsewhere.

    recording = record(model, tokens, config=config, dtype="float32", layers=default_layers(config))
    index = write_page(Path("xray"), recording, checkpoint, name="stories", text_of=text_of)

A page that is opened from a file may load scripts, but may not read data. So the data are scripts, too:
`data/model.js`, and `data/token-N.js` for each token that can be chosen, which the page loads when it is.
"""

import json
import math
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

from learn.trace import Recording
from learn.xray.content import Progress, TextOf, model_content, token_content
from model.checkpoints.checkpoint import Checkpoint
from model.checkpoints.staging import new_directory

MARK = '<meta name="generator" content="llamaspec xray">'
BUDGET = 12_000_000  # bytes of the tokens' data: the newest tokens that fit can be chosen
MOST = 32  # tokens that can be chosen


def check_folder(folder: Path) -> None:
    """Raise FileExistsError unless the page may be written there: into nothing, an empty folder, or an older page."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    index = folder / "index.html"
    if not index.is_file() or MARK not in index.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{folder} holds something else than a page of xray: name another folder")


def write_page(
    folder: Path,
    recording: Recording,
    checkpoint: Checkpoint,
    *,
    name: str,
    text_of: TextOf,
    progress: Progress = lambda stage, share: None,
) -> Path:
    """Write the page of a recorded walk into `folder`, and give the path of its index.html.

    Raises FileExistsError as `check_folder` does; an older page is replaced. A new folder appears when it is complete.
    """
    check_folder(folder)
    tokens = _tokens(recording, text_of, progress)
    model = model_content(recording, checkpoint, name=name, text_of=text_of, progress=progress)
    model["chosen"] = sorted(tokens)
    scripts = {"model": f"XRAY.model = {_json(model)};"}
    scripts |= {f"token-{position}": script for position, script in tokens.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext(folder) if folder.exists() else new_directory(folder) as staged:
        data = staged / "data"
        data.mkdir(exist_ok=True)
        for old in data.glob("token-*.js"):
            old.unlink()
        for file in files("learn.xray").joinpath("page").iterdir():
            (staged / file.name).write_bytes(file.read_bytes())
        for name, script in scripts.items():
            (data / f"{name}.js").write_text(script + "\n", encoding="utf-8", newline="\n")
    return folder / "index.html"


def _tokens(recording: Recording, text_of: TextOf, progress: Progress) -> dict[int, str]:
    """Make the scripts of the newest tokens, as many as the budget allows, and one at least."""
    scripts: dict[int, str] = {}
    newest = range(len(recording.tokens))[::-1][:MOST]
    left = BUDGET
    for done, position in enumerate(newest):
        script = f"XRAY.tokens[{position}] = {_json(token_content(recording, position, text_of=text_of))};"
        left -= len(script)
        if left < 0 and scripts:
            break
        scripts[position] = script
        progress("tokens", done / len(newest))
    return scripts


def _json(value: Any) -> str:
    return json.dumps(_without_infinities(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _without_infinities(value: Any) -> Any:
    """Put null for numbers that JSON has not: a broken op may be infinitely far from its definition."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _without_infinities(each) for key, each in value.items()}
        case list() | tuple():
            return [_without_infinities(each) for each in value]
        case _:
            return value
