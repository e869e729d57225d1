"""Grammars, demanded calls and thinking budgets on the APIs of items and blocks, and of chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.serve import markup
from tests.serve.harness import MODEL, Server, Setup, running

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bonn", "Köln"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
OTHER = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 3}}}
SCHEMAS = {"weather": SCHEMA, "time": OTHER}
ORDER = ("name", "description", "parameters", "strict")  # as a template is told of a tool
SEEDS = range(6)
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
OPEN = markup.TEMPLATE.replace("{% if enable_thinking %}<think>{% endif %}", "<think>")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(
        Setup(
            grammars=True,
            max_context=2048,
            num_pages=600,
            chat_template=markup.TEMPLATE,
            markup=markup.MARKUP,
        )
    ) as server:
        yield server


@pytest.fixture(scope="module")
def thinking_server() -> Iterator[Server]:
    """Its template opens the thoughts itself."""
    with running(
        Setup(
            grammars=True, max_context=2048, num_pages=600, chat_template=OPEN, markup=markup.MARKUP
        )
    ) as server:
        yield server


@pytest.fixture(scope="module")
def plain_server() -> Iterator[Server]:
    setup = Setup(features=(), chat_template=markup.TEMPLATE, markup=markup.MARKUP)
    with running(setup) as server:
        yield server


@dataclass(frozen=True)
class Answer:
    """`cut`: it was cut off. `pairs` are the calls, their arguments as text."""

    cut: bool
    thoughts: str
    text: str
    pairs: list[tuple[str, str]]

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.pairs]


def tools(api: str, **more: Any) -> list[dict[str, Any]]:
    """The two tools as an API wants them."""
    if api == "messages":
        return [{"name": n, "input_schema": s, **more} for n, s in SCHEMAS.items()]
    flat = [{"name": n, "parameters": s, **more} for n, s in SCHEMAS.items()]
    if api == "responses":
        return [{"type": "function", **each} for each in flat]
    return [{"type": "function", "function": each} for each in flat]


def post(server: Server, api: str, **fields: Any) -> httpx.Response:
    path, body = {
        "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 400}),
        "responses": ("/v1/responses", {"input": "hello"}),
        "chat": ("/v1/chat/completions", {"messages": HELLO}),
    }[api]
    with server.http() as http:
        return http.post(path, json={"model": MODEL} | body | fields)


def answer(server: Server, api: str, **fields: Any) -> Answer:
    """Return what is in an answer."""
    got = post(server, api, **fields)
    assert got.status_code == 200, got.text
    body = got.json()
    if api == "chat":
        [choice] = body["choices"]
        message = choice["message"]
        called = [call["function"] for call in message.get("tool_calls", [])]
        pairs = [(call["name"], call["arguments"]) for call in called]
        thoughts = message.get("reasoning_content") or ""
        return Answer(
            choice["finish_reason"] == "length", thoughts, message["content"] or "", pairs
        )
    if api == "messages":
        blocks = body["content"]
        thoughts = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        pairs = [(b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
        return Answer(body["stop_reason"] == "max_tokens", thoughts, text, pairs)
    items = body["output"]
    parts = {kind: [i for i in items if i["type"] == kind] for kind in ("reasoning", "message")}
    thoughts, text = (
        "".join(part["text"] for item in parts[kind] for part in item["content"]) for kind in parts
    )
    pairs = [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
    return Answer(body["status"] == "incomplete", thoughts, text, pairs)


def answers(server: Server, api: str, **fields: Any) -> list[Answer]:
    """Return the answers to some seeds, without those that go on for too long."""
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    every = [answer(server, api, **fields, **{limit: 500}, seed=seed) for seed in SEEDS]
    ended = [each for each in every if not each.cut]
    assert len(ended) > len(every) // 3
    return ended


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_text_of_a_response_keeps_to_its_schema(server, seed):
    client = server.openai()
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "hello",
        "text": {"format": FORMAT},
        "extra_body": {"seed": seed},
    }
    whole = client.responses.create(**options)
    jsonschema.validate(json.loads(whole.output_text), SCHEMA)
    assert whole.text.format.schema_ == SCHEMA
    events = client.responses.create(**options, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


class Day(pydantic.BaseModel):
    """What the clients below are to get."""

    number: int = pydantic.Field(ge=0, le=9)
    name: str = pydantic.Field(max_length=4)


def test_openais_client_parses_into_a_model(server):
    client = server.openai()
    answer = client.responses.parse(model=MODEL, input="hello", text_format=Day)
    assert isinstance(answer.output_parsed, Day)
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "response_format": Day}
    completion = client.chat.completions.parse(**options)
    assert isinstance(completion.choices[0].message.parsed, Day)
    with client.chat.completions.stream(**options, seed=1) as stream:
        streamed = stream.get_final_completion()
    assert isinstance(streamed.choices[0].message.parsed, Day)


def test_openais_client_parses_the_arguments_of_a_strict_tool(server):
    completion = server.openai().chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Day)],
        tool_choice="required",
    )
    calls = completion.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Day) for call in calls)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_makes_a_model(server, mode):
    instructor = pytest.importorskip("instructor")  # an extra, apart from `dev`
    client = instructor.from_openai(server.openai(), mode=instructor.Mode[mode])
    day = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_model=Day, max_retries=0
    )
    assert isinstance(day, Day)


@pytest.mark.parametrize(
    ("api", "fields", "schema"),
    [
        ("responses", {"text": {"format": FORMAT}}, SCHEMA),
        ("responses", {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            SCHEMA,
        ),
    ],
)
def test_every_format_of_a_text(server, api, fields, schema):
    for each in answers(server, api, **fields):
        jsonschema.validate(json.loads(each.text), schema)


def test_a_schema_holds_after_the_thoughts_and_nothing_escapes_into_them(thinking_server):
    """The thoughts are free and end by force; all that follows is the JSON."""
    fields = {"text": {"format": FORMAT}, "thinking_token_budget": 9}
    for each in answers(thinking_server, "responses", **fields):
        assert each.thoughts
        jsonschema.validate(json.loads(each.text), SCHEMA)


# --- calls ----------------------------------------------------------------------------------------


def demand(api: str, name: str | None) -> Any:
    if api == "messages":
        return {"type": "any"} if name is None else {"type": "tool", "name": name}
    if name is None:
        return "required"
    named = {"name": name}
    return {"type": "function", **({"function": named} if api == "chat" else named)}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("name", [None, "weather"])
def test_a_call_that_is_demanded_comes(server, api, name):
    for each in answers(server, api, tools=tools(api), tool_choice=demand(api, name)):
        assert not each.text.strip()
        assert each.calls
        for called, arguments in each.calls:
            assert name in (None, called)
            jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_one_call_is_demanded_where_they_must_not_be_parallel(server, api):
    choice = demand(api, None)
    fields: dict[str, Any] = {"tools": tools(api), "tool_choice": choice}
    if api == "messages":
        choice["disable_parallel_tool_use"] = True
    else:
        fields["parallel_tool_calls"] = False
    assert [len(each.calls) for each in answers(server, api, **fields)] == [1] * len(SEEDS)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_calls_of_strict_tools_keep_to_their_schemas(server, api):
    """The model begins a call of its own will, with arguments that the schema does not have."""
    told = tools("chat", **({} if api == "chat" else {"description": ""}), strict=True)
    for each in told:
        each["function"] = {k: each["function"][k] for k in ORDER if k in each["function"]}
    variables = {"variables": {"enable_thinking": False}} if api == "messages" else {}
    begun = 'Well.<tool_call>\n{"name": "weather", "arguments": {"town": 1}}\n</tool_call>'
    server.say(HELLO, begun, tools=told, **variables)
    one_call = {
        "chat": {"parallel_tool_calls": False},
        "responses": {"parallel_tool_calls": False},
        "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    }[api]
    got = answer(server, api, tools=tools(api, strict=True), **one_call)
    assert got.text.startswith("Well.")
    [(called, arguments)] = got.calls
    assert called == "weather"
    jsonschema.validate(arguments, SCHEMA)


def test_an_answer_is_in_the_format_or_calls_a_tool(server):
    """Which one, the model says: a grammar for the text leaves the tools where they are."""
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields = {"tools": tools("chat"), "response_format": format}
    for each in answers(server, "chat", **fields):
        for called, arguments in each.calls:
            jsonschema.validate(arguments, SCHEMAS[called])
        if not each.calls:
            jsonschema.validate(json.loads(each.text), SCHEMA)
    for reply in (markup.call("weather", city="Bonn", days=3), '{"city": "Bonn", "days": 3}'):
        server.say(HELLO, reply, tools=fields["tools"])
        got = answer(server, "chat", **fields, parallel_tool_calls=False)
        assert got.calls == ([("weather", {"city": "Bonn", "days": 3})] if "<" in reply else [])
        assert got.text == ("" if "<" in reply else reply)


def test_two_grammars_for_one_text_are_refused(server):
    got = post(
        server,
        "responses",
        tools=tools("responses"),
        tool_choice="required",
        text={"format": FORMAT},
    )
    assert got.status_code == 400
    assert "'text.format' and 'tool_choice' each ask for a grammar" in got.text


# --- thinking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7])
def test_thinking_ends_where_its_budget_does(server, budget):
    thinking = {"type": "enabled", "budget_tokens": budget}
    prompt = server.chat_ids(HELLO, variables={"enable_thinking": True})
    words = [*server.tokenizer.encode("the lazy dog " * 9, add_special_tokens=False)]
    server.executor.script[tuple(prompt)] = words
    thoughts = answer(server, "messages", thinking=thinking).thoughts
    assert thoughts == server.tokenizer.decode(words[:budget])


def test_a_model_may_think_less_than_its_budget(server):
    prompt = server.chat_ids(HELLO, variables={"enable_thinking": True})
    reply = server.tokenizer.encode("Hm.</think>Hello.", add_special_tokens=False)
    server.executor.script[tuple(prompt)] = reply
    thinking = {"type": "enabled", "budget_tokens": 2000}
    assert answer(server, "messages", thinking=thinking) == Answer(False, "Hm.", "Hello.", [])


@pytest.mark.parametrize("budget", [1, 7])
def test_a_response_has_a_budget_too(thinking_server, budget):
    words = thinking_server.tokenizer.encode("the lazy dog " * 9, add_special_tokens=False)
    thinking_server.executor.script[tuple(thinking_server.chat_ids(HELLO))] = words
    thoughts = answer(thinking_server, "responses", thinking_token_budget=budget).thoughts
    assert thoughts == thinking_server.tokenizer.decode(words[:budget])


# --- without the features -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "fields", "param", "flag"),
    [
        ("responses", {"text": {"format": FORMAT}}, "text.format", "--structured-outputs"),
        ("responses", {"tool_choice": "required"}, "tool_choice", "--structured-outputs"),
        ("responses", {"strict": True}, "tools[0].strict", "--structured-outputs"),
        ("responses", {"thinking_token_budget": 5}, "thinking_token_budget", "--thinking-budget"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice", "--structured-outputs"),
        ("messages", {"strict": True}, "tools[0].strict", "--structured-outputs"),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
            "--structured-outputs",
        ),
        (
            "messages",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens",
            "--thinking-budget",
        ),
        ("chat", {"tool_choice": "required"}, "tool_choice", "--structured-outputs"),
        ("chat", {"strict": True}, "tools[0].function.strict", "--structured-outputs"),
    ],
)
def test_a_feature_that_is_off_is_named_with_its_flag(plain_server, api, fields, param, flag):
    strict = {"strict": True} if fields.pop("strict", False) else {}
    if strict or "tool_choice" in fields:
        fields["tools"] = tools(api, **strict)
    got = post(plain_server, api, **fields)
    assert got.status_code == 400
    message = got.json()["error"]["message"]
    assert f"'{param}'" in message
    assert flag in message
