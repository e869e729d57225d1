"""The stop matcher and the assembler: what is shown does not depend on how text arrives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnc.core import TokenLogprobs
from trnc.serve.text import StopMatcher, TextAssembler

letters = st.text("ab", max_size=40)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stop_strings: Sequence[str]) -> tuple[str, str | None]:
    """The definition: cut at the stop that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(letters, stops, st.lists(st.integers(0, 100), max_size=8))
def test_shown_text_is_the_text_cut_at_the_first_match(text, stop_strings, cuts):
    matcher = StopMatcher(stop_strings)
    shown = ""
    for chunk in chunked(text, cuts):
        shown += matcher.push(chunk)
        # Nothing that was shown is ever part of the stop: it is a prefix of the final text.
        assert cut(text, stop_strings)[0].startswith(shown)
    shown += matcher.flush()
    assert (shown, matcher.matched) == cut(text, stop_strings)


@given(letters, stops)
def test_text_is_held_no_longer_than_needed(text, stop_strings):
    matcher = StopMatcher(stop_strings)
    shown = "".join(matcher.push(char) for char in text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)


def test_of_two_that_end_together_the_longest_is_cut():
    for stops_ in (["b", "ab"], ["ab", "b"]):
        matcher = StopMatcher(stops_)
        assert matcher.push("xab") == "x"
        assert matcher.matched == "ab"


def test_nothing_is_shown_after_a_match():
    matcher = StopMatcher(["END"])
    assert matcher.push("text ENDmore") == "text "
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_overlapping_stop_that_starts_again_inside_itself():
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ""
    assert matcher.push("a") == "a"
    assert matcher.push("b") == ""
    assert matcher.matched == "aab"


class Letters:
    """A detokenizer with one letter a token, and some that wait for the next one."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, ids: Sequence[int]) -> str:
        self.held += "".join(chr(i) for i in ids)
        if self.held.endswith("~"):  # stands for a character that is not complete yet
            return ""
        out, self.held = self.held, ""
        return out

    def flush(self) -> str:
        out, self.held = self.held, ""
        return out


@given(
    st.text("ab~", max_size=30),
    st.lists(st.text("ab~", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 100), max_size=8),
)
def test_assembled_text_and_count_do_not_depend_on_grouping(text, stop_strings, cuts):
    def assemble(groups: list[str]) -> tuple[str, list[int], int, str | None]:
        assembler = TextAssembler(detokenizer=Letters(), matcher=StopMatcher(stop_strings))
        pieces = [assembler.push([ord(c) for c in group]) for group in groups]
        pieces.append(assembler.finish())
        shown = [token.token_id for piece in pieces for token in piece.tokens]
        joined = "".join(piece.text for piece in pieces)
        return joined, shown, assembler.count, assembler.matched

    whole = assemble([text])
    assert assemble(chunked(text, cuts)) == whole
    assert (whole[0], whole[3]) == cut(text, stop_strings)


def test_tokens_are_given_with_the_text_they_start():
    entries = [TokenLogprobs(-float(i)) for i in range(4)]
    assembler = TextAssembler(detokenizer=Letters(), matcher=StopMatcher(["cd"]))
    piece = assembler.push([ord("a"), ord("b")], entries[:2])
    assert [(t.token_id, t.offset, t.logprobs) for t in piece.tokens] == [
        (ord("a"), 0, entries[0]),
        (ord("b"), 1, entries[1]),
    ]
    assert assembler.push([ord("c")], entries[2:3]).tokens == ()  # may be of the stop
    piece = assembler.push([ord("x")], entries[3:])
    assert [(t.token_id, t.offset) for t in piece.tokens] == [(ord("c"), 2), (ord("x"), 3)]


@pytest.mark.parametrize("stop", ["bc", "c"])
def test_tokens_of_the_stop_are_not_given(stop):
    assembler = TextAssembler(detokenizer=Letters(), matcher=StopMatcher([stop]))
    pieces = [assembler.push([ord(c)]) for c in "abcd"]
    pieces.append(assembler.finish())
    text = "".join(piece.text for piece in pieces)
    assert "".join(chr(t.token_id) for p in pieces for t in p.tokens) == text
    assert assembler.count == 3
