"""What is refused, and how: always OpenAI's error shape, never a 500, never a dead engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.harness import MODEL, Server, Setup, running
from trnc.core import MAX_LOGIT_BIAS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error object, checked for its shape."""
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert "Traceback" not in answer.text
    return error


def chat(server: Server, **fields: Any) -> httpx.Response:
    with server.http() as http:
        return http.post(CHAT, json={"model": MODEL, "messages": HELLO, "max_tokens": 1} | fields)


def completion(server: Server, **fields: Any) -> httpx.Response:
    with server.http() as http:
        return http.post(TEXT, json={"model": MODEL, "prompt": "hello", "max_tokens": 1} | fields)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("temperature", 2.1, "between 0 and 2"),
        ("temperature", -0.1, "between 0 and 2"),
        ("temperature", "hot", "expected float"),
        ("temperature", True, "expected float"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "at least 1"),
        ("top_k", 1.5, "expected int"),
        ("min_p", 1.5, "between 0 and 1"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -1, "at least 1"),
        ("max_tokens", 100_000, "are left"),
        ("max_completion_tokens", 0, "at least 1"),
        ("max_completion_tokens", 100_000, "are left"),
        ("seed", 2**63, "64-bit"),
        ("seed", "1", "expected int"),
        ("stop", "", "not empty"),
        ("stop", ["a", ""], "not empty"),
        ("stop", ["x"] * 33, "at most 32"),
        ("stop", 5, "expected str | array"),
        ("top_logprobs", 21, "between 0 and 20"),
        ("top_logprobs", 1, "needs 'logprobs'"),
        ("logit_bias", {"x": 1}, "token ids"),
        ("logit_bias", {"07": 1}, "token ids"),
        ("logit_bias", {"-1": 1}, "token ids"),
        ("logit_bias", {"99999": 1}, "not in the vocabulary"),
        ("logit_bias", {"1": 101}, "between -100 and 100"),
        ("logit_bias", {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}, "at most 512"),
        ("stop_token_ids", [99999], "not in the vocabulary"),
        ("n", 0, "between 1 and 128"),
        ("n", 129, "between 1 and 128"),
        ("n", True, "expected int"),
        ("stop_regex", r"(a)\1", "RE2 can run"),
        ("stop_regex", ["a", "a*"], "empty text"),
        ("no_stop_trim", "yes", "expected bool"),
        ("continue_final_message", True, "'add_generation_prompt'"),
        ("chat_template_kwargs", {"messages": []}, "own field"),
        ("chat_template_kwargs", [], "expected"),
        ("ignore_eos", 1, "expected bool"),
        ("stream", "yes", "expected bool"),
        ("stream_options", {"include_usage": True}, "only allowed with 'stream'"),
        ("messages", [], "at least one"),
        ("messages", "hello", "expected array"),
    ],
)
def test_bad_values_are_400_and_name_the_field(server, field, value, text):
    limit = {} if field == "max_completion_tokens" else {"max_tokens": 1}
    if field == "continue_final_message":
        limit["add_generation_prompt"] = True
    with server.http() as http:
        body = {"model": MODEL, "messages": HELLO} | limit | {field: value}
        answer = http.post(CHAT, json=body)
    error = error_of(answer)
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0].split("[")[0] == field
    assert field in error["message"]
    assert text in error["message"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "empty list"),
        ("", "at least one token"),
        (["a", ""], "at least one token"),
        ([[]], "at least one token"),
        ([1, "a"], "a list of lists"),
        ([99999], "not in the vocabulary"),
        ([-1], "not in the vocabulary"),
        ([1.5], "expected"),
        ([True], "expected"),
        (None, "expected"),
        ({"a": 1}, "expected"),
        (["a"] * 1025, "at most 1024"),
        ("word " * 2000, "holds"),
    ],
)
def test_bad_prompts(server, value, text):
    answer = completion(server, prompt=value)
    error = error_of(answer)
    assert answer.status_code == 400
    assert error["param"].startswith("prompt")
    assert text in error["message"]


@pytest.mark.parametrize(
    ("messages", "param", "text"),
    [
        ([{"role": "user"}], "messages[0].content", "text"),
        ([{"content": "x"}], "messages[0].role", "required"),
        (["x"], "messages[0]", "JSON object"),
        ([{"role": "usr", "content": "x"}], "messages[0].role", "Did you mean 'user'?"),
        ([{"role": "function", "content": "x", "name": "f"}], "messages[0].role", "yet"),
        ([{"role": 5, "content": "x"}], "messages[0].role", "expected str"),
        ([*HELLO, {"role": "user", "content": 1}], "messages[1].content", "expected"),
        (
            [{"role": "user", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls",
            "belongs",
        ),
        (
            [{"role": "user", "content": "x", "tool_call_id": "1"}],
            "messages[0].tool_call_id",
            "belongs",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function",
            "name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "valid JSON",
        ),
        ([{"role": "user", "content": "x", "contnt": 1}], "messages[0].contnt", "'content'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "messages[0].content[0].type",
            "'image_url' is not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "text"),
    ],
)
def test_bad_messages(server, messages, param, text):
    answer = chat(server, messages=messages)
    error = error_of(answer)
    assert answer.status_code == 400
    assert error["param"] == param
    assert text in error["message"]


def test_a_prompt_that_does_not_fit(server):
    answer = chat(server, messages=[{"role": "user", "content": "word " * 2000}])
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "messages"


def test_the_context_is_what_the_pages_hold():
    with running(Setup(max_context=512, num_pages=5)) as server:
        with server.openai() as client:
            answer = client.chat.completions.create(
                model=MODEL, messages=HELLO, extra_body={"ignore_eos": True}
            )
        assert answer.usage.total_tokens == 4 * 16 + 1
        assert error_of(chat(server, max_tokens=60))["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "hint"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("tool", "tools"), ("xyzzy", "")],
)
def test_unknown_fields_get_the_nearest_match(server, field, hint):
    error = error_of(chat(server, **{field: 1}))
    assert error["param"] == field
    assert error["code"] == "unknown_field"
    assert f"Unknown field '{field}'" in error["message"]
    assert ("Did you mean" in error["message"]) == bool(hint)
    assert hint in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("store", True),
        ("service_tier", "flex"),
        ("reasoning_effort", "high"),
        ("prediction", {"type": "content"}),
    ],
)
def test_what_is_not_supported_is_400(server, field, value):
    answer = chat(server, **{field: value})
    error = error_of(answer)
    assert answer.status_code == 400
    assert error["param"] == field
    assert "not supported by this server yet" in error["message"]


@pytest.mark.parametrize(("field", "value"), [("suffix", "x")])
def test_what_completions_do_not_support_is_400(server, field, value):
    assert error_of(completion(server, **{field: value}))["param"] == field


def test_neutral_values_and_fields_without_effect_are_accepted(server):
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "modalities": ["text"],
        "audio": None,
        "store": False,
        "service_tier": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "safety_identifier": "me",
        "parallel_tool_calls": True,
        "temperature": None,
        "stop": None,
        "seed": None,
        "stream": None,
    }
    assert chat(server, **neutral).status_code == 200
    assert completion(server, best_of=1, echo=False, suffix=None).status_code == 200
    assert error_of(chat(server, user=5))["param"] == "user"


def test_stream_options_are_checked(server):
    error = error_of(chat(server, stream=True, stream_options={"include_usge": True}))
    assert error["param"] == "stream_options.include_usge"
    assert "'include_usage'" in error["message"]


def test_features_that_the_preset_leaves_out_are_refused():
    with running(Setup(features=())) as server:
        for fields in ({"logprobs": True}, {"logit_bias": {"1": 1}}):
            answer = chat(server, **fields)
            error = error_of(answer)
            [name] = fields
            assert (answer.status_code, error["param"]) == (400, name)
            assert f"`{name} = true`" in error["message"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"nonsense", "not valid JSON"),
        (b'{"messages": [NaN]}', "not valid JSON"),
        (b'{"messages": "\xff\xfe"}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"null", "JSON object"),
        (b"{}", "'messages' is required"),
    ],
)
def test_malformed_bodies(server, body, text):
    with server.http() as http:
        answer = http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert text in error_of(answer)["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_413(server, chunked):
    body = b'{"prompt": "' + b"x" * 2**20 + b'"}'
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    with server.http() as http:
        answer = http.post(TEXT, content=pieces if chunked else body)
        assert answer.status_code == 413
        assert "--max-body-bytes" in error_of(answer)["message"]
        assert http.get("/health").status_code == 200


def test_unknown_model_is_404_and_names_the_served_ones(server):
    answer = chat(server, model="gpt-4")
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert f"'{MODEL}'" in error["message"]
    assert chat(server, model="toy").json()["model"] == "toy"
    assert chat(server, model=None).json()["model"] == MODEL


def test_unknown_routes_and_methods(server):
    with server.http() as http:
        for path in ("/", "/v1/nothing", "/v1/models/", "/v1/chat/completions/"):
            assert http.get(path).status_code == 404
            error_of(http.get(path))
        answer = http.get(CHAT)
        assert answer.status_code == 405
        assert "POST" in error_of(answer)["message"]
        assert answer.headers["allow"] == "POST"


def test_a_model_without_template_has_no_chat():
    with running(Setup(chat_template=None)) as server:
        answer = chat(server)
        assert answer.status_code == 400
        assert "/v1/completions" in error_of(answer)["message"]
        assert completion(server).status_code == 200


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = [
    "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs",
    "top_logprobs", "logit_bias", "stream", "stream_options", "ignore_eos", "stop_token_ids",
    "tools", "n", "user", "response_format", "best_of", "stop_regex", "no_stop_trim",
    "response_format", "structured_outputs", "guided_json", "guided_choice", "regex", "ebnf",
    "structural_tag", "tool_choice", "min_tokens", "allowed_token_ids", "bad_words",
    "thinking_token_budget", "repetition_penalty", "presence_penalty", "prompt_logprobs", "echo",
    "skip_special_tokens", "chat_template_kwargs", "continue_final_message", "return_token_ids",
]  # fmt: skip


@given(fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_body_is_a_500(server, fields):
    with server.http() as http:
        for path, base in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
            answer = http.post(path, json=base | {"max_tokens": 2} | fields)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                error_of(answer)


def test_after_all_that_nothing_is_left_running(server):
    stats = server.wait_for(lambda stats: stats.running + stats.waiting == 0)
    assert stats.compiles_after_ready == 0
    assert chat(server).status_code == 200
