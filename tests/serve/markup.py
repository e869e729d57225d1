"""A toy model's markup, and a template and a parser that know it.

`<think>` thoughts `</think>` come first, tool calls are `<call>name {"a": 1}</call>`. The parser
gives its parts as soon as it can, arguments character by character.
"""

from __future__ import annotations

from collections.abc import Sequence

from trnc.serve.answer import AnswerParser, Parsers, Part, ReasoningPart, TextPart, ToolCallPart
from trnc.serve.text import ShownToken

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}"
    "{% if not loop.last or m.role != 'assistant' or add_generation_prompt %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}(thinking){% endif %}{% endif %}"
)
_ENDS = {"text": "", "think": "</think>", "name": " ", "arguments": "</call>"}


class MarkupParser:
    """See the module. One character at a time: clarity before speed."""

    def __init__(self, tools: bool) -> None:
        self._tools = tools
        self._state = "text"
        self._held = ""

    def push(self, text: str, tokens: Sequence[ShownToken]) -> list[Part]:
        parts: list[Part] = []
        for char in text:
            self._held += char
            parts += self._step()
        if tokens:
            parts.append(TextPart("", tuple(tokens)))
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        return [self._part(held)] if held and self._state != "name" else []

    def _step(self) -> list[Part]:
        opens = {"<think>": "think", **({"<call>": "name"} if self._tools else {})}
        marks = opens if self._state == "text" else {_ENDS[self._state]: "text"}
        if self._state == "name":
            marks = {" ": "arguments"}
        for mark, state in marks.items():
            if self._held.endswith(mark):
                before, self._held = self._held[: -len(mark)], ""
                part = self._part(before) if before else None
                self._state = state
                return [] if part is None else [part]
        if self._state == "name" or any(m.startswith(self._held) for m in marks):
            return []
        held, self._held = self._held, ""
        return [self._part(held)]

    def _part(self, text: str) -> Part:
        if self._state == "text":
            return TextPart(text)
        if self._state == "think":
            return ReasoningPart(text)
        return ToolCallPart(text, "") if self._state == "name" else ToolCallPart(None, text)


def make_parser(tools: bool) -> AnswerParser:
    return MarkupParser(tools)


PARSERS = Parsers(lambda tools, _: make_parser(bool(tools)), tools=True, reasoning=True)
