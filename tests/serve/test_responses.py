"""/v1/responses through the official client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve import markup
from tests.serve.harness import MODEL, Server, Setup, running
from tests.serve.test_requests import error_of
from trnc.core import SamplingParams
from trnc.serve.listening import ServeOptions
from trnc.serve.responses.protocol import Reasoning, Response, TextSettings
from trnc.serve.responses.store import ResponseStore, Stored

PATH = "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Say the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEATHER_IN_CHAT = {
    "type": "function",
    "function": {key: WEATHER[key] for key in ("name", "description", "parameters")},
}
STORING = ServeOptions(max_body_bytes=2**20, response_store=8)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    setup = Setup(chat_template=markup.TEMPLATE, markup=markup.MARKUP, options=STORING)
    with running(setup) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.openai()


def create(client: openai.OpenAI, **fields: Any) -> openai.types.responses.Response:
    return client.responses.create(**({"model": MODEL, "input": "hello"} | fields))


def post(server: Server, **fields: Any) -> httpx.Response:
    with server.http() as http:
        return http.post(PATH, json={"model": MODEL, "input": "hello"} | fields)


def test_a_whole_answer(server, client):
    server.say(HELLO, "Good morning.")
    answer = create(client, metadata={"a": "b"}, temperature=0.5)
    assert (answer.object, answer.status, answer.model) == ("response", "completed", MODEL)
    assert answer.id.startswith("resp_")
    assert answer.output_text == "Good morning."
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (answer.error, answer.incomplete_details) == (None, None)
    assert (answer.metadata, answer.temperature, answer.top_p) == ({"a": "b"}, 0.5, 1.0)
    assert (answer.tools, answer.tool_choice, answer.store) == (
        [],
        "auto",
        None,
    ) or answer.tools == []
    prompt = len(server.chat_ids(HELLO))
    reply = len(server.tokenizer.encode("Good morning.", add_special_tokens=False)) + 1
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (prompt, reply)
    assert answer.usage.total_tokens == prompt + reply


def test_the_limit_makes_an_answer_incomplete(server, client):
    server.say(HELLO, "one two three four")
    answer = create(client, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 2


REPLY = f"<think>They ask.</think>Good day.{markup.call('weather', city='Bonn')}"
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


def test_the_stream_has_the_full_sequence_of_events(server, client):
    server.say(HELLO, REPLY, tools=[WEATHER_IN_CHAT])
    events = list(create(client, tools=[WEATHER], stream=True))
    kinds = [event.type for event in events]
    once = [k for i, k in enumerate(kinds) if not (k.endswith(".delta") and kinds[i - 1] == k)]
    assert once == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == final.output[event.output_index].id
        if event.type == "response.output_item.done":
            assert event.item == final.output[event.output_index]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text == "Good day."
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == final.output[2].arguments == '{"city": "Bonn"}'


def test_a_stream_ends_with_the_response_that_is_not_streamed(server, client):
    server.say(HELLO, REPLY, tools=[WEATHER_IN_CHAT])
    whole = create(client, tools=[WEATHER])
    with client.responses.stream(model=MODEL, input="hello", tools=[WEATHER]) as stream:
        list(stream)
        streamed = stream.get_final_response()

    def shape(response: Any) -> Any:
        items = [
            item.model_dump(exclude={"id", "call_id", "parsed_arguments"})
            for item in response.output
        ]
        return response.status, items, response.usage.output_tokens

    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert str(shape(streamed)).replace(", 'parsed': None", "") == str(shape(whole))
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert whole.output[0].content[0].text == "They ask."


def test_on_the_wire_events_are_named_and_nothing_follows_the_last(server):
    text = post(server, stream=True, max_output_tokens=2).text
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        kind = name.removeprefix("event: ")
        assert f'"type":"{kind}"' in data
    assert blocks[-1].startswith("event: response.incomplete\n")


def test_every_item_reaches_the_template(server, client):
    call = {"name": "weather", "arguments": {"city": "Bonn"}}
    rendered = [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "be nice"},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    server.say(rendered, "It is sunny.", tools=[WEATHER_IN_CHAT])
    answer = create(
        client,
        instructions="be brief",
        tools=[WEATHER],
        input=[
            {"role": "developer", "content": "be nice"},
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Look."}],
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
            },
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": '{"city": "Bonn"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ],
    )
    assert answer.output_text == "It is sunny."


def test_what_the_model_says_can_be_sent_back(server, client):
    server.say(HELLO, REPLY, tools=[WEATHER_IN_CHAT])
    first = create(client, tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    sent_back = [*HELLO, *first.output, output]
    by_items = create(client, tools=[WEATHER], input=sent_back, temperature=0, max_output_tokens=9)
    by_id = create(
        client,
        tools=[WEATHER],
        input=[output],
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=9,
    )
    assert by_id.output_text == by_items.output_text
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    assert by_id.previous_response_id == first.id


def test_instructions_are_of_one_response_only(server, client):
    server.say([{"role": "system", "content": "be brief"}, *HELLO], "hi")
    first = create(client, instructions="be brief")
    conversation = [
        *HELLO,
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "x"},
    ]
    server.say(conversation, "as before")
    assert create(client, input="x", previous_response_id=first.id).output_text == "as before"


def test_get_and_delete(client):
    answer = create(client, max_output_tokens=3)
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)
    with pytest.raises(openai.BadRequestError, match="is not stored"):
        create(client, previous_response_id=answer.id)


def test_what_is_not_to_be_stored_is_not(client):
    answer = create(client, max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_without_a_store_whatever_needs_one_says_so():
    with running() as server, server.http() as http:
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": "x"}):
            answer = post(server, **fields)
            assert answer.status_code == 400
            assert error_of(answer)["param"] == next(iter(fields))
            assert "--response-store" in answer.text
        whole = post(server, max_output_tokens=1)
        assert whole.json()["store"] is False
        missing = http.get(f"{PATH}/{whole.json()['id']}")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "response_not_found")


def test_a_response_of_the_background_is_polled(server, client):
    server.say(HELLO, "Good morning.")
    begun = create(client, background=True)
    assert (begun.status, begun.output) == ("in_progress", [])
    while (answer := client.responses.retrieve(begun.id)).status == "in_progress":
        pass
    assert (answer.status, answer.output_text) == ("completed", "Good morning.")
    assert create(client, previous_response_id=begun.id, max_output_tokens=1).usage


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_ending_a_response_of_the_background_frees_its_row(how):
    gate = threading.Semaphore(0)
    with running(Setup(gate=gate, options=STORING)) as server, server.openai() as client:
        begun = create(client, background=True)
        while not server.executor.plans:
            pass
        while server.admission.open > 1:  # the one that began it is on its way out
            pass
        assert server.admission.open == 1
        with pytest.raises(openai.BadRequestError, match="its status is 'in_progress'"):
            create(client, previous_response_id=begun.id)
        if how == "cancel":
            assert client.responses.cancel(begun.id).status == "cancelled"
            assert client.responses.retrieve(begun.id).status == "cancelled"
            assert client.responses.cancel(begun.id).status == "cancelled"
        else:
            client.responses.delete(begun.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(begun.id)
        while server.admission.open:  # it, and the request that ended it
            pass
        gate.release(10_000)
        stats = server.wait_for(lambda stats: stats.running + stats.waiting == 0)
        assert stats.output_tokens < 10


def test_only_the_background_can_be_cancelled(client):
    answer = create(client, max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="'background': true"):
        client.responses.cancel(answer.id)


def test_a_failed_step_fails_the_response():
    with running(Setup(fail_at=(0, 3), options=STORING)) as server, server.openai() as client:
        with pytest.raises(openai.InternalServerError):
            create(client)
        events = list(create(client, stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert client.responses.retrieve(events[0].response.id).status == "failed"


def test_logprobs(server, client):
    server.say(HELLO, "Good morning.")
    answer = create(client, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == "Good morning."
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * len(logprobs)
    events = create(client, top_logprobs=2, stream=True)
    streamed = [e for event in events if event.type.endswith("text.delta") for e in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs]


def test_sampling_reaches_the_engine(server, client):
    extra = {"seed": 7, "top_k": 3, "min_p": 0.5}
    create(client, temperature=0.5, top_p=0.25, max_output_tokens=1, extra_body=extra)
    sampling = server.executor.plans[-1].sequences[0].sampling
    assert sampling == SamplingParams(temperature=0.5, top_p=0.25, top_k=3, min_p=0.5, seed=7)


def test_one_call_at_a_time_if_asked(server, client):
    server.say(HELLO, markup.call("weather") * 2, tools=[WEATHER_IN_CHAT])
    assert len(create(client, tools=[WEATHER]).output) == 2
    one = create(client, tools=[WEATHER], parallel_tool_calls=False)
    assert (len(one.output), one.status) == (1, "completed")


def test_a_call_that_the_limit_cut_is_not_in_the_next_prompt(server, client):
    server.say(HELLO, REPLY, tools=[WEATHER_IN_CHAT])
    tokens = len(server.tokenizer.encode(REPLY, add_special_tokens=False))
    first = create(client, tools=[WEATHER], max_output_tokens=tokens - 9)
    assert first.output[-1].type == "function_call"
    assert first.output[-1].status == "incomplete"
    create(client, previous_response_id=first.id, max_output_tokens=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "[1]"}]},
            "input[0].arguments",
        ),
        ({"inputs": "x"}, "inputs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": "must"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"stream_options": {}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
    ],
)
def test_what_is_refused(server, fields, param):
    answer = post(server, **fields)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_query_parameters_are_refused(server):
    with server.http() as http:
        answer = http.get(f"{PATH}/resp_1", params={"stream": "true"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "stream")


# --- the store ------------------------------------------------------------------------------------


def stored(response_id: str, text: str = "") -> Stored:
    response = Response(
        id=response_id,
        created_at=0,
        status="completed",
        model="m",
        output=[],
        background=False,
        store=True,
        instructions=text,
        max_output_tokens=None,
        metadata={},
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=Reasoning(),
        temperature=1.0,
        text=TextSettings({}),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
    )
    return Stored(response, ())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "get", "remove"]),
            st.integers(0, 6),
            st.integers(0, 4),
        )
    )
)
def test_the_store_keeps_the_newest_that_are_young_enough(steps):
    """Against a list as the model: capacity 3, age 10, each step takes some time."""
    now = 0.0
    store = ResponseStore(capacity=3, seconds=10, clock=lambda: now)
    model: list[tuple[str, float]] = []
    for what, number, seconds in steps:
        now += seconds
        name = str(number)
        alive = [(n, t) for n, t in model if t + 10 > now]
        if what == "put":
            store.put(stored(name))
            model = [*((n, t) for n, t in alive if n != name), (name, now)][-3:]
            assert len(store) == len(model)
        elif what == "get":
            assert (store.get(name) is not None) == (name in dict(alive))
        else:
            store.get(name)
            store.remove(name)
            model = [(n, t) for n, t in alive if n != name]
        assert len(store) <= 3


def test_the_store_is_bounded_in_size_and_ends_what_it_forgets():
    async def check() -> None:
        store = ResponseStore(capacity=100, seconds=100, max_bytes=10_000)
        task = asyncio.ensure_future(asyncio.Event().wait())
        first = stored("first")
        first.task = task
        store.put(first)
        for i in range(20):
            store.put(stored(f"large {i}", "x" * 3000))
        assert len(store) == 2
        assert store.get("first") is None
        with pytest.raises(asyncio.CancelledError):
            await task
        store.put(stored("too large", "x" * 20_000))
        assert len(store) == 0

    asyncio.run(check())
