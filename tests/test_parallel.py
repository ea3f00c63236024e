"""A model on several devices: every op within the bound of one device, and mistakes that people make are found."""

import pytest

from tests.on_devices import MORE, MUTANTS, WALKS, results


@pytest.fixture(scope="module")
def found():
    """The results of a kind of cases, computed once."""
    known = {}

    def find(kind):
        if kind not in known:
            known[kind] = results(kind)
        return known[kind]

    return find


@pytest.mark.parametrize("case", WALKS, ids=str)
def test_every_op_is_within_the_bound_of_one_device(found, case):
    walked = found("walk")[WALKS.index(case)]
    assert (walked["wrong"], walked["ratio"] < 1) == (None, True)
    assert walked["steps"] > 10


@pytest.mark.parametrize("case", MORE, ids=str)
def test_every_op_of_more_models_is_within_the_bound(found, case):
    walked = found("more")[MORE.index(case)]
    assert (walked["wrong"], walked["ratio"] < 1) == (None, True)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(found, name):
    walked = found("mutants")[[*MUTANTS].index(name)]
    assert walked["wrong"]
    assert walked["ratio"] > MUTANTS[name][1]
