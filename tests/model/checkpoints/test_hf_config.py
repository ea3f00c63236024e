"""config.json: we read the settings that transformers 4 and 5 read, and write the settings back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.checkpoints import Checkpoint, CheckpointError
from llamaspec.model.checkpoints.huggingface.config import read_config, read_tokens
from llamaspec.model.checkpoints.huggingface.write_config import format_config
from llamaspec.reference.config import Config
from llamaspec.reference.rope import LinearScaling, Llama3Scaling
from tests.support.families import FAMILIES

# These keys have no default in any family.
BARE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "vocab_size": 50,
    "moe_intermediate_size": 24,
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 96}


def read(family: str, **changes) -> Config:
    return read_config({"model_type": family, **BARE, **changes}, "config.json")


# Defaults of the configuration classes in transformers 5.23 and 5.24.
@pytest.mark.parametrize(
    ("family", "kv_heads", "head_dim", "context", "eps", "theta", "window"),
    [
        ("llama", 32, 2, 2048, 1e-6, 1e4, None),
        ("mistral", 8, 2, 131_072, 1e-6, 1e4, 4096),
        ("mixtral", 8, 2, 131_072, 1e-5, 1e6, None),
        ("qwen2", 32, 2, 32_768, 1e-6, 1e4, None),
        ("qwen3", 32, 128, 32_768, 1e-6, 1e4, None),
        ("qwen3_moe", 4, 2, 32_768, 1e-6, 1e4, None),
    ],
)
def test_absent_keys_mean_what_transformers_makes_them(family, kv_heads, head_dim, context, eps, theta, window):
    config = read(family)
    assert (config.kv_heads, config.head_dim, config.context) == (kv_heads, head_dim, context)
    assert (config.eps, config.theta, config.scaling, config.tied) == (eps, theta, None, False)
    assert config.windows == (window and (window,) * 3)
    experts = {"mixtral": (8, 2), "qwen3_moe": (128, 8)}
    assert (config.experts, config.experts_per_token) == experts.get(family, (0, 0))
    assert config.renormalize_experts == (family != "qwen3_moe")
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == family.startswith("qwen3")
    assert not config.o_bias
    assert not config.ffn_bias


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"num_key_value_heads": None, "head_dim": None}, {"kv_heads": 32, "head_dim": 2}),
        ("llama", {"head_dim": 6}, {"head_dim": 6}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True, "ffn_bias": False}),
        ("llama", {"mlp_bias": True}, {"ffn_bias": True, "qkv_bias": False}),
        ("llama", {"sliding_window": 4}, {"windows": None}),
        (
            "mistral",
            {"attention_bias": True, "mlp_bias": True},
            {"qkv_bias": False, "o_bias": False, "ffn_bias": False},
        ),
        ("mistral", {"sliding_window": None}, {"windows": None}),
        ("mistral", {"sliding_window": 4}, {"windows": (4, 4, 4)}),
        ("mixtral", {"sliding_window": 4}, {"windows": (4, 4, 4)}),
        ("qwen2", {"attention_bias": False, "head_dim": 4}, {"qkv_bias": True, "o_bias": False, "head_dim": 4}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ("qwen2", {"sliding_window": 4}, {"windows": None}),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True}, {"windows": None}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, {"windows": (None, 4096, 4096)}),
        (
            "qwen3",
            {
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            {"windows": (4, None, 4)},
        ),
        ("qwen3_moe", {"intermediate_size": 5}, {"ffn": 24}),
        ("qwen3_moe", {"num_experts": 9}, {"experts": 9}),
        ("qwen3_moe", {"num_local_experts": 9, "norm_topk_prob": True}, {"experts": 9, "renormalize_experts": True}),
        ("qwen3_moe", {"sliding_window": 4}, {"windows": None}),
        ("qwen3_moe", {"sliding_window": 4, "use_sliding_window": True}, {"windows": (4, 4, 4)}),
        ("qwen3_moe", {"mlp_only_layers": None, "decoder_sparse_step": 1}, {"experts": 128}),
        ("llama", {"rope_theta": 7}, {"theta": 7.0, "scaling": None}),
        ("llama", {"rope_parameters": {"rope_theta": 7}}, {"theta": 7.0}),
        ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7}, {"theta": 7.0}),
        ("llama", {"rope_parameters": {"rope_theta": 7}, "rope_scaling": None}, {"theta": 7.0}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4}}, {"scaling": LinearScaling(4.0)}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4}}, {"scaling": LinearScaling(4.0)}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4}}, {"scaling": LinearScaling(4.0)}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"scaling": Llama3Scaling(8.0, 1.0, 4.0, 96)}),
        ("llama", {"rope_scaling": {"rope_type": "default"}}, {"scaling": None}),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 7}},
            {"scaling": LinearScaling(2.0), "theta": 1e4},
        ),
        ("llama", {"partial_rotary_factor": 1.0}, {"head_dim": 2}),
    ],
)
def test_keys_mean_what_transformers_makes_them(family, changes, expected):
    config = read(family, **changes)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "generation", "bos", "stops"),
    [
        ({"model_type": "llama"}, {}, 1, {2}),
        ({"model_type": "qwen2"}, {}, None, set()),
        ({"model_type": "llama", "bos_token_id": None, "eos_token_id": None}, {}, None, set()),
        ({"model_type": "llama", "bos_token_id": 3, "eos_token_id": [4, 5]}, {}, 3, {4, 5}),
        ({"model_type": "llama", "bos_token_id": 3, "eos_token_id": 4}, {"eos_token_id": [5, 6]}, 3, {5, 6}),
        ({"model_type": "llama", "eos_token_id": [4, 5]}, {"bos_token_id": 0, "eos_token_id": 0}, 0, {0}),
        ({"model_type": "llama", "eos_token_id": 4}, {"bos_token_id": None, "eos_token_id": None}, 1, {4}),
    ],
)
def test_generation_config_has_the_last_word_on_tokens(config, generation, bos, stops):
    assert read_tokens(config, "config.json", generation, "generation_config.json", vocab=7) == (bos, stops)


def checkpoint_of(config: Config, bos: int | None = 1, stops: frozenset[int] = frozenset({2})) -> Checkpoint:
    return Checkpoint("there", "safetensors", config, {}, bos=bos, stops=stops)


@st.composite
def configs(draw) -> dict:
    """Draw the arguments of a `Config` for a random family, with each option of this family on or off."""
    family = draw(st.sampled_from(["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]))
    number = st.floats(1e-30, 1e30)
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    window = st.none() | st.integers(1, 5000)
    windows = None
    if family in ("mistral", "mixtral", "qwen3_moe") and (size := draw(window)):
        windows = (size,) * layers
    if family in ("qwen2", "qwen3") and (size := draw(window)):
        windows = tuple(draw(st.lists(st.sampled_from([size, None]), min_size=layers, max_size=layers)))
    bias = draw(st.booleans()) if family in ("llama", "qwen3", "qwen3_moe") else False
    scalings = st.none() | st.builds(LinearScaling, number)
    experts = draw(st.integers(1, 8)) if family in ("mixtral", "qwen3_moe") else 0
    return dict(
        dim=draw(st.integers(1, 99)),
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 99)),
        ffn=draw(st.integers(1, 99)),
        vocab=draw(st.integers(3, 99)),
        context=draw(st.integers(1, 2**31 - 1)),
        eps=draw(number),
        theta=draw(number),
        scaling=draw(scalings | st.builds(Llama3Scaling, number, st.just(1.5), st.just(2.5), st.integers(1, 9999))),
        windows=windows if windows and any(windows) else None,
        experts=experts,
        experts_per_token=draw(st.integers(1, experts)) if experts else 0,
        renormalize_experts=family != "qwen3_moe" or draw(st.booleans()),
        tied=draw(st.booleans()),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        ffn_bias=family == "llama" and draw(st.booleans()),
        qk_norm=family.startswith("qwen3"),
    )


@given(configs(), st.none() | st.integers(0, 2), st.frozensets(st.integers(0, 2)))
def test_a_config_goes_there_and_back(config, bos, stops):
    config = Config(**config)
    values = format_config(checkpoint_of(config, bos, stops), dtype="float32")
    assert read_config(values, "config.json") == config
    assert read_tokens(values, "config.json", {}, "generation_config.json", vocab=3) == (bos, stops)
    # The keys of transformers 4 and of transformers 5 have the same meaning.
    four = {key: value for key, value in values.items() if key not in ("rope_parameters", "layer_types")}
    five = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling")}
    assert read_config(five, "config.json") == config
    if config.windows is None or None not in config.windows:
        assert read_config(four, "config.json") == config


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"o_bias": True}, "qkv_bias"),
        ({"qkv_bias": True, "ffn_bias": True}, "ffn_bias"),
        ({"qk_norm": True, "ffn_bias": True}, "ffn_bias"),
        ({"windows": (4, None)}, "windows"),
        ({"windows": (4, 5), "qkv_bias": True}, "windows"),
        ({"experts": 2, "experts_per_token": 1, "ffn_bias": True}, "ffn_bias"),
        ({"experts": 2, "experts_per_token": 1, "qk_norm": True, "windows": (4, None)}, "windows"),
    ],
)
def test_what_no_family_is_like_is_not_written(changes, name):
    sizes = {"dim": 8, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 9, "vocab": 9, "context": 9}
    config = Config(**sizes, eps=1e-5, theta=1e4, **changes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        CheckpointError, match=rf"^there: no Hugging Face family fits this model; .* differs in {name}$"
    ):
        format_config(checkpoint_of(config), dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_there_and_back(family):
    config = read_config(FAMILIES[family], "config.json")
    assert read_config(format_config(checkpoint_of(config), dtype="float32"), "config.json") == config
