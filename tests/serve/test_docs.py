"""docs/API.md: its tables name every field that is refused, and its examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from tests.serve.harness import running
from trnc.serve.openai import fields
from trnc.serve.openai.protocol import ChatRequest, CompletionRequest

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
    assert not [name for name in sorted(names) if f"`{name}`" not in PAGE]


def test_every_curl_example_is_answered():
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    commands = [
        line for block in blocks for line in re.split(r"^(?=curl)", block, flags=re.M) if line
    ]
    assert len(commands) == 7
    with running() as server, server.http() as http:
        for command in commands:
            match = re.search(r"http://127\.0\.0\.1:8000(\S+)(?:.* -d '(.*)')?", command, re.DOTALL)
            assert match is not None, command
            path, body = match.groups()
            answer = http.get(path) if body is None else http.post(path, json=json.loads(body))
            assert answer.status_code == 200, answer.text
