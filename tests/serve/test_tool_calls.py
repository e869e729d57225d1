"""Reading reasoning and tool calls, wherever a text is cut, and the grammars of such calls."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.toy_model import toy_tokenizer
from trnc.checkpoint.tokenizer import Tokenizer
from trnc.engine.grammar_worker import compile_grammar, vocabulary
from trnc.engine.messages import Grammar
from trnc.serve.answer import Part, ReasoningPart, TextPart, ToolCallPart, joined
from trnc.serve.markup import Markup
from trnc.serve.reasoning import PARSERS
from trnc.serve.structural_tags import tag_grammar
from trnc.serve.tools.formats import FORMATS
from trnc.serve.tools.request import ToolDemand, choose_tools


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def written(format: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as models of this format write it."""
    if format == "llama3_json":
        return json.dumps({"name": name, "parameters": arguments})
    if format == "hermes":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    gap = "\n" if format == "glm45" else ""
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{gap}<arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>{gap}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{gap}{pairs}</tool_call>"


# --- readers --------------------------------------------------------------------------------------

SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [tool("weather", SCHEMA), tool("time", {})]
SNIPPETS = [
    "Hi. ", " ", "\n", "<", "<tool", "</tool_call>", "<tool_call>", "</think>", "<think>", "{",
    '{"name": 1}', '{"name": "x"', '"}', ";", "<arg_key>", "émoji 🙂", "<|python_tag|>",
    '<tool_call>{"arguments": {"a": "}"}, "name": "time"}</tool_call>',
    '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "time", "arguments": null}</tool_call>',
]  # fmt: skip
arguments = st.fixed_dictionaries(
    {}, optional={"city": st.sampled_from(["Bonn", 'a "b" {', "x\ny"]), "days": st.integers(0, 9)}
)


@st.composite
def answers(draw: st.DrawFn, format: str) -> str:
    """Something that a model may write: thoughts, text and calls, right ones and wrong ones."""
    calls = st.builds(lambda a: written(format, "weather", a), arguments)
    whole = "".join(draw(st.lists(st.sampled_from(SNIPPETS) | calls, max_size=5)))
    thoughts = draw(st.sampled_from(["", "", "<think>Let me < see.</think>", "\n<think>\nno end"]))
    return thoughts + whole[: draw(st.integers(0, len(whole)) | st.just(len(whole)))]


def read(markup: Markup, pieces: list[str], prompt: str) -> list[Part]:
    tokenizer, _ = toy_tokenizer()
    parser = markup.parser(tokenizer, tokenizer.encode(prompt, add_special_tokens=False), TOOLS)
    parts = [part for piece in pieces for part in parser.push(piece, ())]
    return joined([*parts, *parser.finish()])


@pytest.mark.parametrize("format", sorted(FORMATS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_is_read_as_the_whole_text_wherever_it_is_cut(format, data):
    text = data.draw(answers(format))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reasoning = data.draw(st.sampled_from([None, *sorted(PARSERS)]))
    prompt = data.draw(st.sampled_from(["user", "user<think>\n", "user<think></think>"]))
    markup = Markup(reasoning and PARSERS[reasoning], FORMATS[format])
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(markup, [text], prompt)
    assert read(markup, pieces, prompt) == whole
    assert read(markup, list(text), prompt) == whole


@pytest.mark.parametrize("format", sorted(FORMATS))
@given(wanted=st.lists(arguments, min_size=1, max_size=3), thought=st.booleans())
@settings(max_examples=50, deadline=None)
def test_calls_are_read_as_they_were_written(format, wanted, thought):
    separator = {"llama3_json": "; ", "glm47": ""}.get(format, "\n")
    text = separator.join(written(format, "weather", each) for each in wanted)
    text = ("<think>Hm.</think>\n" if thought else "") + text
    parts = read(Markup(PARSERS["qwen3"], FORMATS[format]), [text], "user")
    thoughts = [part for part in parts if isinstance(part, ReasoningPart)]
    assert thoughts == ([ReasoningPart("Hm.")] if thought else [])
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", each) for each in wanted
    ]
    rest = "".join(part.text for part in parts if isinstance(part, TextPart))
    assert not rest.strip()


# --- grammars -------------------------------------------------------------------------------------


@cache
def compiler(special: bool) -> tuple[Tokenizer, xgrammar.GrammarCompiler]:
    """A tokenizer to which the tags of calls are text, or special tokens."""
    tokenizer, _ = toy_tokenizer(special=("<tool_call>", "</tool_call>") if special else ())
    info = vocabulary(tokenizer, tokenizer.vocab_size)
    return tokenizer, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def walk(grammar: Grammar, special: bool, seed: int, begin: str = "") -> str | None:
    """A random text of a grammar, None if it does not come to an end. `begin` is how it starts.

    Picks alone would never close a tag, so those that close something are tried more often.
    """
    tokenizer, grammars = compiler(special)
    matcher = xgrammar.GrammarMatcher(compile_grammar(grammars, grammar))
    picks = random.Random(seed)
    for token in tokenizer.encode(begin, add_special_tokens=False):
        assert matcher.accept_token(token)
    text, row = begin.encode(), xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
    closers = ("</arg_value>", '"', "}", "</tool_call>", *("<tool_call>",) * (not special))
    [eos] = tokenizer.eos_token_ids
    for _ in range(300):
        closer = picks.choice(closers)
        if picks.random() < 0.4 and matcher.accept_string(closer):
            text += closer.encode()
            continue
        matcher.fill_next_token_bitmask(row)
        bits = row[0].tolist()
        allowed = [t for t in range(tokenizer.vocab_size) if bits[t // 32] >> t % 32 & 1]
        if eos in allowed and (len(allowed) == 1 or picks.random() < 0.5):
            return text.decode(errors="replace")
        token = picks.choice([t for t in allowed if t != eos])
        assert matcher.accept_token(token)
        named = token in tokenizer.special_ids
        text += (
            tokenizer.decode([token], skip_special_tokens=False).encode()
            if named
            else tokenizer.token_bytes(token)
        )
    return None


scalars = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "integer"},
        {"type": "boolean"},
        {"enum": ["red", "blue"]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 1, "maxLength": 2}}},
    ]
)
schemas = st.dictionaries(st.sampled_from(["a", "long_name", "c"]), scalars, max_size=3).flatmap(
    lambda named: st.builds(
        lambda required: {
            "type": "object",
            "properties": named,
            "required": sorted(required),
            "additionalProperties": False,
        },
        st.sets(st.sampled_from(sorted(named))) if named else st.just(set()),
    )
)


def calls_in(format: str, tools: list[dict[str, Any]], text: str) -> tuple[list[Part], str]:
    reader = FORMATS[format].reader(tools)
    parts = joined([*reader.push(text), *reader.finish()])
    rest = "".join(part.text for part in parts if isinstance(part, TextPart))
    return [part for part in parts if isinstance(part, ToolCallPart)], rest


def chosen(format: str, tools: list[dict[str, Any]], special: bool, demand: ToolDemand) -> Any:
    tokenizer, _ = compiler(special)
    markup = Markup(None, FORMATS[format])
    choice = choose_tools(tools, demand, path="tools[{}]", markup=markup, tokenizer=tokenizer)
    return choice.calls


@pytest.mark.parametrize("special", [False, True], ids=["text", "token"])
@pytest.mark.parametrize("format", sorted(FORMATS))
@settings(max_examples=25, deadline=None)
@given(
    first=schemas,
    second=schemas,
    name=st.sampled_from([None, "weather_of", "weather"]),
    parallel=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_all_that_a_demand_admits_is_calls_of_its_tools(
    format, special, first, second, name, parallel, seed
):
    tools = [tool("weather", first), tool("weather_of", second)]
    calls = chosen(format, tools, special, ToolDemand("required", name, parallel))
    text = walk(tag_grammar(calls.calls), special, seed)
    if text is None:
        return
    found, rest = calls_in(format, tools, text)
    assert found
    assert not rest.strip()
    assert len(found) == 1 or parallel
    by_name = {"weather": first, "weather_of": second}
    for call in found:
        assert name in (None, call.name)
        jsonschema.validate(json.loads(call.arguments), by_name[call.name])


@pytest.mark.parametrize("special", [False, True], ids=["text", "token"])
@pytest.mark.parametrize("format", sorted(FORMATS))
@settings(max_examples=25, deadline=None)
@given(
    schema=schemas, begin=st.sampled_from(["", "Well", "<", "Well<"]), seed=st.integers(0, 2**32)
)
def test_a_free_text_may_call_strict_tools_only_as_their_schemas_say(
    format, special, schema, begin, seed
):
    opener = {"llama3_json": "{"}.get(format, "<tool_call>")
    if format == "llama3_json" and begin == "Well<":
        return
    tools = [tool("strict", schema, strict=True), tool("loose", schema)]
    calls = chosen(format, tools, special, ToolDemand())
    text = walk(tag_grammar(calls.free), special, seed, begin.replace("<", opener))
    if text is None:
        return
    found, rest = calls_in(format, tools, text)
    assert rest.startswith(begin.rstrip("<"))
    assert found or not begin.endswith("<")
    for call in found:
        assert call.name in ("strict", "loose")
        if call.name == "strict":
            jsonschema.validate(json.loads(call.arguments), schema)


def test_tools_that_are_not_strict_leave_a_free_text_free():
    assert chosen("hermes", [tool("loose")], False, ToolDemand()).free is None
