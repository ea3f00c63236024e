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

# Fields of `Config`, and the spellings of the config.json key that sets each. We read any spelling and write the first.
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

# Values of fields if config.json lacks their key. A field that is neither here nor in `Family.defaults` needs its key.
DEFAULTS: dict[str, Any] = {"head_dim": None, "eps": 1e-6, "tied": False}

# Parts of `model.tensors`, and their names in a GGUF file, which joins the matrices of a layer's experts in one tensor.
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

# Fields of `Config`, and their keys in a GGUF file, without the prefix: the name of the architecture and a dot.
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

# Switches of `Config` that some architectures of llama.cpp lack, and how an error message names each.
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
    """Differences between families in the keys of config.json for RoPE."""

    theta: float = 10_000.0  # if rope_theta is absent
    local_theta: tuple[str, float] | None = None  # the key, and the value without it; None: no such key
    partial: bool = False  # whether partial_rotary_factor may be below 1
    fraction: float = 1.0  # if partial_rotary_factor is absent
    original_context: int | None = None  # if original_max_position_embeddings is absent outside rope_scaling
    aliases: Mapping[str, str] = field(default_factory=dict)  # the family's names of rescalings: usual names


Read = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Write = Callable[[Config], Mapping[str, Any]]


def _no_entries(*_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp; several families may share one."""

    name: str
    names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES)
    keys: Mapping[str, str] = field(default_factory=lambda: GGUF_KEYS)
    interleaved: bool = False  # whether the pairs of q and k, which RoPE turns, are neighbors
    has: tuple[str, ...] = ()  # switches of `Config` that a file shows by its tensors or by `keys`
    switches: Mapping[str, Any] = field(default_factory=dict)  # values of `Config` fields that all its models share
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # common name of matrices stored as one: parts
    square: bool = False  # whether all heads together must be as wide as the model
    llama3_scaling: bool = False
    long_rope: bool = False
    whole_yarn: bool = True  # whether the models round YaRN's two indices, as llama.cpp always does
    own: tuple[str, ...] = ()  # keys that we read for this architecture and refuse for others
    # `derived` names the fields that `read` computes, from a `gguf.config.Keys` and the fields that were read before.
    # `write` returns the keys for the derived fields of a `Config`.
    derived: tuple[str, ...] = ()
    read: Read = _no_entries
    write: Write = _no_entries

    def lacks(self, config: Config) -> str | None:
        """Name a feature of `config` that llama.cpp does not compute for this architecture; None if it computes all."""
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
            usual = YarnScaling(factor, config.scaling.original_context, length, truncate=self.whole_yarn)
            if config.scaling != usual or not isclose(length, yarn_magnitude(factor), rel_tol=1e-6):
                reasons.append("YaRN with other numbers than the paper's")
        return reasons[0] if reasons else None


class _Written:
    """A wrapper of the keys that `write` returned, so that `read` can read them back."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def integer(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def number(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    decimal = number


# The layers that `sliding_window` of config.json is for: none, every layer, or the layers that `layer_types` names
# ("by layer"). "if on" means that windows are used only if `use_sliding_window` is true.
Windows = Literal["none", "every layer", "every layer if on", "by layer if on", "by layer"]


@dataclass(frozen=True)
class Family:
    """The models that share a model_type in config.json."""

    name: str  # the model_type
    model: str  # the class of transformers that computes it
    gguf: Architecture
    defaults: Mapping[str, Any]  # values of `Config` fields if config.json lacks their key
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: KEYS)
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)  # name of each part of `model.tensors`
    switches: Mapping[str, Any] = field(default_factory=dict)  # values of `Config` fields that all its models share
    # Keys that could change the computation, and the values for which they do not; we write the first value.
    understood: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: Windows = "none"
    window: int | None = None  # if sliding_window is absent
    full_every: int | None = None  # every `full_every`-th layer has no window, if layer_types is absent
    rope: RopeKeys = RopeKeys()
    within: str = ""  # the object in config.json that holds the keys of the text model; "": config.json itself
    beside: tuple[str, ...] = ()  # prefixes of tensors that do not belong to the text model
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # common name of matrices stored as one: parts
    stacked_experts: str = ""  # the module that holds all experts of a layer; "": each expert has a module
    norm_offset: float = 0.0  # a number to add to the stored weights of norms
    interleaved: bool = False  # whether the pairs of q and k, which RoPE turns, are neighbors
    # `derived` names the fields that `read` computes, from a `huggingface.fields.Fields` and the fields that were read
    # before. `write` returns the keys for the derived fields of a `Config`.
    derived: tuple[str, ...] = ()
    read: Read = _no_entries
    write: Write = _no_entries
    bos: int | None = None  # if bos_token_id is absent
    stop: int | None = None  # if eos_token_id is absent

    def differences(self, config: Config) -> list[str]:
        """List the fields of `config` with values that a config.json of this family cannot express."""
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
        """Return the keys of config.json that each hold one field. If two fields share a key, the later one wins."""
        return {keys[0]: getattr(config, name) for name, keys in self.keys.items()}

    def _reads(self, config: Config) -> Mapping[str, Any]:
        """Compute the derived fields again from the keys that `write` returns for `config`."""
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
    """Return the window of each layer: None for every `nth` layer, `window` for the others.

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
    """Choose the family to write `config` as: the one that forces the fewest other values.

    On a tie we choose the family that can express the most fields of `config`.
    """

    def distance(family: Family) -> tuple[int | str, ...]:
        missing = sum(getattr(config, name) != value for name, value in family.switches.items())
        differences = len(family.differences(config))
        # In llama.cpp only Phi-3's architecture has LongRoPE. On a further tie we prefer a family that is not a part of
        # a larger model and that has few derived fields, and in the end the first by name: Llama, for instance.
        foreign = isinstance(config.scaling, LongRopeScaling) and not family.gguf.long_rope
        special = bool(family.within) + len(family.derived)
        return missing, differences, foreign, special, -len(family.switches), family.name

    return min(families().values(), key=distance)
