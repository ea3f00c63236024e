"""Looks up models by their Hugging Face Hub name (owner/name) in the Hub's cache, and says how to download them."""

from __future__ import annotations

import os
import re
from pathlib import Path

NAME = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


def find_in_cache(model: str) -> Path | None:
    """Find the snapshot of `owner/name` or `owner/name@revision` in the Hub's cache; None if the cache lacks it.

    Without a revision, we return the snapshot of the branch `main`, or the newest snapshot if the cache lacks `main`.
    If the snapshot has exactly one GGUF file and no config.json, we return the path of this file instead.
    """
    matched = NAME.fullmatch(model)
    if not matched:
        return None
    folder = cache_folder() / f"models--{matched['owner']}--{matched['name']}"
    revision = matched["revision"] or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        if matched["revision"]:
            return None
        snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
        if not snapshots:
            return None
        snapshot = max(snapshots, key=lambda path: path.stat().st_mtime)
    files = list(snapshot.glob("*.gguf"))
    return files[0] if len(files) == 1 and not (snapshot / "config.json").exists() else snapshot


def cache_folder() -> Path:
    """Return the folder in which Hugging Face's own programs store downloads."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    return Path(home) / "hub" if home else Path.home() / ".cache" / "huggingface" / "hub"


def how_to_download(model: str) -> str | None:
    """Return the command that downloads `model`; None if `model` does not have the form of a Hub name (owner/name)."""
    matched = NAME.fullmatch(model)
    if not matched:
        return None
    repository, revision = f"{matched['owner']}/{matched['name']}", matched["revision"]
    version = f" --revision {revision}" if revision else ""
    return f"hf download {repository}{version} --local-dir {matched['name']}"
