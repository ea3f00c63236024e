"""The benchmark of requests together works; what it measures is for a machine that does nothing else."""

from dataclasses import replace

from benchmarks.serve import AFTER, BURST, measure
from tests.random_models import SMALL


def test_a_model_is_measured():
    config = replace(SMALL, dim=64, head_dim=16, ffn=128, layers=1, context=AFTER + 16 * BURST)
    figures = measure(config, "float32", "q8", [2], rounds=1)
    assert [*figures] == ["one sequence, ms a token", "2 together", "1 of 2"]
    assert all(figure > 0 for figure in figures.values())
