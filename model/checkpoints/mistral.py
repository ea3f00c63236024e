"""Reads models in Mistral's own layout: params.json and consolidated.safetensors in one directory.

The layout comes from https://github.com/mistralai/mistral-inference. The keys of params.json are the arguments of that
package's model class, and tensors have the names of the class's modules. RoPE rotates pairs of neighboring rows of q
and k. We skip the weights of an image encoder. No file states the ids of the tokens that begin and end a text; in all
of Mistral's tokenizers, these ids are 1 and 2.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.checks import MOST_LAYERS
from llamaspec.model.checkpoints.huggingface.fields import Fields
from llamaspec.model.checkpoints.huggingface.read import Description, open_described
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.strict_json import read_object, short
from llamaspec.model.families.mistral import FAMILY
from llamaspec.model.family import RopeKeys

STEM = "consolidated"
EMBEDDING = "tok_embeddings"

LAYOUT = replace(
    FAMILY,
    interleaved=True,
    names={
        "embedding": EMBEDDING,
        "attention_norm": "layers.{layer}.attention_norm",
        "q": "layers.{layer}.attention.wq",
        "k": "layers.{layer}.attention.wk",
        "v": "layers.{layer}.attention.wv",
        "o": "layers.{layer}.attention.wo",
        "ffn_norm": "layers.{layer}.ffn_norm",
        "gate": "layers.{layer}.feed_forward.w1",
        "up": "layers.{layer}.feed_forward.w3",
        "down": "layers.{layer}.feed_forward.w2",
        "router": "layers.{layer}.feed_forward.gate",
        "expert_gate": "layers.{layer}.feed_forward.experts.{expert}.w1",
        "expert_up": "layers.{layer}.feed_forward.experts.{expert}.w3",
        "expert_down": "layers.{layer}.feed_forward.experts.{expert}.w2",
        "norm": "norm",
        "head": "output",
    },
    keys={
        "dim": ("dim",),
        "ffn": ("hidden_dim",),
        "layers": ("n_layers",),
        "heads": ("n_heads",),
        "kv_heads": ("n_kv_heads",),
        "head_dim": ("head_dim",),
        "vocab": ("vocab_size",),
        "context": ("max_position_embeddings", "max_seq_len"),
        "eps": ("norm_eps",),
        "tied": ("tied_embeddings",),
    },
    defaults={"kv_heads": None, "head_dim": None, "context": 128_000, "tied": False},
    understood={
        "model_type": ("transformer",),
        "activation": ("silu",),
        "use_biases": (False,),
        "causal": (True,),
        "ada_rms_norm_t_cond": (False,),
        **dict.fromkeys(("lora", "quantization", "llama_4_scaling", "q_lora_rank", "kv_lora_rank"), (None,)),
    },
    window=None,
    beside=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
)
EXPERTS = {"experts": ("num_experts",), "experts_per_token": ("num_experts_per_tok",)}  # keys of the object `moe`
YARN = {"beta": "beta_fast", "alpha": "beta_slow"}  # keys of the object `yarn`, and the same keys in config.json


def is_mistrals(folder: Path) -> bool:
    """Tell whether a folder holds a model in Mistral's layout, and no model in Hugging Face's layout."""
    own, huggingface_files = (
        [folder / f"{stem}.safetensors{end}" for end in ("", ".index.json")] for stem in (STEM, "model")
    )
    is_mistral = (folder / "params.json").exists() and any(path.exists() for path in own)
    return is_mistral and not ((folder / "config.json").exists() and any(path.exists() for path in huggingface_files))


def open_mistral(directory: Path, weights: MappedFile | None = None) -> Checkpoint:
    """Open a directory in Mistral's layout; with `weights`, read tensors only from this file of the directory.

    Raises `CheckpointError` if we cannot read the model.
    """
    path = directory / "params.json"
    return open_described(directory, weights, describe(read_object(path), path))


def describe(params: dict[str, Any], path: Path) -> Description:
    """Translate a parsed params.json to a `Description`. Raises `CheckpointError` if a key has an unsupported value."""
    values = {key: value for key, value in params.items() if value is not None}  # null means the same as an absent key
    fields = Fields(values, path)
    keys, windows = dict(LAYOUT.keys), LAYOUT.windows
    if experts := fields.object("moe"):
        if experts.get("num_shared_experts"):
            raise fields.refused("moe.num_shared_experts is not supported")
        values |= {key: experts[key] for [key] in EXPERTS.values() if key in experts}
        keys |= EXPERTS
    window = values.get("sliding_window", values.get("_sliding_window"))
    if window is not None:
        values["sliding_window"] = window
    if isinstance(window, list):
        values |= _by_layer(fields, window)
        windows = "by layer"
    if yarn := fields.object("yarn"):
        values["rope_scaling"] = {"rope_type": "yarn"} | {YARN.get(key, key): yarn[key] for key in yarn}
        if not Fields(yarn, path).boolean("apply_scale", True):
            values["rope_scaling"]["attention_factor"] = 1.0
    # The first versions of the code had a fixed theta: 10,000 for models with windows, and 1,000,000 for others.
    rope = RopeKeys(theta=1e6 if window is None else 1e4)
    return Description(path, values, replace(LAYOUT, keys=keys, windows=windows, rope=rope), STEM, "mistral")


def _by_layer(fields: Fields, windows: list[Any]) -> dict[str, Any]:
    """Convert a list of attention windows to keys of config.json. The list repeats if there are more layers."""
    layers, sizes = fields.integer("n_layers"), [size for size in windows if size is not None]
    if any(type(size) is not int or size != sizes[0] for size in sizes) or not sizes:
        raise fields.refused(
            f"sliding_window is {short(windows)}, expected a list of null and one integer, which may repeat"
        )
    if layers > MOST_LAYERS:
        raise fields.refused(f"n_layers is {short(layers)}, expected at most {MOST_LAYERS}")
    if layers % len(windows):
        what = f"sliding_window is a list of length {len(windows)}, which does not divide n_layers, {short(layers)}"
        raise fields.refused(what)
    types = ["full_attention" if size is None else "sliding_attention" for size in windows]
    return {"sliding_window": sizes[0], "layer_types": types * (layers // len(windows))}
