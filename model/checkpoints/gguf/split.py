"""Models that are split over several GGUF files, as llama-gguf-split names them: NAME-00001-of-00003.gguf and so on.

The first file has the model's keys; every file has its own table of tensors, and states
its number and the number of files.
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
HOW_TO_MERGE = "or merge them, with llama-gguf-split --merge"


class Located(NamedTuple):
    """The location of a tensor, in one of the parts."""

    file: MappedFile
    entry: GGUFEntry


def locate(file: MappedFile, header: Header) -> dict[str, Located]:
    """Locate the tensors of a file, and also of the other parts if the file is the first of several.

    Raises `CheckpointError` if `file` is a part but not the first, if a part is missing or belongs to another model,
    and if the parts together do not have as many tensors as the first one states.
    """
    metadata = header.metadata
    count = metadata.integer(COUNT, 1)
    located = {name: Located(file, entry) for name, entry in header.tensors.items()}
    if count <= 1:
        return located
    for number, path in enumerate(_paths(metadata, count)[1:], start=1):
        if outside := leads_out(path):
            raise refused(path, f"is a link to {outside}, outside the model's folder")
        part = MappedFile(path)
        part_header = read_header(part)
        _check_number(part_header.metadata, number, count)
        for name, entry in part_header.tensors.items():
            if name in located:
                raise refused(path, f"tensor {quoted(name)} is in {Path(located[name].file.path).name}, too")
            located[name] = Located(part, entry)
    if len(located) != (stated := metadata.integer(TENSORS, len(located))):
        raise metadata.refused(f"{TENSORS} is {stated}, but its {count} parts have {len(located)} tensors")
    return located


def _paths(metadata: Metadata, count: int) -> list[Path]:
    """Name the files of all parts, given the metadata of the first."""
    path = Path(metadata.path)
    what = f"is one of {count} parts"
    if count > MOST_PARTS:
        raise metadata.refused(f"{what}, more than {MOST_PARTS}")
    named = NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise metadata.refused(f"{what}, but is not named NAME-00001-of-{count:05}.gguf: name all so, {HOW_TO_MERGE}")
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if metadata.integer(NUMBER, 0) != 0 or path != paths[0]:
        raise metadata.refused(f"{what}, and not the first: name {paths[0].name}, {HOW_TO_MERGE}")
    return paths


def _check_number(metadata: Metadata, number: int, count: int) -> None:
    """Check that a part's keys state the same number and count as the part's file name."""
    number_and_count = metadata.integer(NUMBER), metadata.integer(COUNT)
    if number_and_count != (number, count):
        actual = f"{NUMBER} {number_and_count[0]} and {COUNT} {number_and_count[1]}"
        what = f"{actual} are not those of its name, {number} and {count}"
        raise metadata.refused(what)
