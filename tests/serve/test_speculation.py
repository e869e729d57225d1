"""Speculation is not seen by clients, but for who asks for its counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.harness import MODEL, Server, Setup, running

PROMPT = "Once upon a time"
REPLY = " there was a small house in the wood, with a red door."


@pytest.fixture(scope="module")
def speculating() -> Iterator[Server]:
    with running(Setup(mtp_depths=(5,))) as server:
        server.say(PROMPT, REPLY)
        yield server


def completion(server: Server, **fields: Any) -> Any:
    server.say(PROMPT, REPLY)
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, **fields}
    if not fields.get("stream"):
        (choice,) = server.openai().completions.create(**options).choices
        return choice.text, choice.finish_reason
    chunks = [chunk.choices[0] for chunk in server.openai().completions.create(**options)]
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "e", "house", "l", "red do", "n the wood, w", "absent"])
@pytest.mark.parametrize("max_tokens", [7, 100])
def test_a_text_ends_where_it_does_without(
    server: Server, speculating: Server, stream: bool, stop: str | None, max_tokens: int
) -> None:
    fields = {"stream": stream, "max_tokens": max_tokens, "stop": stop}
    assert completion(speculating, **fields) == completion(server, **fields)


def test_the_usage_tells_of_drafts_to_who_asks(server: Server, speculating: Server) -> None:
    ask = {"model": MODEL, "prompt": PROMPT, "extra_body": {"speculation_stats": True}}
    server.say(PROMPT, REPLY)
    usages = [s.openai().completions.create(**ask).usage for s in (server, speculating)]
    plain, guessed = (usage.completion_tokens_details for usage in usages)
    assert (plain.accepted_prediction_tokens, plain.rejected_prediction_tokens) == (0, 0)
    assert guessed.accepted_prediction_tokens > 0
    assert guessed.rejected_prediction_tokens > 0
    silent = speculating.openai().completions.create(model=MODEL, prompt=PROMPT)
    assert silent.usage.completion_tokens_details is None


def test_a_stream_tells_of_drafts_too(speculating: Server) -> None:
    chunks = list(
        speculating.openai().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculation_stats": True},
        )
    )
    details = chunks[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens + 1 < 12
    assert details.accepted_prediction_tokens > 0


def test_the_metrics_count_drafts_by_how_far_ahead_they_were(speculating: Server) -> None:
    completion(speculating)
    speculating.wait_for(lambda stats: stats.verify_steps > 0)
    with speculating.http() as http:
        page = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    drafted = [float(lines[f'trnc_drafted_tokens_total{{position="{i}"}}']) for i in range(1, 6)]
    accepted = [float(lines[f'trnc_accepted_tokens_total{{position="{i}"}}']) for i in range(1, 6)]
    assert drafted[0] > 0
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert accepted[0] > accepted[4]
    assert float(lines["trnc_verify_steps_total"]) > 0


def test_sglang_s_meta_info_tells_of_drafts(server: Server, speculating: Server) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    server.say(PROMPT, REPLY)
    metas = []
    for one in (server, speculating):
        with one.http() as http:
            metas.append(http.post("/generate", json=body).json()["meta_info"])
    plain, guessed = metas
    assert not [name for name in plain if name.startswith("spec_")]
    right, all_ = guessed["spec_num_correct_drafts"], guessed["spec_num_proposed_drafts"]
    assert 0 < right < all_
    assert guessed["spec_accept_rate"] == pytest.approx(right / all_)
