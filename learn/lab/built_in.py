"""The built-in model for the definition: weights in float64, configuration and vocabulary.

A browser tab has neither JAX nor the libraries that read checkpoints. `make docs` writes what `exported` returns to a
file next to this module, in the tab's copy of the sources; `built_in` then reads that file.
"""

import pickle
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamaspec.reference.config import Config
from llamaspec.reference.llama import Params
from llamaspec.reference.sentencepiece_bpe import Piece, Vocabulary

EXPORTED = Path(__file__).with_name("built_in.pickle")


class BuiltIn(NamedTuple):
    params: Params
    config: Config
    vocabulary: Vocabulary
    start: int  # the id that begins every text
    stops: frozenset[int]  # the ids that end a text


@cache
def built_in() -> BuiltIn:
    """Read the built-in model."""
    if EXPORTED.is_file():
        return pickle.loads(exported())
    # Imported here, since a tab does not have them.
    from sentencepiece import SentencePieceProcessor

    from llamaspec.model.checkpoints.open import open_checkpoint
    from llamaspec.model.running.reference_backend import load_reference_params

    checkpoint = open_checkpoint("stories")
    pieces = SentencePieceProcessor(model_file=str(Path(checkpoint.path) / "tokenizer.model"))
    text = {
        pieces.id_to_piece(i): Piece(i, pieces.get_score(i))
        for i in range(pieces.vocab_size())
        if not (pieces.is_byte(i) or pieces.is_control(i) or pieces.is_unknown(i))
    }
    in_order = [pieces.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    vocabulary = Vocabulary(text, in_order, pieces.unk_id())
    params = load_reference_params(checkpoint)
    return BuiltIn(params, checkpoint.config, vocabulary, pieces.bos_id(), checkpoint.stops)


@cache
def exported() -> bytes:
    """Pickle the built-in model for a tab, with 2 bytes for each weight: it is stored in bfloat16."""
    if EXPORTED.is_file():
        return EXPORTED.read_bytes()
    file = BytesIO()
    _Exporter(file).dump(built_in())
    return file.getvalue()


class _Exporter(pickle.Pickler):
    def reducer_override(self, part: Any, /) -> Any:
        if not isinstance(part, np.ndarray):
            return NotImplemented
        bits = part.astype(np.float32).view(np.uint32)
        upper = (bits >> 16).astype(np.uint16)
        if not np.array_equal(_widened(upper.tobytes(), part.shape), part):
            raise ValueError("expected weights that bfloat16 represents exactly")
        return _widened, (upper.tobytes(), part.shape)


def _widened(upper: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """Restore float64 numbers from the upper halves of their bits in float32."""
    bits = np.frombuffer(upper, np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64).reshape(shape)
