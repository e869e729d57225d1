"""docs/API.md: its tables name every field that is refused, and its examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from tests.serve.harness import Setup, running
from tests.serve.test_routes import surface
from trnc.serve.admin.serving import ABORT_RULES
from trnc.serve.body import BodyRules
from trnc.serve.listening import ServeOptions
from trnc.serve.messages import protocol as messages
from trnc.serve.openai import fields
from trnc.serve.openai.protocol import CHAT_RULES, COMPLETION_RULES
from trnc.serve.responses import protocol as responses
from trnc.serve.sglang.protocol import GENERATE_RULES, SAMPLING_RULES
from trnc.serve.tokens.protocol import DETOKENIZE_RULES, TOKENIZE_RULES

RULES = (
    CHAT_RULES,
    COMPLETION_RULES,
    GENERATE_RULES,
    SAMPLING_RULES,
    TOKENIZE_RULES,
    DETOKENIZE_RULES,
    ABORT_RULES,
)
PAGE = (Path(__file__).parents[2] / "docs" / "API.md").read_text()


def test_every_field_is_on_the_page():
    tables = (
        fields.INERT,
        fields.CHAT_REFUSED,
        fields.COMPLETION_REFUSED,
        fields.MESSAGE_INERT,
        fields.MESSAGE_REFUSED,
        fields.STREAM_OPTIONS_REFUSED,
    )
    names = {name for table in tables for name in table}
    rules = [
        value
        for module in (messages, responses)
        for value in vars(module).values()
        if isinstance(value, BodyRules)
    ]
    assert len(rules) > 20
    names |= {name for rule in (*rules, *RULES) for name in (*rule.inert, *rule.refused)}
    structs = [rule.struct for rule in RULES]
    for struct in (*structs, responses.ResponsesRequest, messages.MessagesRequest):
        names |= {field.name for field in msgspec.structs.fields(struct)}
    assert not [name for name in sorted(names) if f"`{name}`" not in PAGE]


def examples() -> list[tuple[str, str, str | None]]:
    """Return the method, the path and the body of every curl command on the page."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    commands = [
        line for block in blocks for line in re.split(r"^(?=curl)", block, flags=re.M) if line
    ]
    found = []
    for command in commands:
        match = re.search(
            r"^curl(?: -[iN])?(?: -X (\w+))? '?http://127\.0\.0\.1:8000([^\s']+)(?:.* -d '(.*)')?",
            command,
            re.DOTALL,
        )
        assert match is not None, command
        method, path, body = match.groups()
        found.append((method or ("GET" if body is None else "POST"), path, body))
    return found


def test_every_example_is_answered():
    """RESPONSE_ID stands for the id of the last stored response."""
    setup = Setup(model="smollm2-135m", options=ServeOptions(response_store=10))
    response_id = ""
    with running(setup) as server, server.http() as http:
        for method, path, body in examples():
            content = None if body is None else json.loads(body)
            answer = http.request(method, path.replace("RESPONSE_ID", response_id), json=content)
            if content is not None and content.get("background"):
                response_id = answer.json()["id"]
            assert answer.status_code == 200, answer.text


def test_every_route_has_an_example():
    paths = [path.split("?")[0] for _, path, _ in examples()]
    patterns = {re.sub(r"\{.*?\}", ".+", line.split()[2]) for line in surface()}
    assert not [p for p in sorted(patterns) if not any(re.fullmatch(p, path) for path in paths)]
