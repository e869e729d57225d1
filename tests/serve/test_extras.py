"""The sampling extras of OpenAI's routes: several choices, kept stops, stop patterns, templates."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from tests.scripted_executor import expected_tokens
from tests.serve.harness import MODEL, Server, Setup, running
from tests.serve.test_requests import chat, completion, error_of
from trnc.core import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
REPLY = "The quick brown fox jumps over the lazy dog."
LONG = "a prompt that fills several pages of the toy vocabulary " * 3


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    server.say(HELLO, REPLY)
    server.say("story", REPLY)
    return server.openai()


def texts(server: Server, prompt: str, seeds: list[int], n: int) -> list[str]:
    """What the executor's formula gives for each seed."""
    ids = server.prompt_ids(prompt)
    outputs = [
        expected_tokens(ids, n, SamplingParams(temperature=1.0, seed=seed), server.executor.info)
        for seed in seeds
    ]
    return [server.tokenizer.decode(output, skip_special_tokens=True) for output in outputs]


# --- n and best_of --------------------------------------------------------------------------------


def test_choice_i_is_the_answer_of_seed_plus_i(server):
    with server.openai() as client:
        answer = client.completions.create(
            model=MODEL, prompt=LONG, n=5, seed=40, max_tokens=6, extra_body={"ignore_eos": True}
        )
    assert [choice.index for choice in answer.choices] == list(range(5))
    assert [choice.text for choice in answer.choices] == texts(server, LONG, [*range(40, 45)], 6)
    assert answer.usage.prompt_tokens == len(server.prompt_ids(LONG))
    assert answer.usage.completion_tokens == 30


def test_choices_of_several_prompts_are_prompt_after_prompt(server):
    fields = {"prompt": ["x", "yy"], "n": 2, "best_of": 2, "seed": 3, "max_tokens": 4}
    answer = completion(server, **fields, ignore_eos=True).json()
    expected = [text for prompt in ("x", "yy") for text in texts(server, prompt, [3, 4], 4)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    prompt_tokens = sum(len(server.prompt_ids(prompt)) for prompt in ("x", "yy"))
    assert answer["usage"]["prompt_tokens"] == prompt_tokens


def test_the_seed_of_a_choice_wraps_around(server):
    answer = completion(server, prompt="x", n=2, seed=2**63 - 1, max_tokens=4, ignore_eos=True)
    expected = texts(server, "x", [2**63 - 1, -(2**63)], 4)
    assert [choice["text"] for choice in answer.json()["choices"]] == expected


def test_choices_share_one_prefill():
    with running(Setup(max_rows=8)) as server:
        answer = completion(server, prompt=LONG, n=8, max_tokens=3, ignore_eos=True).json()
        computed = sum(
            sequence.count
            for plan in server.executor.plans
            for sequence in plan.sequences
            if not sequence.output_index
        )
    size = len(server.prompt_ids(LONG))
    page = server.executor.info.page_size
    assert size > 3 * page
    assert computed == size + 7 * (size - (size - 1) // page * page)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_repeated_prompt_with_choices_counts_its_cached_tokens_once(server):
    prompt = "another " + LONG
    first = completion(server, prompt=prompt, n=3).json()["usage"]
    second = completion(server, prompt=prompt, n=3).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


def test_128_choices_of_a_chat(server):
    answer = chat(server, n=128, seed=1, max_tokens=2, ignore_eos=True).json()
    assert len(answer["choices"]) == 128
    assert answer["usage"]["completion_tokens"] == 256
    assert answer["usage"]["prompt_tokens"] == len(server.chat_ids(HELLO))
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 20


def test_streamed_choices_are_the_whole_ones(server):
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "sample"}],
        "n": 3,
        "seed": 9,
        "max_tokens": 12,
        "extra_body": {"ignore_eos": True},
    }
    with server.openai() as client:
        whole = client.chat.completions.create(**options)
        chunks = list(
            client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
    *chunks, last = chunks
    joined = {0: "", 1: "", 2: ""}
    roles, ends = [], []
    for chunk in chunks:
        [choice] = chunk.choices
        assert choice.index not in ends, "text after the finish reason"
        joined[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
        ends += [choice.index] if choice.finish_reason else []
    assert sorted(roles) == sorted(ends) == [0, 1, 2]
    assert [joined[i] for i in range(3)] == [c.message.content for c in whole.choices]
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 36


def test_best_of_is_n(server):
    assert completion(server, n=2, best_of=2).status_code == 200
    assert completion(server, best_of=1).status_code == 200
    for fields in ({"n": 2, "best_of": 3}, {"best_of": 2}, {"n": 2, "best_of": 1}):
        error = error_of(completion(server, **fields))
        assert (error["param"], "equal to 'n'" in error["message"]) == ("best_of", True)
    assert error_of(completion(server, prompt=["a"] * 9, n=128))["param"] == "n"


def test_a_disconnect_during_choices_frees_all_rows():
    gate = threading.Semaphore(4)
    with running(Setup(gate=gate)) as server, server.http() as http:
        body = {"messages": HELLO, "n": 4, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
        while server.engine.in_flight:  # the engine stands at the gate meanwhile
            pass
        gate.release(10_000)
        stats = server.wait_for(lambda stats: stats.running + stats.waiting == 0)
        assert stats.output_tokens < 4 * 10


# --- how a text ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "matched"),
    [
        ({"stop": "jumps"}, "The quick brown fox ", "jumps"),
        ({"stop": "jumps", "no_stop_trim": True}, "The quick brown fox jumps", "jumps"),
        (
            {"stop": ["zzz", "ump"], "include_stop_str_in_output": True},
            "The quick brown fox jump",
            "ump",
        ),
        ({"stop_regex": r"f\w+ "}, "The quick brown ", r"f\w+ "),
        ({"stop_regex": ["q[a-z]*k", "b.*x"]}, "The ", "q[a-z]*k"),
        ({"stop_regex": "b.*x", "no_stop_trim": True}, "The quick brown fox", "b.*x"),
        ({"stop_regex": "o[vw]", "stop": "brown f"}, "The quick br", "o[vw]"),
        ({"stop_regex": "nothing"}, REPLY, "eos"),
        ({"max_tokens": 3}, None, None),
    ],
)
def test_what_ended_the_text_is_told(server, client, fields, text, matched, stream):
    extra = {name: value for name, value in fields.items() if name not in ("stop", "max_tokens")}
    usual = {name: value for name, value in fields.items() if name not in extra}
    answer = client.completions.create(
        model=MODEL, prompt="story", stream=stream, extra_body=extra, **{"max_tokens": 99} | usual
    )
    chunks = list(answer) if stream else [answer]
    last = chunks[-1].choices[0]
    if text is not None:
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
    expected = server.tokenizer.eos_token_ids[0] if matched == "eos" else matched
    assert last.matched_stop == expected
    assert last.stop_reason == (None if matched == "eos" else expected)
    assert last.finish_reason == ("length" if matched is None else "stop")


def test_a_kept_stop_token_is_shown_and_its_logprob_too(server, client):
    ids = server.tokenizer.encode(REPLY, add_special_tokens=False)
    fields = {"prompt": "story", "max_tokens": 50, "stop_token_ids": [ids[3]], "logprobs": 1}
    hidden = completion(server, **fields).json()
    kept = completion(server, **fields, include_stop_str_in_output=True).json()
    assert hidden["choices"][0]["text"] == server.tokenizer.decode(ids[:3])
    assert kept["choices"][0]["text"] == server.tokenizer.decode(ids[:4])
    assert len(hidden["choices"][0]["logprobs"]["tokens"]) == 3
    assert len(kept["choices"][0]["logprobs"]["tokens"]) == 4
    assert hidden["usage"] | {"prompt_tokens_details": None} == kept["usage"] | {
        "prompt_tokens_details": None
    }
    assert kept["choices"][0]["matched_stop"] == kept["choices"][0]["stop_reason"] == ids[3]


def test_the_two_names_of_a_kept_stop_must_agree(server):
    error = error_of(chat(server, no_stop_trim=True, include_stop_str_in_output=False))
    assert error["param"] == "no_stop_trim"


@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens_are_shown_on_demand(server, skip):
    reply = server.tokenizer.encode("one<|im_start|><|im_start|>two", add_special_tokens=False)
    server.say("specials", reply)
    answer = completion(
        server,
        prompt="specials",
        max_tokens=50,
        skip_special_tokens=skip,
        spaces_between_special_tokens=True,
        include_stop_str_in_output=True,
    )
    shown = "one<|im_start|><|im_start|>two<|im_end|>" if skip is False else "onetwo"
    assert answer.json()["choices"][0]["text"] == shown


# --- prompts --------------------------------------------------------------------------------------


def test_a_final_message_is_continued(server):
    messages = [*HELLO, {"role": "assistant", "content": "The quick"}]
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe quick"
    server.say(prompt, " brown fox")
    for begins in ({}, {"add_generation_prompt": False}):
        answer = chat(
            server, messages=messages, continue_final_message=True, max_tokens=9, **begins
        )
        assert answer.json()["choices"][0]["message"]["content"] == " brown fox"
        assert answer.json()["usage"]["prompt_tokens"] == len(server.prompt_ids(prompt))


def test_no_answer_need_be_begun(server):
    prompt = "<|im_start|>user\nhello<|im_end|>\n"
    server.say(prompt, "anything")
    answer = chat(server, add_generation_prompt=False, max_tokens=9)
    assert answer.json()["choices"][0]["message"]["content"] == "anything"


def test_template_variables_reach_the_template():
    template = (
        "{{ mood }}{% if documents %}{{ documents[0] }}{% endif %}: {{ messages[0].content }}"
    )
    with running(Setup(chat_template=template)) as server:
        server.say("calm7: hello", "yes")
        answer = chat(server, chat_template_kwargs={"mood": "calm", "documents": [7]}, max_tokens=9)
    assert answer.json()["choices"][0]["message"]["content"] == "yes"


# --- what is told about tokens --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_demand(server, client, stream):
    ids = [
        *server.tokenizer.encode(REPLY, add_special_tokens=False),
        server.tokenizer.eos_token_ids[0],
    ]
    extra = {"return_token_ids": True}
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=stream, extra_body=extra
    )
    parts = list(answer) if stream else [answer]
    assert [p.prompt_token_ids for p in parts if "prompt_token_ids" in p.model_extra] == [
        server.chat_ids(HELLO)
    ]
    choices = [part.choices[0] for part in parts]
    assert [t for c in choices if "token_ids" in c.model_extra for t in c.token_ids] == ids
    text = client.completions.create(
        model=MODEL, prompt="story", max_tokens=99, stream=stream, extra_body=extra
    )
    choices = [part.choices[0] for part in (list(text) if stream else [text])]
    assert [t for c in choices if "token_ids" in c.model_extra for t in c.token_ids] == ids
    assert choices[0].prompt_token_ids == server.prompt_ids("story")
    assert all("prompt_token_ids" not in choice.model_extra for choice in choices[1:])


def test_usage_in_every_chunk(client):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == counts[-2] > 5
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_usage_in_every_chunk_needs_usage(server):
    error = error_of(chat(server, stream=True, stream_options={"continuous_usage_stats": True}))
    assert error["param"] == "stream_options.continuous_usage_stats"
