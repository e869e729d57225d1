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
from trnc.engine.messages import Grammar
from trnc.serve.answer import Part, Tools
from trnc.serve.tools.glm_calls import GlmCalls
from trnc.serve.tools.json_calls import BareCalls, HermesCalls

Element = dict[str, Any]  # of a structural tag


class CallReader(Protocol):
    """Reads the tool calls of one answer."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this piece of text."""

    def finish(self) -> list[Part]:
        """Return what was held back, when no more text comes."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models calls tools.

    `call(name, schema)` are the elements of one call: text, a schema, or a tag. `separator` is what
    stands between calls; None where there can be one only.
    """

    reader: Callable[[Tools], CallReader]
    call: Callable[[str, Any], Sequence[str | Element]]
    tags: tuple[str, ...]
    separator: str | None


def _hermes(name: str, schema: Any) -> Sequence[str | Element]:
    head = f'\n{{"name": {json.dumps(name)}, "arguments": '
    return ("<tool_call>", head, _json(schema), "}\n", "</tool_call>")


def _llama3(name: str, schema: Any) -> Sequence[str | Element]:
    return (f'{{"name": {json.dumps(name)}, "parameters": ', _json(schema), "}")


def _glm(name: str, schema: Any) -> Sequence[str | Element]:
    arguments = {"type": "json_schema", "json_schema": schema, "style": "glm_xml"}
    return ("<tool_call>", name, arguments, "</tool_call>")


def _glm45(name: str, schema: Any) -> Sequence[str | Element]:
    return _glm(f"{name}\n", schema)


def _json(schema: Any) -> Element:
    return {"type": "json_schema", "json_schema": schema}


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
    format: ToolFormat, tools: Tools, tokenizer: Tokenizer, *, parallel: bool
) -> Grammar:
    """Return the grammar of an answer that is a call of one of the tools, or several of them."""
    calls = [
        _sequence(format.call(tool["function"]["name"], _schema(tool)), tokenizer) for tool in tools
    ]
    one = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    whole = one
    if parallel and format.separator is not None:
        more = _sequence((format.separator, one), tokenizer) if format.separator else one
        whole = {"type": "sequence", "elements": [one, {"type": "star", "content": more}]}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": whole}))


def _schema(tool: Mapping[str, Any]) -> Any:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _sequence(parts: Sequence[str | Element], tokenizer: Tokenizer) -> Element:
    return {"type": "sequence", "elements": [_element(part, tokenizer) for part in parts]}


def _element(part: str | Element, tokenizer: Tokenizer) -> Element:
    if not isinstance(part, str):
        return part
    token = tokenizer.token_to_id(part)
    if token is not None and token in tokenizer.special_ids:
        return {"type": "token", "token": token}
    return {"type": "const_string", "value": part}
