"""`trnc generate` on the default model, compiled into the user's own store on first use."""

from __future__ import annotations

import re

import pytest

from tests.cli.command import fails, trnc

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("own_store"),
]


def test_it_answers_and_says_how_fast():
    ran = trnc("generate", "What is the capital of France?")
    assert ran.status == 0, ran.err
    assert "Paris" in ran.out
    assert re.search(r"start [\d.]+ s, first token \d+ ms \(\d+ prompt tokens\)", ran.err)
    assert re.search(r"then [\d.]+ tok/s", ran.err)


def test_a_seed_gives_the_same_text_and_another_seed_another():
    def sampled(seed: int) -> str:
        arguments = ("--raw", "--temperature", "1", "--max-tokens", "24", "--seed", str(seed))
        return trnc("generate", "Once upon a time", *arguments).out

    first = sampled(1)
    assert first.strip()
    assert sampled(1) == first
    assert sampled(2) != first


def test_a_prompt_that_does_not_fit_is_one_line():
    said = fails("generate", "word " * 9000)
    assert "8192" in said
