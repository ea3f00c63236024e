"""Lists the files of a model to copy together with its weights: tokenizer, chat templates, pooling."""

from pathlib import Path

from llamaspec.model.checkpoints.pooling import MODULES, modules
from llamaspec.model.checkpoints.recognize import leads_out

NAMES = (
    "tokenizer.json", "tekken.json", "tokenizer.model", "tokenizer.bin", "vocab.json", "merges.txt",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    MODULES, "config_sentence_transformers.json", "sentence_bert_config.json",
)  # fmt: skip
OF_MODULES = ("config.json", "model.safetensors")  # files in the folder of a module of sentence-transformers
PATTERNS = ("tokenizer.model.v*", "additional_chat_templates/*.jinja")  # Mistral's tokenizers, and named templates


def companions(folder: Path) -> tuple[list[str], list[str]]:
    """List the paths (relative to `folder`) of the files to copy, and a message for each file that we do not copy.

    We do not copy a link that leads out of the folder, since a copy could publish a private file of this machine.
    Raises `CheckpointError` if modules.json cannot be used.
    """
    copied, notes = [], []
    files = [folder / name for name in NAMES]
    files += [folder / path / name for _, path in modules(folder) if path for name in OF_MODULES]
    files += [path for pattern in PATTERNS for path in sorted(folder.glob(pattern))]
    for path in files:
        if not path.is_file():
            continue
        if outside := leads_out(path) or (leads_out(path.parent) if path.parent != folder else None):
            notes.append(f"{path} is not copied: it is a link to {outside}, outside the model's folder")
        else:
            copied.append(str(path.relative_to(folder)))
    return copied, notes
