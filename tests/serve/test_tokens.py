"""/tokenize and /detokenize, as SGLang's and vLLM's clients use them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.harness import MODEL, Server, Setup, running
from tests.serve.test_requests import chat, completion, error_of

HELLO = [{"role": "user", "content": "hello"}]


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    with server.http() as http:
        return http.post(path, json=body)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_text(server, path):
    answer = post(server, path, model=MODEL, prompt="The quick <|im_end|>", return_token_strs=True)
    ids = server.prompt_ids("The quick <|im_end|>")
    assert answer.json() == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": [server.tokenizer.id_to_token(i) for i in ids],
    }
    assert post(server, path, prompt="The quick").json()["token_strs"] is None
    assert post(server, path, prompt="").json()["tokens"] == []


def test_a_batch(server):
    prompts = ["The quick", "", "dog"]
    body = post(server, "/tokenize", prompt=prompts, return_token_strs=True).json()
    ids = [server.prompt_ids(prompt) for prompt in prompts]
    assert (body["tokens"], body["count"]) == (ids, [len(one) for one in ids])
    assert [len(strings) for strings in body["token_strs"]] == body["count"]
    assert post(server, "/tokenize", prompt=[]).json()["count"] == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"x": 1}},
    ],
)
def test_messages_are_counted_as_the_chat_counts_them(server, options):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "well"},
    ]
    body = post(server, "/tokenize", messages=messages, **options).json()
    usage = chat(server, messages=messages, return_token_ids=True, **options).json()
    assert body["count"] == usage["usage"]["prompt_tokens"]
    assert body["tokens"] == usage["prompt_token_ids"]


def test_the_tokens_that_start_a_text():
    """A prompt gets them unless told otherwise; a template has written its own."""
    with running(Setup(bos=True)) as server:
        [bos, *ids] = server.prompt_ids("The dog")
        for body, expected in (
            ({"prompt": "The dog"}, [bos, *ids]),
            ({"prompt": "The dog", "add_special_tokens": False}, ids),
            ({"messages": HELLO}, server.chat_ids(HELLO)),
            ({"messages": HELLO, "add_special_tokens": True}, [bos, *server.chat_ids(HELLO)]),
        ):
            assert post(server, "/tokenize", **body).json()["tokens"] == expected
        usage = chat(server, messages=HELLO).json()["usage"]
        assert usage["prompt_tokens"] == len(server.chat_ids(HELLO))
        assert completion(server, prompt="The dog").json()["usage"]["prompt_tokens"] == len(ids) + 1


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_ids_to_text_in_both_shapes(server, path):
    ids = server.prompt_ids("<|im_start|>The dog<|im_end|>")
    answer = post(server, path, model=MODEL, tokens=ids).json()
    assert answer == {"text": "The dog", "prompt": "<|im_start|>The dog<|im_end|>"}
    for skip, text in ((True, "The dog"), (False, "<|im_start|>The dog<|im_end|>")):
        answer = post(server, path, tokens=ids, skip_special_tokens=skip).json()
        assert answer == {"text": text, "prompt": text}


def test_a_batch_of_ids(server):
    batch = [server.prompt_ids("The dog"), [], server.prompt_ids("fox")]
    assert post(server, "/detokenize", tokens=batch).json()["text"] == ["The dog", "", "fox"]
    assert post(server, "/detokenize", tokens=[]).json() == {"text": "", "prompt": ""}


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_there_and_back(server, text):
    ids = post(server, "/tokenize", prompt=text).json()["tokens"]
    assert post(server, "/detokenize", tokens=ids).json()["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/tokenize", {}, "prompt", "Either 'prompt' or 'messages'"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt", "Either"),
        ("/tokenize", {"prompt": [1]}, "prompt[0]", "expected str"),
        (
            "/tokenize",
            {"prompt": "a", "add_generation_prompt": True},
            "add_generation_prompt",
            "needs",
        ),
        ("/tokenize", {"prompt": "\ud800"}, None, "surrogates"),
        ("/tokenize", {"messages": []}, "messages", "at least one"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", "does not exist"),
        ("/tokenize", {"promt": "a"}, "promt", "Did you mean 'prompt'"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": [340]}, "tokens", "not in the vocabulary (0 to 339)"),
        ("/detokenize", {"tokens": [[1], [-1]]}, "tokens", "not in the vocabulary"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens", "a list of such lists"),
        ("/detokenize", {"tokens": "abc"}, "tokens", "expected array"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]", "expected"),
    ],
)
def test_bad_requests(server, path, body, param, text):
    if body.get("prompt") == "\ud800":
        with server.http() as http:
            answer = http.post(path, content=b'{"prompt": "\\ud800"}')
    else:
        answer = post(server, path, **body)
    error = error_of(answer)
    assert answer.status_code == (404 if param == "model" else 400)
    assert param in (None, error["param"])
    assert text in error["message"] or "not valid JSON" in error["message"]
