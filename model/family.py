"""The description of a family of models: its keys in config.json, its names in files, its defaults and switches.

Each family is a module in `model.families` with a `FAMILY`, an instance of the class below. We find families by their
modules, so adding a family means adding a file. Readers and writers of config.json and of GGUF loop over these
descriptions.
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

# Fields of `Config`, and the spellings of the key in config.json that sets each field. We read any of the spellings and
# write the first.
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

# Values of fields if config.json lacks their key. If a field has no value here or in `Family.defaults`, its key is
# required.
DEFAULTS: dict[str, Any] = {"head_dim": None, "eps": 1e-6, "tied": False}

# Parts in `model.tensors`, and their names in a GGUF file. A GGUF file joins the matrices of a layer's experts in one
# tensor.
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

# Fields of `Config`, and their keys in a GGUF file without the prefix, which is the name of the architecture and a dot.
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

# Switches of `Config` that some architectures of llama.cpp lack, and their names in error messages.
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
    """The RoPE keys of config.json in one family: their names, defaults and permitted values."""

    theta: float = 10_000.0  # value if rope_theta is absent
    local_theta: tuple[str, float] | None = None  # the key, and the value if it is absent; None: no such key
    partial: bool = False  # whether partial_rotary_factor may be below 1
    fraction: float = 1.0  # value if partial_rotary_factor is absent
    original_context: int | None = None  # value if original_max_position_embeddings is absent outside rope_scaling
    aliases: Mapping[str, str] = field(default_factory=dict)  # the family's name of a rescaling: its usual name


Read = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Write = Callable[[Config], Mapping[str, Any]]


def _no_entries(*_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, which several families may share."""

    name: str
    names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES)
    keys: Mapping[str, str] = field(default_factory=lambda: GGUF_KEYS)
    interleaved: bool = False  # whether RoPE rotates pairs of neighboring rows of q and k
    has: tuple[str, ...] = ()  # switches of `Config` that the file's tensors or `keys` set
    switches: Mapping[str, Any] = field(default_factory=dict)  # values of `Config` fields for all its models
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name of joined matrices: their parts
    square: bool = False  # whether all heads together must be as wide as the model
    llama3_scaling: bool = False
    long_rope: bool = False
    whole_yarn: bool = True  # whether the models round YaRN's two indices, as llama.cpp always does
    own: tuple[str, ...] = ()  # keys that we read for this architecture, and refuse for others
    # `derived` names the fields that `read` computes. `read` gets a `gguf.config.Keys` and the fields that were read
    # before. `write` returns the keys for the derived fields of a `Config`.
    derived: tuple[str, ...] = ()
    read: Read = _no_entries
    write: Write = _no_entries

    def lacks(self, config: Config) -> str | None:
        """Return a feature of `config` that llama.cpp does not compute for this architecture, or None if it computes
        everything.
        """
        derived = self.read(_WrittenKeys(self.write(config)), vars(config)) if self.derived else {}
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


class _WrittenKeys:
    """The keys that `write` returned, wrapped so that `read` can read them."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def integer(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def number(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    decimal = number


# The layers to which `sliding_window` of config.json applies: no layer, every layer, or the layers that `layer_types`
# names ("by layer"). "if on" means that windows are used only if `use_sliding_window` is true.
Windows = Literal["none", "every layer", "every layer if on", "by layer if on", "by layer"]


@dataclass(frozen=True)
class Family:
    """The models that have the same model_type in config.json."""

    name: str  # the model_type
    model: str  # the class in transformers that computes these models
    gguf: Architecture
    defaults: Mapping[str, Any]  # values of `Config` fields if config.json lacks their key
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: KEYS)
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)  # part of `model.tensors`: its name in the files
    switches: Mapping[str, Any] = field(default_factory=dict)  # values of `Config` fields for all models of the family
    # Keys that could change the computation, with the values for which they do not change it. We write the first value.
    understood: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: Windows = "none"
    window: int | None = None  # value if sliding_window is absent
    full_every: int | None = None  # if layer_types is absent, every `full_every`-th layer has no window
    rope: RopeKeys = RopeKeys()
    within: str = ""  # the object in config.json with the text model's keys; "": config.json itself
    beside: tuple[str, ...] = ()  # prefixes of the names of tensors that do not belong to the text model
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name of joined matrices: their parts
    stacked_experts: str = ""  # the module that holds all experts of a layer; "": each expert has a module
    norm_offset: float = 0.0  # a number to add to the stored weights of norms
    interleaved: bool = False  # whether RoPE rotates pairs of neighboring rows of q and k
    # `derived` names the fields that `read` computes. `read` gets a `huggingface.fields.Fields` and the fields that
    # were read before. `write` returns the keys for the derived fields of a `Config`.
    derived: tuple[str, ...] = ()
    read: Read = _no_entries
    write: Write = _no_entries
    bos: int | None = None  # value if bos_token_id is absent
    stop: int | None = None  # value if eos_token_id is absent

    def differences(self, config: Config) -> list[str]:
        """List the fields of `config` that have values which a config.json of this family cannot express."""
        written = self.write_fields(config)
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

    def write_fields(self, config: Config) -> dict[str, Any]:
        """Return the keys of config.json that state a single field of `config`, with their values.

        If two fields share a key, the value is from the later field.
        """
        return {keys[0]: getattr(config, name) for name, keys in self.keys.items()}

    def _reads(self, config: Config) -> Mapping[str, Any]:
        """Write `config` as keys of config.json, and return the derived fields that `read` computes from these keys."""
        written = self.write_fields(config) | dict(self.write(config))
        return self.read(_WrittenKeys(written), vars(config))

    def _has_windows(self, windows: tuple[int | None, ...] | None) -> bool:
        sizes = set(windows or ())
        if not any(sizes):
            return True
        if self.windows.startswith("by layer"):
            return len(sizes - {None}) == 1
        return self.windows != "none" and len(sizes) == 1


def _plain(name: str) -> Any:
    """Return the default of a field of `Config`, or `MISSING` if the field has no default."""
    return next(switch.default for switch in fields(Config) if switch.name == name)


def windows_but_every(nth: int, window: int, *, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: None for every `nth` layer, `window` for the others.

    >>> windows_but_every(2, 8, layers=4)
    (8, None, 8, None)
    """
    return tuple(None if (i + 1) % nth == 0 else window for i in range(layers))


def families() -> dict[str, Family]:
    """Return the description of every family by its model_type, in alphabetical order."""
    families = [import_module(f"{modules.__name__}.{module.name}").FAMILY for module in iter_modules(modules.__path__)]
    return {family.name: family for family in sorted(families, key=lambda family: family.name)}


def architectures() -> dict[str, Architecture]:
    """Return the architectures of llama.cpp by name."""
    return {family.gguf.name: family.gguf for family in families().values()}


def nearest_family(config: Config) -> Family:
    """Choose the family in which to write `config`: the family that would change the fewest values of `config`.

    On a tie, we choose the family that can express the most fields of `config`.
    """

    def distance(family: Family) -> tuple[int | str, ...]:
        missing = sum(getattr(config, name) != value for name, value in family.switches.items())
        differences = len(family.differences(config))
        # In llama.cpp only Phi-3's architecture has LongRoPE. On another tie we prefer a family that is not a part of a
        # larger model and has few derived fields. The last criterion is the name; Llama, for example, wins by it.
        foreign = isinstance(config.scaling, LongRopeScaling) and not family.gguf.long_rope
        special = bool(family.within) + len(family.derived)
        return missing, differences, foreign, special, -len(family.switches), family.name

    return min(families().values(), key=distance)
