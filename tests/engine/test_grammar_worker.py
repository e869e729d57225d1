"""Grammars admit what their schemas do, whatever letters these are written in."""

from __future__ import annotations

import json
import re

import pytest
import xgrammar
from hypothesis import example, given
from hypothesis import strategies as st

from trnc.engine.grammar_worker import compile_grammar
from trnc.engine.messages import Grammar


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    """Its tokens are single bytes, and one that ends a text."""
    table = [*(bytes([byte]) for byte in range(256)), b""]
    info = xgrammar.TokenizerInfo(table, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def admits(compiler: xgrammar.GrammarCompiler, grammar: Grammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compile_grammar(compiler, grammar))
    return matcher.accept_string(text) and matcher.accept_token(256)


# Letters beyond ASCII before what looks like a digit of an escape, and the signs of grammars.
names = st.text(st.sampled_from("aef09ßé青🙂 \"\\/[]{}().*+?|^$-'\n<&"), min_size=1, max_size=6)


@given(name=names, word=names)
@example(name="größe", word="naïfe")
@example(name="\\xdfe", word="\\u00df")
def test_names_and_words_in_any_letters(compiler, name, word):
    limited = {"type": "string", "maxLength": 2}  # such strings are mended
    schema = {
        "type": "object",
        "properties": {name: limited, "it": {"enum": [word, 1]}, "one": {"const": [word]}},
        "required": [name, "it", "one"],
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    answer = {name: "ßa", "it": word, "one": [word]}
    assert admits(compiler, grammar, json.dumps(answer, ensure_ascii=False))
    for other in ({**answer, name: "ßaa"}, {**answer, "it": word + "e"}):
        assert not admits(compiler, grammar, json.dumps(other, ensure_ascii=False))


letters = st.sampled_from("afz09ßéÿ青🙂-^]\\\x7f")
ranges = st.tuples(letters, letters).filter(lambda ends: ends[0] < ends[1])


def as_range(ends: tuple[str, str]) -> str:
    return "-".join(map(re.escape, ends))


@given(st.lists(letters.map(re.escape) | ranges.map(as_range), min_size=1), st.booleans())
@example(["ß", "a"], False)
@example(["a-ß", "f-ÿ", "9"], True)
def test_classes_of_any_letters(compiler, elements, negated):
    if not negated and elements[0][:2] == r"\^":
        elements = ["-", *elements]
    source = f"[{'^' * negated}{''.join(elements)}]e"
    for letter in "aefgz059ßéÿ青🙂-^]\\\x7f":
        meant = re.fullmatch(source, f"{letter}e") is not None
        assert admits(compiler, Grammar("regex", source), f"{letter}e") == meant


@pytest.mark.parametrize("source", [r"[\^a]", r"x[\^]"])
def test_a_class_that_would_be_misread_is_refused(compiler, source):
    schema = json.dumps({"type": "string", "pattern": source})
    for grammar in (Grammar("regex", source), Grammar("json_schema", schema)):
        with pytest.raises(ValueError, match="cannot begin with"):
            admits(compiler, grammar, "")
    assert admits(compiler, Grammar("regex", r"\[\^a"), "[^a")


@given(names)
def test_a_grammar_of_a_word(compiler, word):
    quoted = json.dumps(word, ensure_ascii=False)
    for grammar in (Grammar("ebnf", f"root ::= {quoted}"), Grammar("regex", re.escape(word))):
        assert admits(compiler, grammar, word)
        assert not admits(compiler, grammar, word + "e")


@pytest.mark.parametrize("control", ["\0", "\t", "\n", "\x1f"])
@pytest.mark.parametrize("limits", [{}, {"maxLength": 3}, {"minLength": 1}])
def test_strings_have_no_control_characters(compiler, control, limits):
    grammar = Grammar("json_schema", json.dumps({"type": "string", **limits}))
    assert admits(compiler, grammar, '"ab"')
    assert not admits(compiler, grammar, f'"a{control}"')


@pytest.mark.parametrize("limits", [{}, {"maxLength": 3}])
def test_strings_are_utf8(compiler, limits):
    matcher = xgrammar.GrammarMatcher(
        compile_grammar(compiler, Grammar("json_schema", json.dumps({"type": "string", **limits})))
    )
    assert matcher.accept_string('"é🙂')
    assert matcher.accept_token(0xED)
    assert not matcher.accept_token(0xA0), "half of a surrogate pair"
    assert matcher.accept_token(0x9F)
