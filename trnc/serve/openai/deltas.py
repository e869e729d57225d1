"""The parts of an answer in chat's shapes: a message as a whole, or a stream's deltas."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET

from trnc.serve.answer import Part, ReasoningPart, TextPart, ToolCallPart, joined
from trnc.serve.openai.protocol import (
    AssistantMessage,
    ChoiceDelta,
    Function,
    ToolCall,
    ToolCallDelta,
)


def message_of(parts: Sequence[Part]) -> AssistantMessage:
    """Return the message that the parts of a whole answer make."""
    whole = joined(parts)
    calls = [
        ToolCall(_call_id(), Function(part.arguments, part.name))
        for part in whole
        if isinstance(part, ToolCallPart)
    ]
    text = "".join(part.text for part in whole if isinstance(part, TextPart))
    reasoning = "".join(part.text for part in whole if isinstance(part, ReasoningPart))
    if calls:
        text = text.rstrip()
    return AssistantMessage(
        content=text or None if calls else text,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


class DeltaMaker:
    """Turns the parts of one streamed answer into deltas; `called` says that it has a call."""

    def __init__(self) -> None:
        self._calls = 0
        self._blank = ""

    @property
    def called(self) -> bool:
        """Whether the answer has a tool call."""
        return self._calls > 0

    def deltas(self, parts: Iterable[Part]) -> Iterator[ChoiceDelta]:
        """Yield a delta for each part; blanks between calls are left out."""
        for part in parts:
            match part:
                case ReasoningPart():
                    yield ChoiceDelta(reasoning_content=part.text)
                case ToolCallPart():
                    self._blank = ""
                    yield ChoiceDelta(tool_calls=[self._call(part)])
                case TextPart():
                    yield from self._text(part.text)

    def _text(self, text: str) -> Iterator[ChoiceDelta]:
        """Hold blanks at the end back: a call may follow, and they are not content then."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            yield ChoiceDelta(content=shown)

    def rest(self) -> Iterator[ChoiceDelta]:
        """Yield what was held back, when the answer is over."""
        if self._blank and not self.called:
            yield ChoiceDelta(content=self._blank)

    def _call(self, part: ToolCallPart) -> ToolCallDelta:
        if part.name is None:
            return ToolCallDelta(self._calls - 1, Function(part.arguments))
        self._calls += 1
        function = Function(part.arguments, part.name)
        return ToolCallDelta(self._calls - 1, function, _call_id(), "function")


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
