"""Calls that are JSON objects: `{"name": ..., "arguments": {...}}`, in tags or bare.

The name is sent as soon as it is known, the arguments as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from trnc.serve.answer import Part, TextPart, ToolCallPart
from trnc.serve.tools.scan import Held, JsonEnd

_STRING = r'"(?:[^"\\]|\\.)*"'


class JsonCall:
    """One call as it comes. `text` is what of it was taken in, for when it turns out to be none."""

    def __init__(self, arguments_key: str) -> None:
        key = f"(?:{arguments_key}|arguments|parameters)"
        self._head = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"{key}"\s*:\s*(?=\{{)')
        self._whole = JsonEnd()
        self._arguments: JsonEnd | None = None
        self.text = ""
        self.named = False

    @property
    def ended(self) -> bool:
        """Whether the object is complete."""
        return self._whole.ended

    def push(self, text: str) -> tuple[list[Part], str]:
        """Take more text; return what is certain, and what comes after the object."""
        taken = self._whole.push(text)
        self.text += text[:taken]
        return list(self._parts(text[:taken])), text[taken:]

    def _parts(self, new: str) -> Iterator[Part]:
        if self._arguments is not None:
            yield from self._argument_part(new)
            return
        head = self._head.match(self.text)
        if head is not None:
            self.named, self._arguments = True, JsonEnd()
            yield ToolCallPart(json.loads(head[1], strict=False), "")
            yield from self._argument_part(self.text[head.end() :])
        elif self.ended:
            yield from self._at_once()

    def _argument_part(self, new: str) -> Iterator[Part]:
        assert self._arguments is not None, "only once they have begun"
        if not self._arguments.ended and (piece := new[: self._arguments.push(new)]):
            yield ToolCallPart(None, piece)

    def _at_once(self) -> Iterator[Part]:
        """Read an object that is written in another way, now that it is complete."""
        try:
            call = json.loads(self.text)
        except ValueError:
            return
        name = call.get("name") if isinstance(call, dict) else None
        if isinstance(name, str):
            self.named = True
            arguments = call.get("arguments", call.get("parameters", {}))
            whole = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            yield ToolCallPart(name, whole)


class HermesCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write them."""

    start, end = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = Held()
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this piece of text."""
        self._held.text += text
        parts: list[Part] = []
        while True:
            if self._call is None:
                before, found = self._held.until(self.start)
                parts += [TextPart(before)] if before else []
                if not found:
                    return parts
                self._call = JsonCall("arguments")
            if not self._call.ended:
                new, self._held.text = self._call.push(self._held.text)
                parts += new
            if not self._call.ended:
                return parts
            rest = self._held.text.lstrip()
            if len(rest) < len(self.end) and self.end.startswith(rest):
                return parts
            self._held.text = rest.removeprefix(self.end)
            parts += self._unread(self._call)
            self._call = None

    def finish(self) -> list[Part]:
        """Return what was held back; a call that was cut off stays as far as it came."""
        call, held = self._call, self._held.text
        if call is None:
            return [TextPart(held)] if held else []
        return [] if call.named else [TextPart(self.start + call.text + held)]

    def _unread(self, call: JsonCall) -> list[Part]:
        return [] if call.named else [TextPart(self.start + call.text + self.end)]


class BareCalls:
    """Answers that are `{"name": ..., "parameters": {...}}`, several with `;`, as Llama 3 does.

    An answer that begins with anything else is text, and so is what follows the last call.
    """

    tag = "<|python_tag|>"
    no_call = r'root ::= "" | [^{;< \n] [\0-\U0010ffff]*'  # the grammar of answers that are text

    def __init__(self) -> None:
        self._held = ""
        self._call: JsonCall | None = None
        self._plain = False

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this piece of text."""
        self._held += text
        parts: list[Part] = []
        while not self._plain and (call := self._call or self._opened()) is not None:
            new, self._held = call.push(self._held)
            parts += new
            if not call.ended:
                return parts
            if not call.named:
                self._plain, self._held = True, call.text + self._held
            self._call = None
        if self._plain and self._held:
            parts.append(TextPart(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back; a call that was cut off stays as far as it came."""
        if self._call is not None:
            return [] if self._call.named else [TextPart(self._call.text)]
        return [TextPart(self._held)] if self._held.strip("; \n") else []

    def _opened(self) -> JsonCall | None:
        """Return the call that begins here; anything else makes all that follows text."""
        rest = self._held.lstrip("; \n").removeprefix(self.tag).lstrip()
        if rest.startswith("{"):
            self._held, self._call = rest, JsonCall("parameters")
            return self._call
        self._plain = bool(rest) and not self.tag.startswith(rest)
        return None
