"""/openapi.json is true: what it allows is taken or refused with reasons, never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import validate
from schemathesis.checks import CHECKS, load_all_checks

from tests.serve.harness import Server, Setup, running
from trnc.serve.listening import ServeOptions
from trnc.serve.messages.protocol import MESSAGES_RULES
from trnc.serve.openai.protocol import CHAT_RULES
from trnc.serve.responses.protocol import RESPONSES_RULES

KEY = "a-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ServeOptions(max_body_bytes=2**20, response_store=4, api_keys=(KEY,))
    with running(Setup(options=options, max_context=128)) as server:
        yield server
        server.check_idle(authorization=f"Bearer {KEY}")


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    with server.http() as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        return http.get("/openapi.json").json()


def test_it_is_valid_and_has_every_route(server, document):
    validate(document)
    with open("tests/serve/routes.txt") as lines:
        routes = [line.split()[1:3] for line in lines]
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    assert described == {(method, path.replace(":path", "")) for method, path in routes}


@pytest.mark.parametrize(
    ("path", "rules"),
    [
        ("/v1/chat/completions", CHAT_RULES),
        ("/v1/responses", RESPONSES_RULES),
        ("/v1/messages", MESSAGES_RULES),
    ],
)
def test_every_field_of_a_body_is_described(document, path, rules):
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = {field.encode_name for field in msgspec.structs.fields(rules.struct)}
    assert set(body["properties"]) == {*fields, *rules.inert, *rules.refused}
    for name, rule in rules.refused.items():
        assert body["properties"][name] == {"enum": list(rule.neutral)}


def test_the_fuzzer_finds_no_fault(server, document):
    """schemathesis, over every operation: bodies that the description allows, and others."""
    load_all_checks()
    names = (
        "not_a_server_error",
        "content_type_conformance",
        "response_schema_conformance",
    )
    checks = CHECKS.get_by_names(names)
    schema = schemathesis.openapi.from_dict(document)
    session = requests.Session()
    session.headers["authorization"] = f"Bearer {KEY}"
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=5,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def fuzz(case: Any) -> None:
            answer = case.call(base_url=server.url, session=session, timeout=60)
            assert answer.status_code not in (401, 403)
            case.validate_response(answer, checks=checks)
            assert "Traceback" not in answer.text

        fuzz()
