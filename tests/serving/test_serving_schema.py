"""The server behaves as its OpenAPI document says: schemathesis sends allowed and forbidden requests."""

import warnings
from operator import methodcaller

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from llamaspec.serving.document import openapi
from tests.serving.serving_site import FakeEngine, running
from tests.serving.tool_templates import TEMPLATES
from tests.support.waiting import PATIENCE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, of the extra dev")
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

# The server may refuse a request that the document allows, such as one with top_logprobs but without logprobs.
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
SCHEMA = schemathesis.openapi.from_dict(openapi("stories"))
PARSED_OPERATIONS = [*map(methodcaller("ok"), SCHEMA.get_all_operations())]
OPERATIONS = {f"{operation.method.upper()} {operation.path}": operation for operation in PARSED_OPERATIONS}


@pytest.fixture(scope="module")
def site():
    # Unlike the built-in model's, this template takes any roles in any order.
    with running(FakeEngine(context=4000), template=TEMPLATES["hermes"]) as site:
        yield site


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_the_server_does_as_its_document_says(site, name, mode):
    if name.startswith("GET") and mode is GenerationMode.NEGATIVE:
        return  # a request without parameters cannot be wrong

    @given(case=OPERATIONS[name].as_strategy(generation_mode=mode))
    @settings(
        max_examples=10 if name.startswith("POST") else 1,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example],
    )
    def holds(case):
        case.call_and_validate(base_url=site.url, checks=CHECKS, timeout=PATIENCE)

    holds()
    assert site.ask("/health").status == 200
