"""POST /v1/completions through the official client."""

from __future__ import annotations

import openai
import pytest

from tests.scripted_executor import expected_tokens
from tests.serve.harness import MODEL, Server
from trnc.core import SamplingParams

PROMPT = "Once upon a time"
REPLY = " there was a small house in the wood, with a red door."


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    server.say(PROMPT, REPLY)
    server.say("second", " prompt!")
    return server.openai()


def test_string_prompt(server, client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (REPLY, "stop", 0)
    assert answer.usage.prompt_tokens == len(server.prompt_ids(PROMPT))


def test_token_ids_are_the_same_prompt(server, client):
    text = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9)
    ids = client.completions.create(model=MODEL, prompt=server.prompt_ids(PROMPT), max_tokens=9)
    assert ids.choices[0].text == text.choices[0].text
    assert ids.usage.prompt_tokens == text.usage.prompt_tokens


def test_max_tokens_is_16_unless_set(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_are_one_answer(server, client, as_ids):
    prompts = [PROMPT, "second", PROMPT]
    sent = [server.prompt_ids(p) for p in prompts] if as_ids else prompts
    answer = client.completions.create(model=MODEL, prompt=sent, max_tokens=100)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, REPLY),
        (1, " prompt!"),
        (2, REPLY),
    ]
    alone = [client.completions.create(model=MODEL, prompt=p, max_tokens=100) for p in prompts]
    assert answer.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
    assert answer.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)


def test_several_prompts_streamed(client):
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=[PROMPT, "second"],
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *chunks, last = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    texts = {0: "", 1: ""}
    ends: dict[int, str] = {}
    for chunk in chunks:
        [choice] = chunk.choices
        assert choice.index not in ends, "text after the finish reason"
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert texts == {0: REPLY, 1: " prompt!"}
    assert ends == {0: "stop", 1: "stop"}
    whole = client.completions.create(model=MODEL, prompt=[PROMPT, "second"], max_tokens=100)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_seed_gives_each_prompt_what_it_gets_alone(server, client):
    sampling = SamplingParams(temperature=1.0, seed=11)
    answer = client.completions.create(
        model=MODEL, prompt=["x", "yy"], seed=11, max_tokens=5, extra_body={"ignore_eos": True}
    )
    for choice, prompt in zip(answer.choices, ["x", "yy"], strict=True):
        ids = expected_tokens(server.prompt_ids(prompt), 5, sampling, server.executor.info)
        assert choice.text == server.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server, client, stream):
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=100, logprobs=2, stream=stream
    )
    choices = [c for part in (answer if stream else [answer]) for c in part.choices]
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in logprobs for token in part.tokens]
    offsets = [offset for part in logprobs for offset in part.text_offset]
    assert "".join(tokens) == REPLY
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert {value for part in logprobs for value in part.token_logprobs} == {-0.5}
    for part in logprobs:
        for token, top in zip(part.tokens, part.top_logprobs, strict=True):
            assert top[token] == -0.5
            assert 1 <= len(top) <= 2


def test_logprobs_0_gives_the_chosen_token(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert [list(top) for top in logprobs.top_logprobs] == [[t] for t in logprobs.tokens]


def test_stop_string(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100, stop="house")
    assert answer.choices[0].text == " there was a small "
    assert answer.choices[0].finish_reason == "stop"


def test_part_of_a_character_at_the_end_is_not_an_error(server):
    ids = server.tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1, "the toy vocabulary must split it"
    server.say("smile", ids)
    with server.openai() as client:
        whole = client.completions.create(model=MODEL, prompt="smile", logprobs=1)
        half = client.completions.create(model=MODEL, prompt="smile", max_tokens=1, logprobs=1)
    assert whole.choices[0].text == "🙂"
    assert half.choices[0].text == "\N{REPLACEMENT CHARACTER}"
    assert half.choices[0].logprobs.tokens[0].startswith("bytes:\\xf0")
