"""The formats in which models call tools, by the names that their parsers have elsewhere.

A format knows how to read calls out of a text, and the grammar in which a text must be a call: a
structural tag of xgrammar. A tag that is a special token of the model has no text there, so its
place in the grammar is the token itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.serve.answer import Part, Tools
from trnc.serve.structural_tags import Element, any_of, json_element
from trnc.serve.tools.glm_calls import GlmCalls
from trnc.serve.tools.json_calls import BareCalls, HermesCalls


class CallReader(Protocol):
    """Reads the tool calls of one answer."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this piece of text."""

    def finish(self) -> list[Part]:
        """Return what was held back, when no more text comes."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models calls tools.

    `call(name, schema)` are the elements of one call: text, a schema, or a tag; the first one is
    the first of `tags`. `separator` is what stands between calls. It is None where a call has no
    tag: then it is the whole answer.
    """

    reader: Callable[[Tools], CallReader]
    call: Callable[[str, Any], Sequence[str | Element]]
    tags: tuple[str, ...]
    separator: str | None


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The formats (of xgrammar's structural tags) of answers that may call tools.

    `calls` is a call, or several, and nothing else; `free` any text in which calls of strict tools
    keep to their schemas, None where no tool is strict. With `must` the answer is calls. `param` is
    the field that asked for it.
    """

    calls: Element
    free: Element | None
    must: bool
    param: str


def _hermes(name: str, schema: Any) -> Sequence[str | Element]:
    head = f'\n{{"name": {json.dumps(name)}, "arguments": '
    return ("<tool_call>", head, json_element(schema), "}\n", "</tool_call>")


def _llama3(name: str, schema: Any) -> Sequence[str | Element]:
    return (f'{{"name": {json.dumps(name)}, "parameters": ', json_element(schema), "}")


def _glm(name: str, schema: Any) -> Sequence[str | Element]:
    return ("<tool_call>", name, {**json_element(schema), "style": "glm_xml"}, "</tool_call>")


def _glm45(name: str, schema: Any) -> Sequence[str | Element]:
    return _glm(f"{name}\n", schema)


_TAGS = ("<tool_call>", "</tool_call>")
FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(lambda _: HermesCalls(), _hermes, _TAGS, "\n"),
    "llama3_json": ToolFormat(lambda _: BareCalls(), _llama3, (BareCalls.tag,), None),
    "glm45": ToolFormat(GlmCalls, _glm45, _TAGS, "\n"),
    "glm47": ToolFormat(GlmCalls, _glm, _TAGS, ""),
}


def detect_format(template: str | None) -> str | None:
    """Return the name of the format that a chat template shows; None if it shows none."""
    if template is None or "tools" not in template:
        return None
    if "<arg_key>" in template:
        newline = "<tool_call>{function-name}\n" in template or "{tc.name}}\n" in template
        return "glm45" if newline else "glm47"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters"' in template else None


def call_grammar(
    format: ToolFormat,
    tools: Tools,
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    must: bool,
    param: str,
) -> CallGrammar:
    """Return what answers with calls of these tools are, several at once if `parallel`."""
    strict = any(tool["function"].get("strict") for tool in tools)
    return CallGrammar(
        calls=_calls(format, tools, tokenizer, parallel=parallel),
        free=_free(format, tools, tokenizer, parallel=parallel) if strict else None,
        must=must,
        param=param,
    )


def _calls(format: ToolFormat, tools: Tools, tokenizer: Tokenizer, *, parallel: bool) -> Element:
    one = any_of([_sequence(_call(format, tool), tokenizer) for tool in tools])
    if not parallel or format.separator is None:
        return one
    more = _sequence((format.separator, one), tokenizer) if format.separator else one
    return {"type": "sequence", "elements": [one, {"type": "star", "content": more}]}


def _free(format: ToolFormat, tools: Tools, tokenizer: Tokenizer, *, parallel: bool) -> Element:
    """Return the format of any text in which calls of strict tools keep to their schemas."""
    loose = [tool if tool["function"].get("strict") else _loose(tool) for tool in tools]
    if format.separator is None:
        text = {"type": "grammar", "grammar": BareCalls.no_call}
        return any_of([text, *(_sequence(_call(format, tool), tokenizer) for tool in loose)])
    start = _element(format.tags[0], tokenizer)
    rest = any_of([_sequence(_call(format, tool)[1:], tokenizer) for tool in loose])
    if start["type"] == "token":
        return {"type": "token_dispatch", "rules": [[start["token"], rest]], "loop": parallel}
    return {"type": "dispatch", "rules": [[start["value"], rest]], "loop": parallel}


def _loose(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tool with any object for its arguments."""
    anything = {"type": "object", "additionalProperties": True}
    return {**tool, "function": {**tool["function"], "parameters": anything}}


def _call(format: ToolFormat, tool: Mapping[str, Any]) -> Sequence[str | Element]:
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return format.call(function["name"], schema)


def _sequence(parts: Sequence[str | Element], tokenizer: Tokenizer) -> Element:
    return {"type": "sequence", "elements": [_element(part, tokenizer) for part in parts]}


def _element(part: str | Element, tokenizer: Tokenizer) -> Element:
    if not isinstance(part, str):
        return part
    token = tokenizer.token_to_id(part)
    if token is not None and token in tokenizer.special_ids:
        return {"type": "token", "token": token}
    return {"type": "const_string", "value": part}
