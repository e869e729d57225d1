"""Structured outputs, token rules, penalties and prompt log-probabilities over HTTP."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.harness import Setup, running
from tests.serve.test_requests import chat, completion, error_of

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server():
    with running(Setup(grammars=True, max_context=2048, num_pages=600)) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def plain_server():
    with running(Setup(features=())) as running_server:
        yield running_server


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("response_format", {"type": "json_object"}, "--structured-outputs"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, "--structured"),
        ("guided_json", {}, "--structured-outputs"),
        ("guided_regex", "a+", "--structured-outputs"),
        ("guided_choice", ["a"], "--structured-outputs"),
        ("guided_grammar", 'root ::= "a"', "--structured-outputs"),
        ("structured_outputs", {"regex": "a"}, "--structured-outputs"),
        ("json_schema", "{}", "--structured-outputs"),
        ("regex", "a", "--structured-outputs"),
        ("ebnf", 'root ::= "a"', "--structured-outputs"),
        ("structural_tag", {}, "--structured-outputs"),
        ("repetition_penalty", 1.1, "--penalties"),
        ("frequency_penalty", 0.1, "--penalties"),
        ("presence_penalty", -0.1, "--penalties"),
        ("min_tokens", 1, "--min-tokens"),
        ("allowed_token_ids", [1], "--token-masks"),
        ("bad_words", ["x"], "--token-masks"),
        ("thinking_token_budget", 5, "--thinking-budget"),
        ("prompt_logprobs", 0, "--prompt-logprobs"),
        ("logit_bias", {"1": 1}, "--logit-bias"),
    ],
)
def test_a_feature_that_is_off_is_named_with_its_flag(plain_server, field, value, flag):
    for ask in (chat, completion):
        answer = ask(plain_server, **{field: value})
        error = error_of(answer)
        assert answer.status_code == 400
        assert error["code"] == "feature_disabled"
        assert error["param"].split(".")[0] == field
        assert flag in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"response_format": {"type": "json_objct"}}, "response_format.type", "'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format", "x"),
        ({"guided_json": "{"}, "guided_json", "valid JSON"),
        ({"guided_json": {"type": "frob"}}, "guided_json", "frob"),
        ({"guided_regex": "((("}, "guided_regex", "parenthesis"),
        ({"guided_choice": []}, "guided_choice", "choose"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar", "nothing"),
        ({"regex": "a" * 200_000}, "regex", "131072"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "'json'"),
        ({"structural_tag": {"type": "x"}}, "structural_tag", ""),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "set one"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty", "between -2 and 2"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "8 tokens"),
        ({"min_tokens": -1}, "min_tokens", "between 0"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "not be empty"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "vocabulary"),
        ({"bad_words": [""]}, "bad_words", "not empty"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "--reasoning-parser"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ],
)
def test_what_is_wrong_is_named(server, fields, param, text):
    answer = completion(server, **fields)
    error = error_of(answer)
    assert answer.status_code == 400
    assert error["param"] == param
    assert text in error["message"]
    assert completion(server).status_code == 200, "the engine goes on"


scalars = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "grün", 3, None]},
        {"const": "日本"},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "maxLength": 4},
        {"type": "number"},
    ]
)
schemas = st.recursive(
    scalars,
    lambda inner: (
        st.builds(
            lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner
        )
        | st.builds(
            lambda named: {
                "type": "object",
                "properties": named,
                "required": sorted(named)[:2],
                "additionalProperties": False,
            },
            st.dictionaries(
                st.sampled_from(["a", "b", "long name"]), inner, min_size=1, max_size=3
            ),
        )
    ),
    max_leaves=5,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=schemas, seed=st.integers(0, 10**6))
def test_answers_keep_to_any_schema(server, schema, seed):
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "seed": seed,
        "max_tokens": 900,
    }
    [choice] = chat(server, **fields).json()["choices"]
    if choice["finish_reason"] == "length":
        return  # random picks may make a string or a number as long as they like
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    pieces = []
    with server.http() as http:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True} | fields
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    [part] = json.loads(line[6:])["choices"]
                    pieces.append(part["delta"].get("content") or "")
    assert "".join(pieces) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "a+b?c"}, r"a+b?c"),
        ({"regex": "(ab|c){2}"}, r"(ab|c){2}"),
        ({"guided_choice": ["yes", 'no "quoted"\n', "émoji 🙂"]}, 'yes|no "quoted"\n|émoji 🙂'),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_grammar": 'root ::= "x" [0-9] root | "y"'}, r"(x\d)*y"),
        ({"ebnf": 'root ::= "q"'}, "q"),
        ({"structured_outputs": {"json_object": True}}, None),
        ({"response_format": {"type": "json_object"}}, None),
        ({"json_schema": json.dumps(SCHEMA)}, r'\{\s*"a"\s*:\s*"(x|yy)"\s*\}'),
        (
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "format": {"type": "regex", "pattern": "z+"},
                }
            },
            "z+",
        ),
    ],
)
def test_every_name_of_a_grammar(server, fields, pattern):
    ended = 0
    for seed in range(12):
        choice = completion(server, seed=seed, max_tokens=200, **fields).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            ended += 1
            if pattern is None:
                assert isinstance(json.loads(choice["text"]), dict)
            else:
                assert re.fullmatch(pattern, choice["text"]), choice["text"]
    assert ended


def test_a_grammar_ends_a_text_that_ignores_eos(server):
    answer = completion(server, guided_regex="abc", ignore_eos=True, max_tokens=50).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_that_no_token_can_begin_ends_at_once(server):
    eos = server.tokenizer.eos_token_ids[0]
    answer = completion(server, guided_regex="a+", allowed_token_ids=[eos]).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 0


def test_min_tokens_hold_back_eos_and_stop_strings(server):
    server.say("hold", "no. no. no. no.")
    ids = server.tokenizer.encode("no. no. no. no.", add_special_tokens=False)
    free = completion(server, prompt="hold", max_tokens=30, stop=["."]).json()["choices"][0]
    assert free["text"] == "no"
    per_sentence = len(server.tokenizer.encode("no. no.", add_special_tokens=False))
    held = completion(
        server, prompt="hold", max_tokens=30, stop=["."], min_tokens=per_sentence
    ).json()
    assert held["choices"][0]["text"] == "no. no. no"
    more = completion(server, prompt="hold", max_tokens=40, min_tokens=len(ids) + 3).json()
    text = more["choices"][0]["text"]
    assert text.startswith("no. no. no. no.")
    assert more["usage"]["completion_tokens"] >= len(ids) + 3


def test_allowed_and_forbidden_tokens(server):
    allowed = server.tokenizer.encode("abc", add_special_tokens=False)
    text = completion(server, allowed_token_ids=allowed, max_tokens=20).json()["choices"][0]["text"]
    assert set(text) <= set("abc")
    server.say("bad", "a red door")
    fields = {"prompt": "bad", "max_tokens": 12}
    assert completion(server, **fields).json()["choices"][0]["text"].startswith("a red door")
    without = completion(server, **fields, bad_words=["red"]).json()["choices"][0]["text"]
    assert "red" not in without


def test_prompt_logprobs_have_every_token_of_the_prompt(server):
    ids = server.prompt_ids("hello world")
    choice = completion(server, prompt="hello world", prompt_logprobs=2).json()["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    for token, entry in zip(ids[1:], rest, strict=True):
        assert entry[str(token)] == {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": server.tokenizer.decode([token]),
        }
        assert len(entry) == 2
    body = chat(server, prompt_logprobs=0).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_is_the_prompt_before_the_answer(server, stream):
    server.say("hello world", " again")
    fields = {"prompt": "hello world", "max_tokens": 3, "echo": True, "logprobs": 1}
    plain = completion(server, prompt="hello world", max_tokens=3, logprobs=1).json()["choices"][0]
    if not stream:
        choices = [completion(server, **fields).json()["choices"][0]]
    else:
        answer = completion(server, stream=True, **fields)
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
    text = "".join(choice["text"] for choice in choices)
    assert text == "hello world" + plain["text"]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for part in logprobs for token in part["tokens"]]
    offsets = [offset for part in logprobs for offset in part["text_offset"]]
    values = [value for part in logprobs for value in part["token_logprobs"]]
    assert "".join(tokens) == text
    assert [text[o : o + len(t)] for o, t in zip(offsets, tokens, strict=True)] == tokens
    assert values[0] is None
    assert None not in values[1:]


def test_echo_alone_needs_no_feature(plain_server):
    plain_server.say("hello world", " again")
    answer = completion(plain_server, prompt="hello world", max_tokens=9, echo=True).json()
    assert answer["choices"][0]["text"] == "hello world again"
    error = error_of(completion(plain_server, echo=True, logprobs=1))
    assert error["param"] in ("echo", "logprobs")


def test_penalties_reach_the_engine(server):
    completion(server, repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-1)
    plan = server.executor.plans[-1]
    sampling = plan.sequences[0].sampling
    penalties = (1.5, 0.25, -1.0)
    assert (
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    ) == penalties
    assert sampling.penalize_prompt
    assert plan.sequences[0].counts[0]
