"""SGLang's /generate, with requests as its clients send them."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scripted_executor import expected_tokens
from tests.serve import markup
from tests.serve.harness import Server, Setup, running
from tests.serve.test_requests import error_of, json_values
from trnc.core import SamplingParams
from trnc.serve.listening import ServeOptions

PROMPT = "Once upon a time"
REPLY = " there was a small house in the wood, with a red door."


def generate(server: Server, method: str = "POST", **body: Any) -> httpx.Response:
    server.say(PROMPT, REPLY)
    server.say("second", " prompt!")
    with server.http() as http:
        return http.request(method, "/generate", json=body)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def reply_ids(server: Server, reply: str = REPLY) -> list[int]:
    return server.tokenizer.encode(reply, add_special_tokens=False)


# --- one prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_text_is_answered_in_sglangs_shape(server, method):
    answer = generate(
        server, method, text=PROMPT, sampling_params={"max_new_tokens": 32, "temperature": 0}
    )
    body = answer.json()
    assert set(body) == {"text", "output_ids", "meta_info"}
    eos = server.tokenizer.eos_token_ids[0]
    assert body["text"] == REPLY
    assert body["output_ids"] == [*reply_ids(server), eos]
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert len(meta.pop("id")) == 32
    assert meta == {
        "finish_reason": {"type": "stop", "matched": eos},
        "prompt_tokens": len(server.prompt_ids(PROMPT)),
        "completion_tokens": len(reply_ids(server)) + 1,
        "cached_tokens": meta["cached_tokens"],
        "weight_version": "default",
    }


def test_input_ids_are_the_same_prompt(server):
    text = generate(server, text=PROMPT).json()
    ids = server.prompt_ids(PROMPT)
    body = generate(server, input_ids=ids, return_prompt_token_ids=True).json()
    assert (body["text"], body["output_ids"]) == (text["text"], text["output_ids"])
    assert body["prompt_token_ids"] == ids


def test_the_defaults_are_sglangs(server):
    body = generate(server, text="hello", sampling_params={"ignore_eos": True, "stop": None}).json()
    assert body["meta_info"]["completion_tokens"] == 128
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    sampling = server.executor.plans[-1].sequences[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


def test_sampling_parameters_reach_the_engine(server):
    params = {
        "max_new_tokens": 2,
        "temperature": 7.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "sampling_seed": -3,
        "logit_bias": {"4": 1.5},
        "ignore_eos": True,
    }
    generate(server, text="sample", sampling_params=params)
    assert server.executor.plans[-1].sequences[0].sampling == SamplingParams(
        temperature=7.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=-3,
        logit_bias=((4, 1.5),),
        penalize_prompt=False,
    )
    generate(server, text="sample", sampling_params={"max_new_tokens": 1, "temperature": 1e-7})
    assert server.executor.plans[-1].sequences[0].sampling.temperature == 0


@pytest.mark.parametrize(
    ("params", "text", "matched"),
    [
        ({"stop": " wood"}, " there was a small house in the", " wood"),
        (
            {"stop": ["x", " wood"], "no_stop_trim": True},
            " there was a small house in the wood",
            " wood",
        ),
        ({"stop_regex": "s.*l"}, " there wa", "s.*l"),
    ],
)
def test_what_ended_the_text(server, params, text, matched):
    body = generate(server, text=PROMPT, sampling_params=params).json()
    assert body["text"] == text
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    assert body["meta_info"]["completion_tokens"] == len(body["output_ids"])


def test_a_stop_token(server):
    stop = reply_ids(server)[4]
    body = generate(server, text=PROMPT, sampling_params={"stop_token_ids": [stop]}).json()
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert body["output_ids"] == reply_ids(server)[:5]
    assert body["text"] == server.tokenizer.decode(reply_ids(server)[:4])


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("with_text", [False, True])
def test_logprobs_are_triples(server, with_text):
    body = generate(
        server,
        text=PROMPT,
        sampling_params={"max_new_tokens": 3},
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=-1,
        return_text_in_logprobs=with_text,
    ).json()
    meta = body["meta_info"]
    tokens = [server.tokenizer.decode([i]) if with_text else None for i in body["output_ids"]]
    assert meta["output_token_logprobs"] == [
        [-0.5, token_id, text] for token_id, text in zip(body["output_ids"], tokens, strict=True)
    ]
    assert meta["output_token_logprobs_length"] == 3
    assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
    assert [[entry[0] for entry in top] for top in meta["output_top_logprobs"]] == [
        [-0.5, -1.5]
    ] * 3
    assert [top[0] for top in meta["output_top_logprobs"]] == meta["output_token_logprobs"]


def test_logprobs_without_alternatives_and_of_the_stop_token(server):
    meta = generate(server, text=PROMPT, return_logprob=True).json()["meta_info"]
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"]
    assert meta["output_token_logprobs"][-1][1] == server.tokenizer.eos_token_ids[0]
    assert "output_top_logprobs" not in meta
    assert "output_token_logprobs" not in generate(server, text=PROMPT).json()["meta_info"]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_the_input_begin_where_they_are_asked_for(server, start, stream):
    fields = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 2, "stream": stream}
    fields |= {"logprob_start_len": start, "sampling_params": {"max_new_tokens": 2, "n": 2}}
    answer = generate(server, **fields)
    ids = server.prompt_ids(PROMPT)[start:]
    bodies = events(answer) if stream else answer.json()
    assert len(bodies) >= 2
    for body in bodies:
        meta = body["meta_info"]
        none, *rest = meta["input_token_logprobs"]
        assert none == [None, ids[0], None]
        assert rest == [[-0.5, token_id, None] for token_id in ids[1:]]
        first, *tops = meta["input_top_logprobs"]
        assert first is None
        assert [[entry[0] for entry in top] for top in tops] == [[-0.5, -1.5]] * (len(ids) - 1)
        assert meta["output_token_logprobs_length"] == meta["completion_tokens"]


def test_each_prompt_of_a_batch_has_its_own_start(server):
    bodies = generate(
        server, text=[PROMPT, PROMPT], return_logprob=True, logprob_start_len=[-1, 1]
    ).json()
    told = [len(body["meta_info"]["input_token_logprobs"]) for body in bodies]
    assert told == [0, len(server.prompt_ids(PROMPT)) - 1]


@pytest.mark.parametrize("stream", [False, True])
def test_no_new_tokens_are_a_prompt_that_is_scored_and_cached(server, stream):
    fields = {"text": "a prompt that fills more than one page, " * 2, "stream": stream}
    params = {"max_new_tokens": 0}
    answer = generate(
        server, **fields, sampling_params=params, return_logprob=True, logprob_start_len=0
    )
    body = events(answer)[-1] if stream else answer.json()
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["output_token_logprobs"] == []
    again = generate(server, **fields, sampling_params=params)
    again = events(again)[-1] if stream else again.json()
    assert again["meta_info"]["cached_tokens"] >= 16


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_is_cumulative(server):
    fields = {"text": PROMPT, "return_logprob": True, "sampling_params": {"stop": " red"}}
    whole = generate(server, **fields).json()
    stream = events(generate(server, **fields, stream=True))
    for before, after in pairwise(stream):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in before["meta_info"]
        assert "index" not in before
    assert len({event["meta_info"]["id"] for event in stream}) == 1
    assert [len(event["output_ids"]) for event in stream] == [*range(1, len(stream) + 1)]
    for event in stream:
        logged = [entry[1] for entry in event["meta_info"]["output_token_logprobs"]]
        assert logged == event["output_ids"]
    assert (stream[-1]["text"], stream[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert stream[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_the_interval_of_a_stream(server):
    params = {"max_new_tokens": 8, "stream_interval": 3}
    stream = events(generate(server, text=PROMPT, sampling_params=params, stream=True))
    assert [len(event["output_ids"]) for event in stream] == [3, 6, 8]


def test_a_streamed_batch_has_indexes(server):
    stream = events(generate(server, text=[PROMPT, "second"], stream=True))
    last = {event["index"]: event for event in stream}
    assert [last[i]["text"] for i in (0, 1)] == [REPLY, " prompt!"]
    assert all(event["meta_info"]["finish_reason"]["type"] == "stop" for event in last.values())


# --- batches, choices and ids ---------------------------------------------------------------------


def test_a_batch_is_a_list(server):
    ids = [server.prompt_ids(PROMPT), server.prompt_ids("second")]
    for body in ({"text": [PROMPT, "second"]}, {"input_ids": ids}):
        answers = generate(server, **body, rid="mine").json()
        assert [answer["text"] for answer in answers] == [REPLY, " prompt!"]
        assert [answer["meta_info"]["id"] for answer in answers] == ["mine_0", "mine_1"]
        assert all("index" not in answer for answer in answers)
    [alone] = generate(server, text=[PROMPT], rid=["one"]).json()
    assert (alone["text"], alone["meta_info"]["id"]) == (REPLY, "one")


def test_each_prompt_of_a_batch_may_have_its_own_parameters(server):
    answers = generate(
        server,
        text=[PROMPT, PROMPT],
        sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 3}],
        return_logprob=[True, False],
        top_logprobs_num=[1, 0],
    ).json()
    assert [len(answer["output_ids"]) for answer in answers] == [2, 3]
    assert "output_top_logprobs" in answers[0]["meta_info"]
    assert "output_token_logprobs" not in answers[1]["meta_info"]


@pytest.mark.parametrize("prompts", ["x", ["x", "yy"]])
def test_choices_are_prompt_major_and_count_up_the_seed(server, prompts):
    params = {"n": 3, "sampling_seed": 7, "max_new_tokens": 4, "ignore_eos": True}
    answers = generate(server, text=prompts, sampling_params=params, rid="r").json()
    each = [prompts] if isinstance(prompts, str) else prompts
    assert [answer["output_ids"] for answer in answers] == [
        expected_tokens(
            server.prompt_ids(prompt),
            4,
            SamplingParams(temperature=1.0, seed=seed),
            server.executor.info,
        )
        for prompt in each
        for seed in (7, 8, 9)
    ]
    assert all(answer["meta_info"]["id"].startswith("r") for answer in answers)
    assert len({answer["meta_info"]["id"] for answer in answers}) == len(answers)


# --- aborts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abort", [{"rid": "mine"}, {"rid": "mi"}, {"abort_all": True}])
def test_an_abort_delivers_the_output_so_far(stream, abort):
    gate = threading.Semaphore(5)
    with running(Setup(gate=gate)) as server:
        answers: list[httpx.Response] = []
        body = {"text": PROMPT, "rid": "mine", "stream": stream}
        asking = threading.Thread(target=lambda: answers.append(generate(server, **body)))
        asking.start()
        while not any(len(r.emitted) == 5 for r in list(server.engine.in_flight.values())):
            pass
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert http.post("/abort_request", json={"rid": "other"}).status_code == 200
            assert http.post("/abort_request", json={"rid": ""}).status_code == 200
            assert asking.is_alive()
            answer = http.post("/abort_request", json=abort)
            assert (answer.status_code, answer.content) == (200, b"")
        asking.join()
        gate.release(10_000)
        assert server.wait_for(lambda s: s.running + s.waiting == 0).output_tokens < 10
    [answer] = answers
    body = events(answer)[-1] if stream else answer.json()
    assert body["output_ids"] == reply_ids(server)[:5]
    assert body["text"] == server.tokenizer.decode(reply_ids(server)[:5])
    finish = body["meta_info"]["finish_reason"]
    assert (finish["type"], set(finish)) == (
        "abort",
        {"type", "message", "status_code", "err_type"},
    )


def test_openais_answers_are_aborted_by_their_ids():
    gate = threading.Semaphore(3)
    hello = [{"role": "user", "content": "hello"}]
    with running(Setup(gate=gate)) as server:
        server.say(hello, "one two three four five")
        with server.openai() as client:
            stream = client.chat.completions.create(
                model="toy", messages=hello, n=2, stream=True, max_tokens=50
            )
            first = next(stream)
            with server.http() as http:
                http.post("/abort_request", json={"rid": first.id})
            reasons = [c.finish_reason for chunk in stream for c in chunk.choices]
        gate.release(10_000)
    assert reasons.count("abort") == 2
    assert set(reasons) == {None, "abort"}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "text", "Either text, input_ids or input_embeds should be provided."),
        ({"text": "a", "input_ids": [1]}, "text", "Either text, input_ids"),
        ({"text": []}, "text", "empty"),
        ({"text": ""}, "text", "at least one token"),
        ({"input_ids": []}, "input_ids", "empty"),
        ({"input_ids": [[1], 2]}, "input_ids", "a list of such lists"),
        ({"input_ids": [99999]}, "input_ids", "not in the vocabulary"),
        ({"text": "a", "rid": ""}, "rid", "empty"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 entries, but there are 2 prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "Duplicate request IDs detected"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "2 prompts"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob", "2 prompts"),
        ({"text": "a", "top_logprobs_num": 1}, "top_logprobs_num", "needs 'return_logprob'"),
        (
            {"text": "a", "top_logprobs_num": 21, "return_logprob": True},
            "top_logprobs_num",
            "between 0 and 20",
        ),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len", "needs 'return_logprob'"),
        ({"text": "a", "logprob_start_len": 1}, "logprob_start_len", "less than the 1 tokens"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len", "must be -1"),
        ({"text": "a", "priority": 1}, "priority", "--priority-scheduling"),
        (
            {"text": "a", "max_thinking_tokens": 1},
            "max_thinking_tokens",
            "--reasoning-parser",
        ),
        (
            {
                "text": "a",
                "max_thinking_tokens": 1,
                "sampling_params": {"custom_params": {"thinking_budget": 2}},
            },
            "max_thinking_tokens",
            "differ",
        ),
        ({"text": "a", "sampling_params": {"custom_params": {"x": 2}}}, "custom_params.x", "Unkno"),
        ({"text": "a", "txt": 1}, "txt", "Did you mean 'text'"),
        ({"text": "a", "lora_path": "x"}, "lora_path", "not supported"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature", "'temperature'"),
        ({"text": "a", "sampling_params": 5}, "sampling_params", "JSON object"),
        (
            {"text": "a", "sampling_params": {"temperature": -1}},
            "temperature",
            "non-negative finite",
        ),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p", "above 0"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "at least 0"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "max_new_tokens", "are left"),
        ({"text": "a", "sampling_params": {"sampling_seed": 2**63}}, "sampling_seed", "64-bit"),
        ({"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex", "RE2"),
        ({"text": "a", "sampling_params": {"stream_interval": 0}}, "stream_interval", "at least 1"),
        ({"text": "a", "sampling_params": {"beam_width": 2}}, "beam_width", "not supported"),
        ({"text": "a", "sampling_params": {"n": 129}}, "n", "between 1 and 128"),
        ({"text": ["a"] * 9, "sampling_params": {"n": 128}}, "sampling_params.n", "1024"),
        (
            {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
            "sampling_params",
            "the same n",
        ),
        ({"text": ["a", "b"], "sampling_params": [{}, {"min_p": 2}]}, "min_p", "between 0 and 1"),
    ],
)
def test_bad_requests(server, body, param, text):
    answer = generate(server, **body)
    error = error_of(answer)
    assert answer.status_code == 400
    assert (error["param"] or "").endswith(param)
    assert text in error["message"]
    assert error["param"] in error["message"] or "request IDs" in text or "Either" in text


def test_a_path_names_the_prompt_of_the_batch(server):
    error = error_of(
        generate(server, text=["a", "b"], sampling_params=[{}, {"sampling_seed": "x"}])
    )
    assert error["param"] == "sampling_params[1].sampling_seed"


def test_an_id_in_use_is_refused():
    gate = threading.Semaphore(0)
    with running(Setup(gate=gate)) as server, server.http() as http:
        body = {"text": PROMPT, "rid": "mine"}
        asking = threading.Thread(target=lambda: httpx.post(f"{server.url}/generate", json=body))
        asking.start()
        while "mine" not in server.engine.in_flight:
            pass
        answer = http.post("/generate", json=body)
        http.post("/abort_request", json=body["rid"] and {"rid": "mine"})
        asking.join()
    assert (answer.status_code, "in use" in error_of(answer)["message"]) == (400, True)


@pytest.mark.parametrize(
    ("features", "fields", "param"),
    [
        ((), {"return_logprob": True}, "return_logprob"),
        (("logprobs",), {"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ((), {"max_thinking_tokens": 5}, "max_thinking_tokens"),
        ((), {"sampling_params": {"min_new_tokens": 5}}, "sampling_params.min_new_tokens"),
    ],
)
def test_what_the_preset_leaves_out_is_refused_by_sglangs_name(features, fields, param):
    with running(Setup(features=features)) as server:
        error = error_of(generate(server, text="a", **fields))
        assert (error["param"], error["code"]) == (param, "feature_disabled")
        assert f"'{param}'" in error["message"]


# --- thinking and priorities ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"max_thinking_tokens": 3},
        {"max_thinking_tokens": [3]},
        {"sampling_params": {"custom_params": {"thinking_budget": 3}}},
    ],
)
def test_thinking_has_a_limit_under_both_of_its_names(fields):
    setup = Setup(markup=markup.MARKUP)
    with running(setup) as server:
        words = reply_ids(server, "the lazy dog jumps over")
        server.say("Why?<think>", words)
        prompt = ["Why?<think>"] if isinstance(fields.get("max_thinking_tokens"), list) else None
        body = generate(server, text=prompt or "Why?<think>", **fields).json()
        text = (body[0] if prompt else body)["text"]
        assert text.startswith(server.tokenizer.decode(words[:3]) + "</think>")


@pytest.mark.parametrize(
    ("path", "ask", "order"),
    [
        (
            "/generate",
            lambda i: {"text": PROMPT, "sampling_params": {"sampling_seed": i}},
            [3, 2, 1],
        ),
        ("/v1/completions", lambda i: {"prompt": PROMPT, "seed": i}, [1, 2, 3]),
    ],
)
def test_priorities_are_the_order_of_admission(path, ask, order):
    """SGLang's routes take higher ones first, OpenAI's the lower ones, as vLLM does."""
    gate = threading.Semaphore(0)
    options = ServeOptions(priority_scheduling=True)
    priorities = [0, -5, 0, 5]  # by seed

    def post(seed: int) -> None:
        body = ask(seed) | {"priority": priorities[seed]}
        httpx.post(f"{server.url}{path}", json=body, timeout=60).raise_for_status()

    with running(Setup(gate=gate, options=options, max_rows=1)) as server:
        threads = [threading.Thread(target=post, args=(seed,)) for seed in range(4)]
        for i, thread in enumerate(threads):
            thread.start()
            while len(server.engine.in_flight) <= i or not server.executor.plans:
                pass
        gate.release(10_000)
        for thread in threads:
            thread.join()
        seeds = [plan.sequences[0].sampling.seed for plan in server.executor.plans]
    assert list(dict.fromkeys(seeds)) == [0, *order], "the first one runs already"


FIELDS = [
    "text",
    "input_ids",
    "rid",
    "stream",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "max_thinking_tokens",
    "priority",
]
PARAMS = ["max_new_tokens", "stop", "stop_regex", "temperature", "top_p", "n", "stop_token_ids"]


@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3),
    params=st.dictionaries(st.sampled_from(PARAMS), json_values, max_size=3),
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_body_is_a_500(server, fields, params):
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2} | params} | fields
    with server.http() as http:
        answer = http.post("/generate", json=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error_of(answer)
