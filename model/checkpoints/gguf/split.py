"""Reads models that llama-gguf-split has split into several files: NAME-00001-of-00003.gguf and so on.

The first file has the model's keys. Every file has a table of its own tensors, and states its position among the files
and the number of files.
"""

import re
from pathlib import Path
from typing import NamedTuple

from llamaspec.model.checkpoints.checkpoint import quoted, refused
from llamaspec.model.checkpoints.gguf.file import GGUFEntry, Header, Metadata, read_header
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.recognize import leads_out

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
MOST_PARTS = 10_000
NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
HOW_TO_MERGE = "or merge the parts with llama-gguf-split --merge"


class Located(NamedTuple):
    """The location of a tensor: the file of its part, and its entry in this file."""

    file: MappedFile
    entry: GGUFEntry


def locate(file: MappedFile, header: Header) -> dict[str, Located]:
    """Locate the tensors of a model, given its only file or the first of its files.

    Raises `CheckpointError` if `file` is a part but not the first, if a part is missing, or if the numbers in a part's
    keys and in its file name differ. Also raises it if a tensor occurs twice, or if the parts together do not have as
    many tensors as the first part states.
    """
    metadata = header.metadata
    count = metadata.integer(COUNT, 1)
    located = {name: Located(file, entry) for name, entry in header.tensors.items()}
    if count <= 1:
        return located
    for number, path in enumerate(_paths(metadata, count)[1:], start=1):
        if outside := leads_out(path):
            raise refused(path, f"is a link to {outside}, outside the model's folder, so it is not read")
        part = MappedFile(path)
        part_header = read_header(part)
        _check_number(part_header.metadata, number, count)
        for name, entry in part_header.tensors.items():
            if name in located:
                raise refused(path, f"tensor {quoted(name)} is also in {Path(located[name].file.path).name}")
            located[name] = Located(part, entry)
    if len(located) != (stated := metadata.integer(TENSORS, len(located))):
        raise metadata.refused(f"{TENSORS} is {stated}, but the model's {count} parts have {len(located)} tensors")
    return located


def _paths(metadata: Metadata, count: int) -> list[Path]:
    """List the paths of all parts, given the first part's keys. Raises `CheckpointError` for keys of a later part."""
    path = Path(metadata.path)
    what = f"is one of {count} parts of a model"
    if count > MOST_PARTS:
        raise metadata.refused(f"{what}, expected at most {MOST_PARTS} parts")
    named = NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        how = f"rename all parts in this way, {HOW_TO_MERGE}"
        raise metadata.refused(f"{what}, but its name does not have the form NAME-00001-of-{count:05}.gguf: {how}")
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if metadata.integer(NUMBER, 0) != 0 or path != paths[0]:
        how = f"give the path of the first part, {paths[0].name}, {HOW_TO_MERGE}"
        raise metadata.refused(f"{what}, but not the first part: {how}")
    return paths


def _check_number(metadata: Metadata, number: int, count: int) -> None:
    """Check that the number of a part and the number of parts in its keys match those in its file name."""
    number_and_count = metadata.integer(NUMBER), metadata.integer(COUNT)
    if number_and_count != (number, count):
        actual = f"{NUMBER} {number_and_count[0]} and {COUNT} {number_and_count[1]}"
        raise metadata.refused(f"{actual} do not match the file's name, which implies {number} and {count}")
