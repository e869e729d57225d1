"""Libraries that people put in front of a server: litellm, and pydantic-ai with a tool loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.serve import markup
from tests.serve.harness import MODEL, Server, Setup, running

HELLO = [{"role": "user", "content": "hello"}]
CALL = f"Let me see.{markup.call('weather', city='Bonn')}"
ANSWER = "It is sunny in Bonn."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(Setup(chat_template=markup.TEMPLATE, markup=markup.MARKUP)) as server:
        yield server


@pytest.fixture
def calling(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A model that calls the tool it is told of, and then says what the tool said."""

    def token(history: list[int], index: int, _script: Any, info: Any) -> int:
        prompt = server.tokenizer.decode(history[: len(history) - index], skip_special_tokens=False)
        assert '"weather"' in prompt, "the model was not told of the tool"
        reply = ANSWER if "tool\nsunny in Bonn" in prompt else CALL
        ids = server.tokenizer.encode(reply, add_special_tokens=False)
        return ids[index] if index < len(ids) else info.eos_token_ids[0]

    monkeypatch.setattr("tests.scripted_executor.scripted_token", token)
    return server


def model_of(api: str, server: Server) -> Model:
    if api == "messages":
        provider = AnthropicProvider(anthropic_client=server.async_anthropic())
        return AnthropicModel(MODEL, provider=provider)
    kind = {"responses": OpenAIResponsesModel, "chat": OpenAIChatModel}[api]
    return kind(
        MODEL,
        provider=OpenAIProvider(openai_client=server.async_openai()),
        profile=OpenAIModelProfile(openai_supports_strict_tool_definition=False),
    )


@pytest.mark.parametrize("api", ["messages", "responses", "chat"])
def test_an_agent_runs_its_tool_loop(api, calling):
    asked: list[str] = []
    agent = Agent(model_of(api, calling))

    @agent.tool_plain
    def weather(city: str) -> str:
        """Say the weather."""
        asked.append(city)
        return f"sunny in {city}"

    answer = agent.run_sync("What is the weather in Bonn?")
    assert answer.output == ANSWER
    assert asked == ["Bonn"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_runs_a_tool_loop_over_chat(calling, stream):
    client = calling.openai()

    def ask(messages: list[Any]) -> Any:
        options: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
        if not stream:
            return client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as events:
            return events.get_final_completion().choices[0]

    first = ask(HELLO)
    [call] = first.message.tool_calls
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Bonn"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny in Bonn"}
    answer = ask([*HELLO, first.message.to_dict(), result])
    assert (answer.finish_reason, answer.message.content) == ("stop", ANSWER)


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of a price list
        import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("provider", "prefix"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm_chats(server, litellm, provider, prefix, stream):
    server.say(HELLO, "Good morning.")
    answer = litellm.completion(
        model=f"{provider}/{MODEL}",
        messages=HELLO,
        api_base=server.url + prefix,
        api_key="none",
        max_tokens=50,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.usage.prompt_tokens == len(server.chat_ids(HELLO))
    assert text == "Good morning."


def test_litellm_uses_responses(server, litellm):
    server.say(HELLO, "Good morning.")
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="hello", api_base=f"{server.url}/v1", api_key="none"
    )
    assert answer.output[0].content[0].text == "Good morning."
