"""/v1/messages and /v1/messages/count_tokens, through Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.serve import markup
from tests.serve.harness import MODEL, Server, Setup, running
from trnc.core import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
PATH = "/v1/messages"
WEATHER = {
    "name": "weather",
    "description": "Say the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEATHER_IN_CHAT = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say the weather.",
        "parameters": WEATHER["input_schema"],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(Setup(chat_template=markup.TEMPLATE, markup=markup.MARKUP)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return server.anthropic()


def create(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    return client.messages.create(
        **({"model": MODEL, "max_tokens": 100, "messages": HELLO} | fields)
    )


def post(server: Server, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 5, "messages": HELLO} | fields
    with server.http() as http:
        return http.post(PATH, json={k: v for k, v in body.items() if v is not ...})


def error_of(answer: httpx.Response) -> dict[str, str]:
    """Return the error of Anthropic's envelope, checked for its shape."""
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


def test_a_whole_answer(server, client):
    server.say(HELLO, "Good morning.")
    answer = create(client)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg_")
    [block] = answer.content
    assert (block.type, block.text) == ("text", "Good morning.")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    prompt = len(server.chat_ids(HELLO))
    reply = len(server.tokenizer.encode("Good morning.", add_special_tokens=False))
    assert answer.usage.output_tokens == reply + 1  # eos
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == prompt


def test_usage_splits_what_the_prefix_cache_had(server, client):
    messages = [{"role": "user", "content": "a question that fills more than one page " * 3}]
    server.say(messages, "yes")
    first, second = create(client, messages=messages), create(client, messages=messages)
    prompt = len(server.chat_ids(messages))
    assert (first.usage.input_tokens, first.usage.cache_read_input_tokens) == (prompt, 0)
    cached = second.usage.cache_read_input_tokens
    assert cached >= 16
    assert second.usage.input_tokens == prompt - cached


def test_the_stream_has_anthropics_events_in_order(server, client):
    server.say(HELLO, "Good morning.")
    with server.http() as http:
        body = {"model": MODEL, "max_tokens": 50, "messages": HELLO, "stream": True}
        text = http.post(PATH, json=body).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    names = [lines[0].removeprefix("event: ") for lines in blocks]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(lines[1].startswith("data: {") and len(lines) == 2 for lines in blocks)


def test_a_stream_accumulates_to_the_whole_answer(server, client):
    server.say(
        HELLO,
        f"<think>They greet.</think>Good {markup.call('weather', city='Bonn')}",
        tools=[WEATHER_IN_CHAT],
    )
    whole = create(client, tools=[WEATHER])
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=HELLO, tools=[WEATHER]
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"

    def shape(message: anthropic.types.Message) -> Any:
        blocks = [block.model_dump(exclude={"id"}) for block in message.content]
        return blocks, message.stop_reason, message.usage.output_tokens

    assert shape(streamed) == shape(whole)
    thinking, text, call = whole.content
    assert (thinking.type, thinking.thinking) == ("thinking", "They greet.")
    assert (text.type, text.text) == ("text", "Good ")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Bonn"})
    assert whole.stop_reason == "tool_use"


def test_every_block_reaches_the_template(server, client):
    """A conversation with all kinds of blocks is the one that the template is given."""
    rendered = [
        {"role": "system", "content": [{"type": "text", "text": t} for t in ("be", "brief")]},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Look.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Bonn"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "user", "content": "so?"},
    ]
    server.say(rendered, "It is sunny.", tools=[WEATHER_IN_CHAT])
    answer = create(
        client,
        system=[
            {"type": "text", "text": "be"},
            {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look.", "signature": ""},
                    {"type": "text", "text": "Wait."},
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "weather",
                        "input": {"city": "Bonn"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "sunny"}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}}],
    )
    assert answer.content[0].text == "It is sunny."
    assert answer.stop_reason == "end_turn"


def test_what_the_model_says_can_be_sent_back(server, client):
    server.say(HELLO, f"<think>Hm.</think>{markup.call('weather')}", tools=[WEATHER_IN_CHAT])
    first = create(client, tools=[WEATHER])
    call = first.content[-1]
    messages = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}],
        },
    ]
    assert create(client, tools=[WEATHER], messages=messages, max_tokens=3).usage.output_tokens


def test_an_answer_that_was_begun_is_gone_on_with(server, client):
    messages = [*HELLO, {"role": "assistant", "content": "Good mor"}]
    server.say(messages, "ning.", add_generation_prompt=False, continue_final_message=True)
    assert create(client, messages=messages).content[0].text == "ning."


def test_thinking_is_a_variable_of_the_template(server, client):
    server.say(HELLO, "plain")
    ids = server.tokenizer.encode("thought", add_special_tokens=False)
    text = server.template.render(HELLO, variables={"enable_thinking": True})
    prompt = server.tokenizer.encode(text, add_special_tokens=False)
    server.executor.script[tuple(prompt)] = ids
    assert create(client).content[0].text == "plain"
    assert create(client, thinking={"type": "disabled"}).content[0].text == "plain"
    assert create(client, thinking={"type": "adaptive"}).content[0].thinking == "thought"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(server, client, stream):
    server.say(HELLO, "one two three four")

    def ending(**fields: Any) -> tuple[str, str | None]:
        if not stream:
            answer = create(client, **fields)
        else:
            options = {"model": MODEL, "max_tokens": 100, "messages": HELLO} | fields
            with client.messages.stream(**options) as events:
                answer = events.get_final_message()
        return answer.stop_reason, answer.stop_sequence

    assert ending() == ("end_turn", None)
    assert ending(max_tokens=2) == ("max_tokens", None)
    assert ending(max_tokens=10_000) == ("end_turn", None), "the room of the context is the limit"
    assert ending(stop_sequences=["zzz", "three"]) == ("stop_sequence", "three")


def test_an_answer_that_the_context_ends_says_so(server, client):
    server.say(HELLO, [server.tokenizer.encode("x", add_special_tokens=False)[0]] * 600)
    answer = create(client, max_tokens=10_000)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens == 512 - len(server.chat_ids(HELLO))


def test_one_call_at_a_time_if_asked(server, client):
    server.say(HELLO, markup.call("weather") * 2, tools=[WEATHER_IN_CHAT])
    both = create(client, tools=[WEATHER])
    one = create(
        client,
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [len(both.content), len(one.content)] == [2, 1]
    assert one.stop_reason == "tool_use"
    server.wait_for(lambda stats: stats.running == 0)


def test_no_tools_may_be_called_with_tool_choice_none(server, client):
    server.say(HELLO, markup.call("weather"))
    answer = create(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert answer.content[0].text == markup.call("weather")


def test_sampling_reaches_the_engine(server, client):
    fields = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 7}
    create(client, max_tokens=1, extra_body=fields)
    sampling = server.executor.plans[-1].sequences[0].sampling
    assert sampling == SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=7)


def test_count_tokens_is_the_prompt_of_the_same_message(server, client):
    options: dict[str, Any] = {
        "model": MODEL,
        "system": "be brief",
        "messages": HELLO,
        "tools": [WEATHER],
    }
    count = client.messages.count_tokens(**options).input_tokens
    usage = client.messages.create(**options, max_tokens=1).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    bare = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    assert bare == len(server.chat_ids(HELLO)) < count


@pytest.mark.parametrize(
    ("fields", "status", "kind", "says"),
    [
        ({"max_tokens": ...}, 400, "invalid_request_error", "'max_tokens' is required"),
        ({"model": ...}, 400, "invalid_request_error", "'model' is required"),
        ({"model": "claude"}, 404, "not_found_error", "'claude' does not exist"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "at least one message"),
        ({"temperatur": 1}, 400, "invalid_request_error", "Did you mean 'temperature'?"),
        ({"temperature": 3}, 400, "invalid_request_error", "between 0 and 2"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"thinking": {"type": "enabled"}}, 400, "", "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, 400, "", "at least 1"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, 400, "", "thinking.budget_tokens"),
        ({"thinking": {"type": "maybe"}}, 400, "", "thinking.type"),
        ({"output_config": {"effort": "low"}}, 400, "", "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "", "format.schema"),
        ({"tool_choice": {"type": "auto"}}, 400, "", "needs 'tools'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, 400, "", "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, 400, "", "no tool"),
        ({"tools": [WEATHER, WEATHER]}, 400, "", "two of them have the name"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, 400, "", "tools[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "", "tools[0].type"),
        ({"tools": [{"name": "x"}]}, 400, "", "'tools[0].input_schema' is required"),
        ({"messages": [{"role": "tool", "content": ""}]}, 400, "", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "",
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "x"}],
                    }
                ]
            },
            400,
            "",
            "no earlier 'tool_use'",
        ),
    ],
)
def test_what_is_refused(server, fields, status, kind, says):
    answer = post(server, **fields)
    error = error_of(answer)
    assert (answer.status_code, error["type"]) == (status, kind or "invalid_request_error")
    assert says in error["message"]


def test_the_envelope_is_anthropics_whatever_fails(server):
    with server.http() as http:
        assert error_of(http.get(PATH))["type"] == "invalid_request_error"
        assert error_of(http.post(f"{PATH}/batches"))["type"] == "not_found_error"
        assert error_of(http.post(PATH, content=b"{"))["type"] == "invalid_request_error"
        too_large = http.post(PATH, content=b" " * (2**20 + 1))
        assert (too_large.status_code, error_of(too_large)["type"]) == (413, "request_too_large")


def test_an_engine_that_fails_is_an_error_before_and_an_event_in_a_stream():
    with running(Setup(fail_at=(0, 3))) as server:
        client = server.anthropic()
        with pytest.raises(anthropic.InternalServerError) as raised:
            create(client)
        assert raised.value.body["error"]["type"] == "api_error"
        with (
            pytest.raises(anthropic.APIStatusError) as raised,
            client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream,
        ):
            list(stream)
        assert raised.value.body["error"]["type"] == "api_error"


def test_without_the_models_markup_tools_are_refused():
    with running(Setup(chat_template=markup.TEMPLATE)) as server:
        assert "parser" in error_of(post(server, tools=[WEATHER]))["message"]
    with running(Setup(markup=markup.MARKUP)) as server:
        assert "no place for tools" in error_of(post(server, tools=[WEATHER]))["message"]
