"""Mixtures of ggml's types, such as llama.cpp's Q4_K_M: a table of them, and rules for the type of each matrix.

(https://github.com/ggml-org/llama.cpp, src/llama-quant.cpp: llama_tensor_get_type, with its switches as they are in
llama-cpp-python 0.3.36. tests/goldens/mixtures.json has llama.cpp's choices for each architecture that we write.) A
matrix gets the type of the first rule below that applies, and if none applies, the mixture's main type:

            main     attn_v, attn_qkv                   ffn_down                           attn_output
    q2_k    Q2_K     Q4_K if gqa, else Q3_K             Q3_K                               Q5_K if eight, else Q3_K
    q3_k_m  Q3_K     Q5_K in two layers, else Q4_K      Q5_K in a 16th, else Q4_K          Q5_K if eight, else Q4_K
    q4_k_m  Q4_K     Q6_K in more                       Q6_K in more                       Q5_K if eight
    q5_k_m  Q5_K     Q6_K in more                       Q6_K in more
    q6_k    Q6_K
    iq4_nl  IQ4_NL   Q5_K if gqa                        Q5_K in an 8th, if unweighted      Q5_K if eight

gqa: at least 4 query heads share a kv head. eight: the layer has 8 experts. unweighted: no importance matrix is given.
In two layers, in a 16th, in an 8th: in the first two layers, or in the first 16th or 8th of the layers. In more: in the
first and last eighth of the layers, and in every third layer between these. Then, for every mixture:

- The output matrix, or an embedding that is also the output, gets Q6_K.
- With 8 experts, attn_v and attn_k get Q8_0.
- In models that llama.cpp counts as 70B, attn_v gets Q5_K instead of Q3_K or Q4_K. These are models with 80 layers of
  the architecture qwen2, or of llama with fewer kv heads than heads.
- If a row does not consist of whole superblocks of 256 weights, a type with blocks of 32 replaces the type of the
  matrix (`INSTEAD`). If the length of a row is not a multiple of 32, llama.cpp stores the matrix in float16, or refuses
  it; we always store it in float16.
"""

from collections.abc import Callable
from typing import NamedTuple

from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.ggml import TYPES

INSTEAD = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
V = ("attn_v", "attn_qkv")
OTHERWISE = "F16"  # for rows that are no multiple of 32


class Place(NamedTuple):
    """The facts about a matrix and its model that the rules of a mixture ask for."""

    config: Config
    layer: int
    weighted: bool  # whether an importance matrix is given

    @property
    def gqa(self) -> bool:
        return self.config.heads // self.config.kv_heads >= 4

    @property
    def eight(self) -> bool:
        return self.config.experts == 8

    @property
    def more(self) -> bool:
        layers, eighth = self.config.layers, self.config.layers // 8
        return self.layer < eighth or self.layer >= 7 * layers // 8 or (self.layer - eighth) % 3 == 2

    def first(self, share: int) -> bool:
        """Tell whether the layer is in the first `share`-th of the layers."""
        return self.layer < self.config.layers // share


def _always(place: Place) -> bool:
    return True


Rules = tuple[tuple[Callable[[Place], bool], str], ...]


class Mixture(NamedTuple):
    """The main type of a mixture, its number in general.file_type, and the rules for three kinds of matrices."""

    main: str
    file_type: int
    v: Rules = ()
    down: Rules = ()
    o: Rules = ()

    def rules(self, part: str) -> Rules:
        """Return the rules for a part of a block."""
        if part in V:
            return self.v
        if part.startswith("ffn_down"):  # also the matrices of experts, and of an expert for all tokens
            return self.down
        return self.o if part == "attn_output" else ()


MIXTURES = {
    "q2_k": Mixture(
        "Q2_K",
        10,
        v=((lambda place: place.gqa, "Q4_K"), (_always, "Q3_K")),
        down=((_always, "Q3_K"),),
        o=((lambda place: place.eight, "Q5_K"), (_always, "Q3_K")),
    ),
    "q3_k_m": Mixture(
        "Q3_K",
        12,
        v=((lambda place: place.layer < 2, "Q5_K"), (_always, "Q4_K")),
        down=((lambda place: place.first(16), "Q5_K"), (_always, "Q4_K")),
        o=((lambda place: place.eight, "Q5_K"), (_always, "Q4_K")),
    ),
    "q4_k_m": Mixture(
        "Q4_K",
        15,
        v=((lambda place: place.more, "Q6_K"),),
        down=((lambda place: place.more, "Q6_K"),),
        o=((lambda place: place.eight, "Q5_K"),),
    ),
    "q5_k_m": Mixture("Q5_K", 17, v=((lambda place: place.more, "Q6_K"),), down=((lambda place: place.more, "Q6_K"),)),
    "q6_k": Mixture("Q6_K", 18),
    "iq4_nl": Mixture(
        "IQ4_NL",
        25,
        v=((lambda place: place.gqa, "Q5_K"),),
        down=((lambda place: place.first(8) and not place.weighted, "Q5_K"),),
        o=((lambda place: place.eight, "Q5_K"),),
    ),
}


def wanted_type(name: str, *, mixture: Mixture, architecture: str, config: Config, weighted: bool = False) -> str:
    """Choose the type of the matrix `name` in a GGUF file, without regard to the length of its rows.

    `weighted` says whether an importance matrix is given.

    >>> config, q4_k_m = Config(256, 16, 8, 2, 64, 512, vocab=9, context=8, eps=1e-5, theta=1e4), MIXTURES["q4_k_m"]
    >>> names = [f"blk.{i}.attn_v.weight" for i in (1, 2, 3, 4)]
    >>> [wanted_type(name, mixture=q4_k_m, architecture="llama", config=config) for name in names]
    ['Q6_K', 'Q4_K', 'Q4_K', 'Q6_K']
    """
    if name == "output.weight" or (name == "token_embd.weight" and config.tied):
        return "Q6_K"
    if not name.startswith("blk."):
        return mixture.main
    _, layer, part, _ = name.split(".")
    place, rules = Place(config, int(layer), weighted), mixture.rules(part)
    chosen = next((kind for applies, kind in rules if applies(place)), mixture.main)
    if part in V and chosen in ("Q3_K", "Q4_K") and _counts_as_70b(architecture, config):
        chosen = "Q5_K"
    return "Q8_0" if place.eight and part in (*V, "attn_k") else chosen


def _counts_as_70b(architecture: str, config: Config) -> bool:
    grouped = config.kv_heads < config.heads  # the first Llama with 80 layers, of 65B, has a kv head for each head
    return config.layers == 80 and (architecture == "qwen2" or (architecture == "llama" and grouped))


def fitting_type(kind: str, cols: int) -> str:
    """Return `kind`, or the type that replaces it if rows of `cols` weights are not whole blocks of `kind`.

    >>> fitting_type("Q6_K", 512), fitting_type("Q6_K", 96), fitting_type("Q6_K", 40)
    ('Q6_K', 'Q8_0', 'F16')
    """
    for fitting in (kind, INSTEAD.get(kind, kind)):
        if cols % TYPES[fitting].weights == 0:
            return fitting
    return OTHERWISE
