"""Writes a model as an ONNX file, and its weights in a data file next to it."""

from collections.abc import Callable
from pathlib import Path

from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.onnx.graph import llama_graph
from llamaspec.model.checkpoints.staging import new_file, refuse_existing


def write_onnx(
    checkpoint: Checkpoint, path: str | Path, *, progress: Callable[[str, int], None] | None = None
) -> list[str]:
    """Write the graph of `checkpoint` to the new file `path`, and its weights to `path` with `.data` appended.

    We write tensor by tensor. Two files with the same name, from the same checkpoint, have the same bytes. After each
    tensor, we call `progress` with its name and its number of bytes. Returns notes for the user, one line each.

    Raises `CheckpointError`, and leaves no file behind, if one of the two files exists, if the disk is full, if a
    weight is not finite, or if ONNX files of such models are not supported.
    """
    path = Path(path)
    data = path.with_name(f"{path.name}.data")
    model, stored, decoded, positions = llama_graph(checkpoint, data=data.name)
    with new_file(path) as staged, new_file(data) as staged_data:
        staged.write_bytes(model.SerializeToString(deterministic=True))
        with open(staged_data, "wb") as file:
            for name, write in stored:
                size = write(file)
                checkpoint.release()
                if progress:
                    progress(name, size)
        refuse_existing(path)  # before the data file appears, since it appears first
    notes = [f"the weights are in {data}: keep both files in one folder"]
    if decoded:
        more = f" and {len(decoded) - 1} more" if decoded[1:] else ""
        notes.append(f"quantized tensors that become float32: {decoded[0]}{more}")
    if positions < checkpoint.config.context:
        what = f"sequences of up to {positions} tokens, of {checkpoint.config.context} that the model supports"
        notes.append(f"the file is for {what}: LongRoPE rotates longer sequences by other angles")
    return notes
