"""From the parts of an answer to output items, and to the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from trnc.serve.answer import Part, ReasoningPart, TextPart, ToolCallPart
from trnc.serve.openai.protocol import TokenLogprob
from trnc.serve.responses.protocol import (
    ArgumentsEvent,
    ContentPartEvent,
    FunctionCall,
    Item,
    ItemEvent,
    ItemStatus,
    OutputMessage,
    OutputText,
    ReasoningEvent,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    TextEvent,
)
from trnc.serve.text import ShownToken

Events = Iterator[msgspec.Struct]
Logprobs = Callable[[Sequence[ShownToken]], list[TokenLogprob]]


class ItemBuilder:
    """Cuts an answer into items and numbers the events that tell of them.

    Parts of one kind are one item, each tool call is one; `items` has what is complete.
    """

    def __init__(self, *, logprobs: Logprobs | None) -> None:
        self.items: list[Item] = []
        self._logprobs_of = logprobs
        self._open: Item | None = None
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._number = 0

    @property
    def started(self) -> bool:
        """Whether any event has been made."""
        return self._number > 0

    def response_event(self, kind: str, response: Response) -> ResponseEvent:
        """Return an event about the whole response, such as `created`."""
        return ResponseEvent(f"response.{kind}", self._next(), response)

    def push(self, part: Part) -> Events:
        """Take the next part of the answer."""
        if isinstance(part, TextPart):
            yield from self._push_text(part)
        elif isinstance(part, ReasoningPart):
            if not isinstance(self._open, ReasoningItem):
                yield from self.finish()
                yield from self._begin(ReasoningItem(_id("rs"), [], "in_progress"))
            self._text += part.text
            yield ReasoningEvent(
                type="response.reasoning_text.delta", delta=part.text, **self._where()
            )
        else:
            yield from self._push_call(part)

    def _push_text(self, part: TextPart) -> Events:
        if not isinstance(self._open, OutputMessage):
            if not part.text:  # tokens without text alone are no message
                return
            yield from self.finish()
            yield from self._begin(OutputMessage(_id("msg"), [], "in_progress"))
        logprobs = self._logprobs_of(part.tokens) if self._logprobs_of is not None else []
        if not part.text and not logprobs:
            return
        self._text += part.text
        self._logprobs += logprobs
        yield TextEvent(
            type="response.output_text.delta",
            delta=part.text,
            logprobs=logprobs,
            **self._where(),
        )

    def _push_call(self, part: ToolCallPart) -> Events:
        if part.name is not None:
            yield from self.finish()
            call = FunctionCall(_id("fc"), _id("call"), part.name, "", "in_progress")
            yield from self._begin(call)
        if part.arguments:
            self._text += part.arguments
            yield ArgumentsEvent(
                type="response.function_call_arguments.delta",
                delta=part.arguments,
                **self._where(),
            )

    def finish(self, status: ItemStatus = "completed") -> Events:
        """End the item that is open, if one is."""
        item = self._open
        if item is None:
            return
        if isinstance(item, FunctionCall):
            yield ArgumentsEvent(
                type="response.function_call_arguments.done",
                name=item.name,
                arguments=self._text,
                **self._where(),
            )
            done: Item = replace(item, arguments=self._text, status=status)
        elif isinstance(item, ReasoningItem):
            thought = ReasoningText(self._text)
            yield ReasoningEvent(
                type="response.reasoning_text.done", text=self._text, **self._where()
            )
            yield self._part_event("done", item, thought)
            done = replace(item, content=[thought], status=status)
        else:
            part = OutputText(self._text, self._logprobs)
            yield TextEvent(
                type="response.output_text.done",
                text=self._text,
                logprobs=self._logprobs,
                **self._where(),
            )
            yield self._part_event("done", item, part)
            done = replace(item, content=[part], status=status)
        yield ItemEvent("response.output_item.done", self._next(), len(self.items), done)
        self.items.append(done)
        self._open, self._text, self._logprobs = None, "", []

    def _begin(self, item: Item) -> Events:
        self._open = item
        yield ItemEvent("response.output_item.added", self._next(), len(self.items), item)
        if isinstance(item, OutputMessage):
            yield self._part_event("added", item, OutputText("", []))
        elif isinstance(item, ReasoningItem):
            yield self._part_event("added", item, ReasoningText(""))

    def _part_event(
        self, kind: str, item: Item, part: OutputText | ReasoningText
    ) -> msgspec.Struct:
        name = f"response.content_part.{kind}"
        return ContentPartEvent(name, self._next(), len(self.items), item.id, part)

    def _where(self) -> dict[str, Any]:
        """Return the fields that say which event this is, of which item."""
        assert self._open is not None, "an event of an item comes after the item's own"
        return {
            "sequence_number": self._next(),
            "output_index": len(self.items),
            "item_id": self._open.id,
        }

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
