"""The form iq4_nl (ggml's IQ4_NL): each code is an index into a table of sixteen integer levels."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.words import LevelWords
from llamaspec.pallas_kernels.parts.levels import Levels
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL_LEVELS


class IQ4NL(QuantizedMatrix):
    """A matrix of IQ4_NL codes.

    The sixteen levels are the bytes of four words: two bits of a code select the word, and two bits select the byte.
    """

    __slots__ = ()
    form = "iq4_nl"

    @staticmethod
    def decode(codes: Array) -> Array:
        words = IQ4_NL_LEVELS.astype(np.int8).view("<i4").astype(np.int32)
        codes = codes.astype(jnp.int32)
        lower, upper = (jnp.where((codes & 4) != 0, words[i + 1], words[i]) for i in (0, 2))
        word = jnp.where((codes & 8) != 0, upper, lower)
        above = 24 - 8 * (codes & 3)  # number of bits above the byte; the shifts remove them and extend the sign
        return (word << above >> 24).astype(jnp.float32)


class IQ4NLWords(LevelWords):
    """A matrix of IQ4_NL codes in the layout of the kernels."""

    __slots__ = ()
    form = "iq4_nl"
    kernel_levels = Levels.of(IQ4_NL_LEVELS.astype(np.float64), unit=1.0, group=32)
