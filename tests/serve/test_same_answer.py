"""On a real model: every API gives the same ids and log-probabilities for the same prompt ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.models.tiny import PRESET, tiny_model
from tests.runtime.serving import compile_missing
from tests.serve.harness import Server, Setup, running
from tests.serve.test_generate import events
from tests.serve.toy_model import toy_tokenizer
from trnc.runtime.start import StartOptions, start_executor

MESSAGES = [{"role": "user", "content": "Once upon a time there was a small house"}]
TOKENS = 10
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 17},
]
Answer = tuple[list[int], list[float], list[list[float]]]  # ids, logprobs, those of the top ones


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer, _ = toy_tokenizer()
    tiny_model("llama", vocab_size=tokenizer.vocab_size).save_pretrained(folder)
    options = StartOptions(str(folder), PRESET, "eager", folder)
    executor, _, features = start_executor(options, compile_missing, print)
    setup = Setup(real_executor=executor, features=features)
    with running(setup) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> Any:
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return events(answer) if body.get("stream") else answer.json()


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the chunks of a stream of one choice have of ids and log-probabilities."""
    return [choice for chunk in chunks for choice in chunk["choices"]]


def of_chat(server: Server, stream: bool, **sampling: Any) -> Answer:
    body = post(
        server,
        "/v1/chat/completions",
        messages=MESSAGES,
        max_tokens=TOKENS,
        logprobs=True,
        top_logprobs=3,
        ignore_eos=True,
        return_token_ids=True,
        stream=stream,
        **sampling,
    )
    choices = joined(body) if stream else body["choices"]
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    return (
        [token_id for choice in choices for token_id in choice.get("token_ids", [])],
        [entry["logprob"] for entry in entries],
        [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries],
    )


def of_completion(server: Server, stream: bool, **sampling: Any) -> Answer:
    body = post(
        server,
        "/v1/completions",
        prompt=server.chat_ids(MESSAGES),
        max_tokens=TOKENS,
        logprobs=3,
        ignore_eos=True,
        return_token_ids=True,
        stream=stream,
        **sampling,
    )
    choices = joined(body) if stream else body["choices"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tops = [top for part in parts for top in part["top_logprobs"]]
    return (
        [token_id for choice in choices for token_id in choice.get("token_ids", [])],
        [value for part in parts for value in part["token_logprobs"]],
        [sorted(top.values(), reverse=True)[:3] for top in tops],
    )


def of_generate(server: Server, stream: bool, seed: int | None = None, **sampling: Any) -> Answer:
    params = {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": seed} | sampling
    body = post(
        server,
        "/generate",
        input_ids=server.chat_ids(MESSAGES),
        sampling_params=params,
        return_logprob=True,
        top_logprobs_num=3,
        stream=stream,
    )
    body = body[-1] if stream else body
    meta = body["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == body["output_ids"]
    return (
        body["output_ids"],
        [entry[0] for entry in meta["output_token_logprobs"]],
        [[entry[0] for entry in top] for top in meta["output_top_logprobs"]],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_the_same_ids_and_logprobs_on_every_route(server, sampling, stream):
    chat = of_chat(server, stream, **sampling)
    assert len(chat[0]) == len(chat[1]) == len(chat[2]) == TOKENS
    assert of_generate(server, stream, **sampling) == chat
    completion = of_completion(server, stream, **sampling)
    assert completion[:2] == chat[:2]
    for named, top in zip(completion[2], chat[2], strict=True):
        assert set(named) <= {*top, *chat[1]}, "two tokens with one name are one entry there"


def test_the_model_is_not_a_constant(server):
    greedy, seeded = (of_generate(server, False, **sampling) for sampling in SAMPLINGS)
    assert greedy[0] != seeded[0]
    assert len(set(greedy[0])) > 3
    assert all(value < 0 for value in (*greedy[1], *seeded[1]))


def test_each_choice_is_the_answer_of_its_seed(server):
    sampling = {name: value for name, value in SAMPLINGS[1].items() if name != "seed"}
    params = {"max_new_tokens": TOKENS, "ignore_eos": True, "n": 3, "sampling_seed": 20}
    together = post(
        server,
        "/generate",
        input_ids=server.chat_ids(MESSAGES),
        sampling_params=params | sampling,
        return_logprob=True,
    )
    for i, choice in enumerate(together):
        alone = of_generate(server, False, seed=20 + i, **sampling)
        logprobs = [entry[0] for entry in choice["meta_info"]["output_token_logprobs"]]
        assert choice["output_ids"] == alone[0]
        assert logprobs == pytest.approx(alone[1], abs=1e-4)  # plain torch: other sums in a batch
    assert len({tuple(choice["output_ids"]) for choice in together}) == 3


def test_a_flush_changes_no_answer(server):
    before = of_generate(server, False, **SAMPLINGS[0])
    with server.http() as http:
        assert http.post("/flush_cache?timeout=60").status_code == 200
    assert of_generate(server, False, **SAMPLINGS[0]) == before
