"""From the parts of an answer to Anthropic's blocks, and to the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from trnc.serve.answer import Part, ReasoningPart, TextPart
from trnc.serve.messages.protocol import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    SignatureDelta,
    Text,
    TextDelta,
    ThinkingDelta,
    ThinkingText,
    ToolUse,
)

Event = BlockStart | BlockDelta | BlockStop


class BlockBuilder:
    """Cuts an answer into blocks. `push` and `finish` yield events; `blocks` has what is complete.

    Parts of one kind are one block; each tool call is a block.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._text = ""

    def push(self, part: Part) -> Iterator[Event]:
        """Take the next part of the answer."""
        delta: TextDelta | ThinkingDelta | InputDelta
        if isinstance(part, TextPart):
            if not part.text:
                return
            yield from self._begin(Text, Text(""))
            delta, text = TextDelta(part.text), part.text
        elif isinstance(part, ReasoningPart):
            yield from self._begin(ThinkingText, ThinkingText(""))
            delta, text = ThinkingDelta(part.text), part.text
        else:
            if part.name is not None:
                yield from self.finish()
                yield from self._begin(ToolUse, ToolUse(f"toolu_{uuid.uuid4().hex}", part.name, {}))
            delta, text = InputDelta(part.arguments), part.arguments
        self._text += text
        if text:
            yield BlockDelta(len(self.blocks), delta)

    def finish(self) -> Iterator[Event]:
        """End the block that is open, if one is."""
        if self._open is None:
            return
        index = len(self.blocks)
        if isinstance(self._open, ThinkingText):
            yield BlockDelta(index, SignatureDelta())
        self.blocks.append(_complete(self._open, self._text))
        self._open, self._text = None, ""
        yield BlockStop(index)

    def _begin(self, kind: type[Block], empty: Block) -> Iterator[Event]:
        if isinstance(self._open, kind):
            return
        yield from self.finish()
        self._open = empty
        yield BlockStart(len(self.blocks), empty)


def _complete(block: Block, text: str) -> Block:
    if isinstance(block, Text):
        return Text(text)
    if isinstance(block, ThinkingText):
        return ThinkingText(text)
    return ToolUse(block.id, block.name, _object(text))


def _object(text: str) -> dict[str, Any]:
    """Return the input of a tool call; one that was cut short by the token limit is empty."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
