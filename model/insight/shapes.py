"""The shapes of published Llamas, under the names that `bench --shape` accepts."""

from llamaspec.reference.config import Config
from llamaspec.reference.rope import Llama3Scaling


def _llama2(dim: int, layers: int, heads: int, ffn: int) -> Config:
    return Config(dim, layers, heads, heads, dim // heads, ffn, vocab=32_000, context=4096, eps=1e-5, theta=1e4)


def _llama3(dim: int, layers: int, heads: int, head_dim: int, ffn: int, *, factor: float, tied: bool = False) -> Config:
    scaling = Llama3Scaling(factor, low_frequency=1.0, high_frequency=4.0, original_context=8192)
    return Config(
        *(dim, layers, heads, 8, head_dim, ffn),
        vocab=128_256,
        context=131_072,
        eps=1e-5,
        theta=5e5,
        scaling=scaling,
        tied=tied,
    )


def _stories(dim: int, layers: int, heads: int, ffn: int, *, context: int) -> Config:
    """Return the shape of a llama2.c model that was trained on TinyStories."""
    head_dim = dim // heads
    return Config(dim, layers, heads, heads, head_dim, ffn, 32_000, context=context, eps=1e-5, theta=1e4, tied=True)


# These shapes are from each model's config.json. The shapes of llama2.c's models are from the headers of their files.
SHAPES: dict[str, Config] = {
    "stories-15m": _stories(288, 6, 6, 768, context=256),
    "stories-42m": _stories(512, 8, 8, 1376, context=1024),
    "stories-110m": _stories(768, 12, 12, 2048, context=1024),
    "tinyllama-1.1b": Config(2048, 22, 32, 4, 64, 5632, 32_000, context=2048, eps=1e-5, theta=1e4),
    "llama-2-7b": _llama2(4096, 32, 32, 11_008),
    "llama-2-13b": _llama2(5120, 40, 40, 13_824),
    "llama-3.2-1b": _llama3(2048, 16, 32, 64, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 128, 8192, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 128, 14_336, factor=8.0),
    "llama-3.1-70b": _llama3(8192, 80, 64, 128, 28_672, factor=8.0),
}
