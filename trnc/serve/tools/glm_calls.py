"""GLM's calls: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`.

GLM-4.5 and 4.6 write a newline after the name and between the tags, later ones do not. Strings are
written as they are, everything else as JSON, so the tool's schema says which one a value is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trnc.serve.answer import Part, TextPart, ToolCallPart, Tools
from trnc.serve.tools.scan import Held

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmCalls:
    """The calls of an answer, argument by argument."""

    start, end = "<tool_call>", "</tool_call>"

    def __init__(self, tools: Tools) -> None:
        self._schemas = {tool["function"]["name"]: _properties(tool) for tool in tools}
        self._held = Held()
        self._inside = False
        self._name: str | None = None
        self._count = 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this piece of text."""
        self._held.text += text
        parts: list[Part] = []
        while True:
            if not self._inside:
                before, self._inside = self._held.until(self.start)
                parts += [TextPart(before)] if before else []
                if not self._inside:
                    return parts
            new = self._next()
            if new is None:
                return parts
            parts += new

    def finish(self) -> list[Part]:
        """Return what was held back; a call that was cut off stays as far as it came."""
        text = self._held.text
        if self._inside and self._name is None:
            return [TextPart(self.start + text)]
        return [TextPart(text)] if text and not self._inside else []

    def _next(self) -> list[Part] | None:
        """Read the name, an argument, or the end of a call, if it is complete."""
        text = self._held.text
        if self._name is None:
            found = [at for tag in (_KEY, self.end) if (at := text.find(tag)) >= 0]
            if not found:
                return None
            self._name = text[: min(found)].strip()
            self._held.text = text[min(found) :]
            self._count = 0
            return [ToolCallPart(self._name, "{")]
        stripped = text.lstrip()
        if stripped.startswith(self.end):
            self._held.text = stripped.removeprefix(self.end)
            self._inside, self._name = False, None
            return [ToolCallPart(None, "}")]
        head, has_value, rest = stripped.partition(_VALUE)
        value, ended, rest = rest.partition(_VALUE_END)
        if not (has_value and ended):
            return None
        self._held.text = rest
        key = head.partition(_KEY)[2].partition(_KEY_END)[0].strip()
        comma = ", " if self._count else ""
        self._count += 1
        return [ToolCallPart(None, f"{comma}{json.dumps(key)}: {self._value(key, value)}")]

    def _value(self, key: str, value: str) -> str:
        """Return an argument as JSON. One that is none, whatever its schema says, is a string."""
        schema = self._schemas.get(self._name or "", {}).get(key)
        if _is_string(schema):
            return json.dumps(value, ensure_ascii=False)
        try:
            return json.dumps(json.loads(value.strip()), ensure_ascii=False)
        except ValueError:
            return json.dumps(value, ensure_ascii=False)


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = (tool["function"].get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_string(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    if schema.get("type") == "string":
        return True
    choices = schema.get("enum")
    return isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
