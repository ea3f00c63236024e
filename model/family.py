"""The description of a family of models: its keys of config.json, names in files, defaults and switches.

Each family is a file in `model.families` with a `FAMILY` of the class below. We find families by module, so a new
family is a new file; readers and writers of config.json and of GGUF are loops over these descriptions.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from math import isclose
from pkgutil import iter_modules
from typing import Any, Literal

from llamaspec.model import families as modules
from llamaspec.model.tensors import NAMES
from llamaspec.reference.config import Config
from llamaspec.reference.rope import DynamicScaling, Llama3Scaling, LongRopeScaling, YarnScaling, yarn_magnitude

# Fields of `Config`, and the key of config.json that sets each: of several spellings the first is written.
KEYS: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings",),
    "eps": ("rms_norm_eps",),
    "tied": ("tie_word_embeddings",),
}

# The values of fields without a key in the file. A field that is neither here nor in a family's own must have its key.
DEFAULTS: dict[str, Any] = {"head_dim": None, "eps": 1e-6, "tied": False}

# Parts of `model.tensors`, and their names in a GGUF file; the matrices of all experts of a layer are one tensor.
GGUF_NAMES: dict[str, str] = {
    "embedding": "token_embd",
    "attention_norm": "blk.{layer}.attn_norm",
    "q": "blk.{layer}.attn_q",
    "k": "blk.{layer}.attn_k",
    "v": "blk.{layer}.attn_v",
    "q_norm": "blk.{layer}.attn_q_norm",
    "k_norm": "blk.{layer}.attn_k_norm",
    "o": "blk.{layer}.attn_output",
    "ffn_norm": "blk.{layer}.ffn_norm",
    "gate": "blk.{layer}.ffn_gate",
    "up": "blk.{layer}.ffn_up",
    "down": "blk.{layer}.ffn_down",
    "router": "blk.{layer}.ffn_gate_inp",
    "expert_gate": "blk.{layer}.ffn_gate_exps",
    "expert_up": "blk.{layer}.ffn_up_exps",
    "expert_down": "blk.{layer}.ffn_down_exps",
    "norm": "output_norm",
    "head": "output",
}

# Fields of `Config`, and a GGUF file's keys for them, each behind the name of the architecture.
GGUF_KEYS: dict[str, str] = {
    "context": "context_length",
    "dim": "embedding_length",
    "layers": "block_count",
    "ffn": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "eps": "attention.layer_norm_rms_epsilon",
    "theta": "rope.freq_base",
    "experts": "expert_count",
    "experts_per_token": "expert_used_count",
}

# Switches of `Config` that not every architecture of llama.cpp has, in the words of an error.
GGUF_SWITCHES: dict[str, str] = {
    "experts": "experts",
    "qk_norm": "norms of q and k",
    "qkv_bias": "biases of q, k and v",
    "o_bias": "biases other than q, k and v",
    "ffn_bias": "biases other than q, k and v",
    "windows": "sliding windows",
    "gated": "feed-forward layers without a gate",
    "layer_norm": "LayerNorm",
    "tied": "head that is the embedding",
    "renormalize_experts": "experts with weights that do not sum to 1",
}


@dataclass(frozen=True)
class RopeKeys:
    """The keys of config.json for RoPE, if they are not the same in all families."""

    theta: float = 10_000.0  # if rope_theta is absent
    local_theta: tuple[str, float] | None = None  # the key, and the value if it is absent; None: there is none
    partial: bool = False  # whether partial_rotary_factor may be below 1
    fraction: float = 1.0  # if it is absent
    original_context: int | None = None  # if original_max_position_embeddings is absent outside rope_scaling
    aliases: Mapping[str, str] = field(default_factory=dict)  # of the names of rescalings


Read = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Write = Callable[[Config], Mapping[str, Any]]


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp; several families may share one."""

    name: str
    names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES)
    keys: Mapping[str, str] = field(default_factory=lambda: GGUF_KEYS)
    interleaved: bool = False  # whether the pairs of q and k, which RoPE turns, are neighbors
    has: tuple[str, ...] = ()  # switches of `Config` that a file shows by its tensors or by `keys`
    switches: Mapping[str, Any] = field(default_factory=dict)  # fields of `Config` that every member has so
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of matrices that are stored as one
    square: bool = False  # whether all heads together must be as wide as the model
    llama3_scaling: bool = False
    long_rope: bool = False
    whole_yarn: bool = True  # whether models have YaRN's two indices rounded, which llama.cpp always does
    own: tuple[str, ...] = ()  # keys that matter here and that other architectures must not have
    # Fields that are computed from other keys: from a `gguf.config.Keys` and the fields so far, and back.
    derived: tuple[str, ...] = ()
    read: Read = _nothing
    write: Write = _nothing

    def lacks(self, config: Config) -> str | None:
        """Return the first feature of `config` that llama.cpp does not compute here, or None."""
        derived = self.read(_Written(self.write(config)), vars(config)) if self.derived else {}
        reasons = []
        for name in (switch.name for switch in fields(Config)):
            value, plain = getattr(config, name), _plain(name)
            free = name == "tied" and name not in self.switches
            if plain is MISSING or free or name in ("scaling", "experts_per_token"):
                continue
            if name == "windows":
                value = value if value and any(value) else None
            if name in self.derived:
                fits = derived.get(name, plain) == value
            elif name in self.switches:
                fits = self.switches[name] == value
            else:
                fits = value == plain or name in self.has or name in self.keys
            if not fits:
                known = GGUF_SWITCHES.get(name, f"{name.replace('_', ' ')} {value}")
                reasons.append(known if value != plain else f"model without {known}")
        if self.square and config.heads * config.head_dim != config.dim:
            reasons.append(f"{config.heads} heads of {config.head_dim} for {config.dim} features")
        if isinstance(config.scaling, Llama3Scaling) and not self.llama3_scaling:
            reasons.append("Llama 3's rescaling of RoPE")
        if isinstance(config.scaling, LongRopeScaling) and not self.long_rope:
            reasons.append("LongRoPE")
        if isinstance(config.scaling, DynamicScaling):
            reasons.append("dynamic rescaling of RoPE")
        if isinstance(config.scaling, YarnScaling):
            factor, length = config.scaling.factor, config.scaling.magnitude
            usual = YarnScaling(factor, config.scaling.original_context, length, whole=self.whole_yarn)
            if config.scaling != usual or not isclose(length, yarn_magnitude(factor), rel_tol=1e-6):
                reasons.append("YaRN with other numbers than the paper's")
        return reasons[0] if reasons else None


class _Written:
    """The keys that `write` gives, for `read`."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def integer(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def number(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    decimal = number


# How config.json gives sliding windows: by no key; by `sliding_window`, for all layers; the same if
# `use_sliding_window` turns it on; or then for the layers that `layer_types` names; or for those without a switch.
Windows = Literal["none", "every layer", "every layer if on", "by layer if on", "by layer"]


@dataclass(frozen=True)
class Family:
    """The models that share a model_type in config.json."""

    name: str  # the model_type
    model: str  # the class of transformers that computes it
    gguf: Architecture
    defaults: Mapping[str, Any]  # of absent keys
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: KEYS)
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)  # of the parts of `model.tensors`
    switches: Mapping[str, Any] = field(default_factory=dict)  # fields of `Config` that every member has so
    # Keys that would change the computation, and the values that leave it as it is; we write the first value.
    understood: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: Windows = "none"
    window: int | None = None  # if sliding_window is absent
    full_every: int | None = None  # one layer of `full_every` has no window, if layer_types is absent
    rope: RopeKeys = RopeKeys()
    within: str = ""  # the object in config.json that holds the keys of the text model; "": config.json itself
    beside: tuple[str, ...] = ()  # how the names of tensors begin that belong to no text model
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of matrices that are stored as one
    stacked_experts: str = ""  # the module that holds all experts of a layer as one; "": each has a module
    norm_offset: float = 0.0  # what is added to the stored weights of norms
    interleaved: bool = False  # whether the pairs of q and k, which RoPE turns, are neighbors
    # Fields that are computed from other keys: from a `huggingface.fields.Fields` and the fields so far, and back.
    derived: tuple[str, ...] = ()
    read: Read = _nothing
    write: Write = _nothing
    bos: int | None = None  # if bos_token_id is absent
    stop: int | None = None  # if eos_token_id is absent

    def differences(self, config: Config) -> list[str]:
        """List the fields of `config` that no config.json of this family can give."""
        written = self.written(config)
        names = []
        for name in (switch.name for switch in fields(Config)):
            value = getattr(config, name)
            if name in ("theta", "scaling"):
                continue
            if name == "windows":
                expressible = self._has_windows(config.windows)
            elif name in self.derived:
                expressible = self._reads(config).get(name, _plain(name)) == value
            elif name == "local_theta":
                expressible = (value is None) == (self.rope.local_theta is None)
            elif name == "rotary_dim":
                expressible = value is None or self.rope.partial
            elif name in self.keys:
                expressible = written[self.keys[name][0]] == value
            else:
                expressible = value == self.switches.get(name, _plain(name))
            if not expressible:
                names.append(name)
        if "experts" in self.keys and not config.experts:
            names.append("experts")
        return names

    def written(self, config: Config) -> dict[str, Any]:
        """Return the keys of config.json that hold one field each. If fields share a key, the last one counts."""
        return {keys[0]: getattr(config, name) for name, keys in self.keys.items()}

    def _reads(self, config: Config) -> Mapping[str, Any]:
        """Read the derived fields of `config` back, from the keys that are written for them."""
        written = self.written(config) | dict(self.write(config))
        return self.read(_Written(written), vars(config))

    def _has_windows(self, windows: tuple[int | None, ...] | None) -> bool:
        sizes = set(windows or ())
        if not any(sizes):
            return True
        if self.windows.startswith("by layer"):
            return len(sizes - {None}) == 1
        return self.windows != "none" and len(sizes) == 1


def _plain(name: str) -> Any:
    """Return the default of a field of `Config`; `MISSING` if it has none."""
    return next(switch.default for switch in fields(Config) if switch.name == name)


def windows_but_every(nth: int, window: int, *, layers: int) -> tuple[int | None, ...]:
    """Give the same window to all layers but every `nth`, which has none.

    >>> windows_but_every(2, 8, layers=4)
    (8, None, 8, None)
    """
    return tuple(None if (i + 1) % nth == 0 else window for i in range(layers))


def families() -> dict[str, Family]:
    """Find the description of every family, by model_type, in alphabetical order."""
    families = [import_module(f"{modules.__name__}.{module.name}").FAMILY for module in iter_modules(modules.__path__)]
    return {family.name: family for family in sorted(families, key=lambda family: family.name)}


def architectures() -> dict[str, Architecture]:
    """Find the architectures of llama.cpp, by name."""
    return {family.gguf.name: family.gguf for family in families().values()}


def nearest_family(config: Config) -> Family:
    """Choose the family that can write most of `config`; families that force another switch come last."""

    def distance(family: Family) -> tuple[int | str, ...]:
        missing = sum(getattr(config, name) != value for name, value in family.switches.items())
        differences = len(family.differences(config))
        # LongRoPE is Phi-3's own in llama.cpp. A model of text is no part of another, and a plain one is a Llama.
        foreign = isinstance(config.scaling, LongRopeScaling) and not family.gguf.long_rope
        special = bool(family.within) + len(family.derived)
        return missing, differences, foreign, special, -len(family.switches), family.name

    return min(families().values(), key=distance)
