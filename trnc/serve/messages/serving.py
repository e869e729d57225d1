"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from trnc.errors import RequestError
from trnc.serve.http import Answer
from trnc.serve.messages.events import BlockBuilder
from trnc.serve.messages.protocol import (
    Conversation,
    Ending,
    MessageAnswer,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    StopReason,
    TokenCount,
    Usage,
)
from trnc.serve.messages.translate import (
    BUDGET_PARAM,
    template_messages,
    template_options,
    template_tools,
    text_grammar,
    thinking_budget,
    tool_demand,
)
from trnc.serve.openai.common import served_model
from trnc.serve.turn import Progress, Turn, TurnFields, TurnRequest, TurnRunner


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked request."""

    id: str
    model: str
    turn: Turn
    max_tokens: int


class MessagesServing:
    """Answers Anthropic's clients, whole or as a stream."""

    def __init__(self, *, turns: TurnRunner, model_names: tuple[str, ...]) -> None:
        self._turns = turns
        self._model_names = model_names

    async def create(self, body: MessagesRequest) -> Answer:
        """Return the answer to a request; raises RequestError or EngineError."""
        model = served_model(body.model, self._model_names)
        message_id = f"msg_{uuid.uuid4().hex}"
        request = _turn_request(body, message_id, _fields(body), body.max_tokens)
        job = _Job(message_id, model, await self._turns.plan(request), body.max_tokens)
        return self._stream(job) if body.stream else await self._complete(job)

    async def count_tokens(self, body: Conversation) -> TokenCount:
        """Return how many tokens the prompt of this conversation has."""
        served_model(body.model, self._model_names)
        request = _turn_request(body, "count", TurnFields(), None)
        return TokenCount(len(await self._turns.prompt_ids(request)))

    async def _complete(self, job: _Job) -> MessageAnswer:
        builder = BlockBuilder()
        async with aclosing(self._turns.stream(job.turn)) as answer:
            async for progress in answer:
                for part in progress.parts:
                    list(builder.push(part))
        list(builder.finish())
        ending = _ending(job, progress)
        return MessageAnswer(
            id=job.id,
            model=job.model,
            content=builder.blocks,
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=_usage(job, progress),
        )

    async def _stream(self, job: _Job) -> AsyncGenerator[msgspec.Struct, None]:
        """Yield Anthropic's events; the first waits for the first token, which knows the cache."""
        builder = BlockBuilder()
        started = False
        async with aclosing(self._turns.stream(job.turn)) as answer:
            async for progress in answer:
                if not started:
                    usage = _usage(job, progress)
                    yield MessageStart(MessageAnswer(job.id, job.model, [], None, None, usage))
                    started = True
                for part in progress.parts:
                    for event in builder.push(part):
                        yield event
        for event in builder.finish():
            yield event
        yield MessageDelta(_ending(job, progress), _usage(job, progress))
        yield MessageStop()


def _turn_request(
    body: Conversation, request_id: str, fields: TurnFields, max_tokens: int | None
) -> TurnRequest:
    fields = replace(fields, thinking_token_budget=thinking_budget(body))
    return TurnRequest(
        request_id=request_id,
        messages=template_messages(body),
        messages_param="messages",
        tools=template_tools(body),
        demand=tool_demand(body),
        text=text_grammar(body),
        template=template_options(body),
        fields=fields,
        max_tokens=max_tokens,
        max_tokens_param="max_tokens",
        budget_param=BUDGET_PARAM,
        clip=True,  # the field is required: clients send a large one and mean no limit
    )


def _fields(body: MessagesRequest) -> TurnFields:
    if body.max_tokens < 1:
        raise RequestError(
            f"'max_tokens' must be at least 1, got {body.max_tokens}.", param="max_tokens"
        )
    stops = body.stop_sequences
    if stops is not None and not all(stops):
        raise RequestError(
            "'stop_sequences' must not hold an empty string.", param="stop_sequences"
        )
    return TurnFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=stops,
    )


def _usage(job: _Job, progress: Progress) -> Usage:
    prompt_tokens = len(job.turn.generation.prompt_ids)
    cached = progress.cached_tokens
    return Usage(prompt_tokens - cached, cached, progress.completion_tokens)


def _ending(job: _Job, progress: Progress) -> Ending:
    """Return why the answer ended. A stop sequence is told only where it ended the text."""
    reason: StopReason = "end_turn"
    if progress.finish_reason == "length":
        clipped = job.turn.generation.max_tokens < job.max_tokens
        reason = "model_context_window_exceeded" if clipped else "max_tokens"
    elif isinstance(progress.matched, str):
        return Ending("stop_sequence", progress.matched)
    elif progress.called:
        reason = "tool_use"
    return Ending(reason, None)
