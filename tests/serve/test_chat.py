"""POST /v1/chat/completions through the official client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scripted_executor import expected_tokens
from tests.serve.harness import MODEL, Server, Setup, running
from tests.serve.test_text import cut
from trnc.checkpoint.generation import GenerationDefaults
from trnc.core import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
REPLY = "The quick brown fox jumps over the lazy dog. Größe 東京 🙂 end"


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    server.say(HELLO, REPLY)
    return server.openai()


def test_whole_answer(server, client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", REPLY)
    prompt_tokens = len(server.chat_ids(HELLO))
    reply_tokens = len(server.tokenizer.encode(REPLY, add_special_tokens=False))
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == reply_tokens + 1  # eos
    assert answer.usage.total_tokens == prompt_tokens + reply_tokens + 1
    assert answer.usage.prompt_tokens_details.cached_tokens <= prompt_tokens


def test_streamed_answer_has_openais_chunks(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    first, *middle, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == REPLY
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *middle))
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_stream_on_the_wire(server, client):
    body = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 1}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "matched_stop": None,
        "stop_reason": None,
    }


def test_stream_with_usage(client):
    whole = client.chat.completions.create(model=MODEL, messages=HELLO)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    *before, last = chunks
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all("usage" in c.model_fields_set and c.usage is None for c in before)


def test_a_repeated_prompt_reports_cached_tokens(server):
    messages = [{"role": "user", "content": "a question that fills more than one page " * 3}]
    server.say(messages, "yes")
    with server.openai() as client:
        first = client.chat.completions.create(model=MODEL, messages=messages)
        second = client.chat.completions.create(model=MODEL, messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_max_tokens_ends_with_length(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, **{name: 3})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


def test_without_max_tokens_the_context_is_the_limit():
    with running(Setup(max_context=96)) as server, server.openai() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, temperature=0, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 96


def test_ignore_eos_goes_on_past_the_end(server, client):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=100, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 100


def test_sampling_parameters_reach_the_engine(server):
    messages = [{"role": "user", "content": "sample"}]
    client = server.openai()
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0.7,
        top_p=0.9,
        seed=-5,
        max_tokens=2,
        logit_bias={"5": -100, "4": 1.5},
        extra_body={"top_k": 7, "min_p": 0.1, "ignore_eos": True},
    )
    expected = SamplingParams(
        temperature=0.7, top_k=7, top_p=0.9, min_p=0.1, seed=-5, logit_bias=((4, 1.5), (5, -100.0))
    )
    assert server.executor.plans[-1].sequences[0].sampling == expected
    ids = server.chat_ids(messages)
    tokens = expected_tokens(ids, 2, expected, server.executor.info)
    text = server.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.choices[0].message.content == text


def test_fields_that_are_not_set_take_the_models_defaults():
    defaults = GenerationDefaults(temperature=0.3, top_k=9, top_p=0.5)
    with running(Setup(defaults=defaults)) as server, server.openai() as client:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        sampling = server.executor.plans[-1].sequences[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.3, 9, 0.5)
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, temperature=0)
        assert server.executor.plans[-1].sequences[0].sampling.temperature == 0


def test_without_model_defaults_they_are_openais(server, client):
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    sampling = server.executor.plans[-1].sequences[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert server.executor.plans[-1].sequences[0].sampling.seed != sampling.seed


def test_stop_token_ids_end_the_text(server, client):
    ids = server.tokenizer.encode(REPLY, add_special_tokens=False)
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"stop_token_ids": [ids[3]]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == server.tokenizer.decode(
        ids[:3], skip_special_tokens=True
    )
    assert answer.usage.completion_tokens == 4


def test_logprobs(server, client):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    ids = server.tokenizer.encode(REPLY, add_special_tokens=False)
    assert len(content) == len(ids)  # eos is not shown
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == REPLY
    for entry in content:
        assert entry.logprob == -0.5
        assert [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5]
        assert entry.top_logprobs[0].token == entry.token
    plain = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content)


def test_streamed_logprobs_are_those_of_the_whole_answer(client):
    options = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**options)
    streamed = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole.choices[0].logprobs.content


def test_stop_strings_are_cut_and_abort_the_request(server, client):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, stop=["jumps over", "nothing"], logprobs=True
    )
    assert answer.choices[0].message.content == "The quick brown fox "
    assert answer.choices[0].finish_reason == "stop"
    shown = "".join(entry.token for entry in answer.choices[0].logprobs.content)
    assert shown.startswith("The quick brown fox")
    assert "jumps" not in shown
    assert server.wait_for(lambda stats: stats.running == 0).waiting == 0


@given(data=st.data())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(server, client, data):
    def part(text: str) -> st.SearchStrategy[str]:
        return st.tuples(st.integers(0, len(text) - 1), st.integers(1, 8)).map(
            lambda at: text[at[0] : at[0] + at[1]]
        )

    stops = data.draw(st.lists(part(REPLY) | st.text("xo g", min_size=1, max_size=3), max_size=4))
    options = {"model": MODEL, "messages": HELLO, "stop": stops or None}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content == cut(REPLY, stops)[0]
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_a_conversation_with_parts_and_a_developer(server):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    server.say(messages, "seen")
    sent = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d", "name": "someone"},
    ]
    with server.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=sent)
    assert answer.choices[0].message.content == "seen"


def test_a_large_prompt_is_tokenised_beside_the_event_loop():
    messages = [{"role": "user", "content": "long " * 6000}]
    with running(Setup(max_context=32_000, num_pages=2100)) as server:
        server.say(messages, "read")
        with server.openai() as client:
            answer = client.chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content == "read"


def test_async_client_and_many_requests_at_once():
    """200 requests over 8 rows all get their own answer."""
    with running(Setup(max_rows=8, num_pages=2000)) as server:
        questions = [[{"role": "user", "content": f"question {i}"}] for i in range(200)]
        for i, question in enumerate(questions):
            server.say(question, f"the answer is {i * i}.")

        async def ask(client: openai.AsyncOpenAI, i: int) -> str:
            if i % 2:
                answer = await client.chat.completions.create(model=MODEL, messages=questions[i])
                return answer.choices[0].message.content
            stream = await client.chat.completions.create(
                model=MODEL, messages=questions[i], stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        async def ask_all() -> list[str]:
            async with server.async_openai() as client:
                return await asyncio.gather(*(ask(client, i) for i in range(200)))

        assert asyncio.run(ask_all()) == [f"the answer is {i * i}." for i in range(200)]
        stats = server.stats()
        assert (stats.running, stats.waiting, stats.finished) == (0, 0, 200)
        assert stats.compiles_after_ready == 0
