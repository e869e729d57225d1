"""docs/API.md: its tables name every field that is refused, and its examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from tests.serve.harness import Setup, running
from trnc.serve.body import BodyRules
from trnc.serve.messages import protocol as messages
from trnc.serve.openai import fields
from trnc.serve.openai.protocol import ChatRequest, CompletionRequest
from trnc.serve.responses import protocol as responses

PAGE = (Path(__file__).parents[2] / "docs" / "API.md").read_text()


def test_every_field_is_on_the_page():
    tables = (
        fields.INERT,
        fields.CHAT_REFUSED,
        fields.COMPLETION_REFUSED,
        fields.MESSAGE_REFUSED,
        fields.STREAM_OPTIONS_REFUSED,
    )
    names = {name for table in tables for name in table}
    for struct in (ChatRequest, CompletionRequest):
        names |= {field.name for field in msgspec.structs.fields(struct)}
    rules = [
        value
        for module in (messages, responses)
        for value in vars(module).values()
        if isinstance(value, BodyRules)
    ]
    assert len(rules) > 20
    names |= {name for rule in rules for name in (*rule.inert, *rule.refused)}
    for struct in (responses.ResponsesRequest, messages.MessagesRequest):
        names |= {field.name for field in msgspec.structs.fields(struct)}
    assert not [name for name in sorted(names) if f"`{name}`" not in PAGE]


def test_every_curl_example_is_answered():
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    commands = [
        line for block in blocks for line in re.split(r"^(?=curl)", block, flags=re.M) if line
    ]
    assert len(commands) == 11
    with running(Setup(model="smollm2-135m")) as server, server.http() as http:
        for command in commands:
            match = re.search(r"http://127\.0\.0\.1:8000(\S+)(?:.* -d '(.*)')?", command, re.DOTALL)
            assert match is not None, command
            path, body = match.groups()
            answer = http.get(path) if body is None else http.post(path, json=json.loads(body))
            assert answer.status_code == 200, answer.text
