"""Stop patterns: the definition in `stop_regex.py`, checked against Python's `re`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.test_text import chunked
from trnc.errors import RequestError
from trnc.serve.stop_regex import REACH, stop_regexes
from trnc.serve.text import StopMatcher


def cut(text: str, patterns: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition, by trying every end and every start. RE2's classes are of ASCII."""
    for end in range(1, len(text) + 1):
        ending = [(len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        for pattern in patterns:
            for start in range(max(0, end - REACH), end):
                if re.compile(rf"(?:{pattern})\Z", re.ASCII).match(text[:end], start):
                    ending.append((end - start, pattern))
                    break
        if ending:
            length, stop = max(ending, key=lambda found: found[0])
            return text[: end - length], stop
    return text, None


atoms = st.sampled_from(["a", "b", "é", "[ab]", "[^a]", ".", r"\s", "ab", r"\w"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        inner.map(lambda one: f"(?:{one})+"),
        inner.map(lambda one: f"(?:{one})?b"),
        inner.map(lambda one: f"(?:{one}){{2}}"),
        inner.map(lambda one: f"(?i:{one}a)"),
        inner.map(lambda one: rf"^{one}"),
        inner.map(lambda one: rf"\b{one}"),
        inner.map(lambda one: rf"{one}$"),
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("ab é\n", max_size=24),
    pattern=st.lists(patterns, min_size=1, max_size=2),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=1),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    keep=st.booleans(),
)
def test_the_text_ends_where_the_definition_says(text, pattern, stops, cuts, keep):
    # `$` of Python also matches before a last newline, RE2's does not.
    expected, stop = cut(text, [one.replace("$", r"\Z") for one in pattern], stops)
    matcher = StopMatcher(stops, stop_regexes(pattern), keep=keep)
    shown = ""
    for chunk in chunked(text, cuts):
        shown += matcher.push(chunk)
        assert keep or expected.startswith(shown), "a part of the match was shown"
    shown += matcher.flush()
    if stop is None:
        assert (shown, matcher.matched) == (text, None)
    elif keep:
        assert shown.startswith(expected)
        assert cut(shown, [one.replace("$", r"\Z") for one in pattern], stops)[0] == expected
        assert len(shown) > len(expected)
    else:
        assert shown == expected
    assert (matcher.matched is None) == (stop is None)


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\n\n+", "one\ntwo\n", "one\ntwo"),  # the newline at the end may be the first of two
        (r"[.!?]\s", "Really no", "Really no"),
        (r"###.*END", "heading # 2", "heading # 2"),
        (r"###.*END", "heading ##", "heading "),
        (r"(?i)stop", "a st", "a "),
        (r"\d{3}-\d{4}", "call 555-0", "call "),
    ],
)
def test_text_is_held_only_where_a_match_may_begin(pattern, text, shown):
    assert StopMatcher([], stop_regexes([pattern])).push(text) == shown


def test_a_match_starts_at_most_so_far_back():
    for length, matches in ((REACH, True), (REACH + 1, False)):
        matcher = StopMatcher([], stop_regexes("<[^<>]*>"))
        text = "x" * 10 + "<" + "y" * (length - 2) + ">"
        shown = "".join(matcher.push(char) for char in text) + matcher.flush()
        assert (matcher.matched is not None) == matches
        assert shown == ("x" * 10 if matches else text)


def test_the_start_of_the_text_is_not_the_start_of_the_reach():
    matcher = StopMatcher([], stop_regexes("^b"))
    assert matcher.push("a" + "b" * 3 * REACH) + matcher.flush() == "a" + "b" * 3 * REACH


@pytest.mark.parametrize(
    ("given_patterns", "text"),
    [
        (r"(a)\1", "RE2 can run"),
        (r"(?=a)b", "RE2 can run"),
        (r"(?<!a)b", "RE2 can run"),
        ("(", "RE2 can run"),
        ("a{2000}", "RE2 can run"),
        ("((((a{100}){100}){100}){100})", "RE2 can run"),
        ("\ud800", "RE2 can run"),
        ("a*", "empty text"),
        ("", "empty text"),
        ("$", "empty text"),
        ("x" * 257, "256 bytes"),
        ("é" * 129, "256 bytes"),
        (["a"] * 33, "at most 32"),
    ],
)
def test_patterns_that_are_refused(given_patterns, text):
    with pytest.raises(RequestError, match=text) as raised:
        stop_regexes(given_patterns)
    assert raised.value.param == "stop_regex"


def test_a_pattern_that_is_slow_elsewhere_is_not_slow_here():
    matcher = StopMatcher([], stop_regexes(r"(x+x+)+y"))
    assert matcher.push("x" * 5000) + matcher.flush() == "x" * 5000
