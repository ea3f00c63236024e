"""Our mixtures give each matrix of a model the type that llama.cpp gives it (goldens/mixtures.json)."""

import pytest

from llamaspec.model.checkpoints.gguf.mixtures import MIXTURES
from llamaspec.model.family import architectures
from tests.goldens import make_mixtures
from tests.goldens.make_mixtures import FTYPES, WEIGHTED, by_part
from tests.support.goldens import read_golden

GOLDENS = read_golden("mixtures")["types"]
CASES = make_mixtures.cases()


def test_every_architecture_and_mixture_has_goldens():
    assert GOLDENS.keys() == CASES.keys() > architectures().keys()
    assert {name: list(golden) for name, golden in GOLDENS.items()} == {
        name: make_mixtures.mixtures_of(name) for name in CASES
    }
    assert MIXTURES.keys() | {WEIGHTED} == FTYPES.keys()
    assert all((mixture.file_type, mixture.main) == FTYPES[name] for name, mixture in MIXTURES.items())


@pytest.mark.parametrize("case", CASES)
def test_types_are_those_of_llama_cpp(case):
    for name, expected in GOLDENS[case].items():
        mixture, weighted = ("iq4_nl", True) if name == WEIGHTED else (name, False)
        stored = make_mixtures.tensors(CASES[case], mixture, weighted=weighted)
        types = {tensor.name: tensor.type for tensor in stored if tensor.type != "F32"}
        assert by_part(types, MIXTURES[mixture].main) == expected, name
