"""/v1/responses: create, whole, streamed or in the background; get, cancel, delete."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.access import Admission
from trnc.serve.errors import NotFoundError, describe
from trnc.serve.http import Answer
from trnc.serve.openai.common import served_model
from trnc.serve.openai.logprobs import chat_logprobs
from trnc.serve.prompt import TemplateOptions
from trnc.serve.responses.events import ItemBuilder
from trnc.serve.responses.protocol import (
    Deleted,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputTokensDetails,
    Reasoning,
    Response,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    TextSettings,
    Usage,
)
from trnc.serve.responses.store import ResponseStore, Stored
from trnc.serve.responses.translate import (
    check_settings,
    input_messages,
    output_message,
    template_tools,
    text_grammar,
    tool_demand,
)
from trnc.serve.sampling import check_logprobs
from trnc.serve.turn import Progress, Turn, TurnFields, TurnRequest, TurnRunner


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked request: the response as it begins, and what is kept of the conversation."""

    response: Response
    turn: Turn
    messages: tuple[dict[str, Any], ...]


class ResponsesServing:
    """Answers requests of the Responses API."""

    def __init__(
        self,
        *,
        turns: TurnRunner,
        tokenizer: Tokenizer,
        model_names: tuple[str, ...],
        store: ResponseStore,
        admission: Admission,
    ) -> None:
        self._turns = turns
        self._tokenizer = tokenizer
        self._model_names = model_names
        self._store = store
        self._admission = admission

    async def create(self, body: ResponsesRequest) -> Answer:
        """Return a response, or its events; raises RequestError or EngineError."""
        job = await self._job(body)
        if job.response.background:
            return self._start(job)
        if body.stream:
            return self._stream(job)
        return await self._complete(job, self._builder(job))

    def get(self, response_id: str) -> Response:
        """Return a stored response as it is now; raises NotFoundError."""
        return self._stored(response_id).response

    async def cancel(self, response_id: str) -> Response:
        """End a response of the background; one that has ended already stays as it is."""
        stored = self._stored(response_id)
        if not stored.response.background:
            raise RequestError(
                "Only a response that was created with 'background': true can be cancelled.",
                param="response_id",
            )
        await _end(stored)
        return self._stored(response_id).response

    async def delete(self, response_id: str) -> Deleted:
        """Forget a response; one that runs is cancelled."""
        await _end(self._stored(response_id))
        self._store.remove(response_id)
        return Deleted(response_id)

    async def _job(self, body: ResponsesRequest) -> _Job:
        model = served_model(body.model, self._model_names)
        reasoning = check_settings(body)
        store = self._wants_store(body)
        before = self._conversation(body.previous_response_id)
        added = input_messages(body, before)
        messages = (*before, *added)
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        response_id = f"resp_{uuid.uuid4().hex}"
        turn = await self._turns.plan(
            TurnRequest(
                request_id=response_id,
                messages=[*system, *messages],
                messages_param="input",
                tools=template_tools(body),
                demand=tool_demand(body),
                text=text_grammar(body),
                template=TemplateOptions(variables=_thinking(reasoning)),
                fields=_fields(body),
                max_tokens=body.max_output_tokens,
                max_tokens_param="max_output_tokens",
                logprobs=_logprobs(body),
            )
        )
        return _Job(_begun(body, response_id, model, reasoning, turn, store), turn, messages)

    def _wants_store(self, body: ResponsesRequest) -> bool:
        """Return whether to keep the response: where answers are kept, unless it says no."""
        if body.store and not self._store.capacity:
            raise _store_is_off("store")
        store = body.store is not False and self._store.capacity > 0
        if body.background and not store:
            if not self._store.capacity:
                raise _store_is_off("background")
            raise RequestError("'background' needs 'store': true.", param="background")
        if body.background and body.stream:
            raise RequestError(
                "'background' and 'stream' exclude each other: get the response by its id.",
                param="background",
                code="unsupported_field",
            )
        return store

    def _conversation(self, previous_id: str | None) -> tuple[dict[str, Any], ...]:
        if previous_id is None:
            return ()
        if not self._store.capacity:
            raise _store_is_off("previous_response_id")
        stored = self._store.get(previous_id)
        if stored is None:
            raise RequestError(
                f"'previous_response_id': '{previous_id[:64]}' is not stored (any more).",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if stored.response.status not in ("completed", "incomplete"):
            raise RequestError(
                f"'previous_response_id': its status is '{stored.response.status}'.",
                param="previous_response_id",
            )
        return stored.messages

    def _builder(self, job: _Job) -> ItemBuilder:
        if job.turn.generation.sampling.logprobs is None:
            return ItemBuilder(logprobs=None)
        return ItemBuilder(logprobs=lambda tokens: chat_logprobs(tokens, self._tokenizer).content)

    async def _run(self, job: _Job, builder: ItemBuilder) -> AsyncGenerator[msgspec.Struct, None]:
        """Yield the events of a response; the last one has it complete, and then it is stored."""
        async with aclosing(self._turns.stream(job.turn)) as answer:
            async for progress in answer:
                if not builder.started:
                    yield builder.response_event("created", job.response)
                    yield builder.response_event("in_progress", job.response)
                for part in progress.parts:
                    for event in builder.push(part):
                        yield event
        for event in builder.finish(_item_status(progress)):
            yield event
        response = _ended(job, builder, progress)
        self._keep(job, response)
        yield builder.response_event(response.status, response)

    async def _complete(self, job: _Job, builder: ItemBuilder) -> Response:
        async with aclosing(self._run(job, builder)) as events:
            async for event in events:
                last = event
        assert isinstance(last, ResponseEvent), "a response ends with an event of the whole"
        return last.response

    async def _stream(self, job: _Job) -> AsyncGenerator[msgspec.Struct, None]:
        """Yield the events; an error after the first one is an event as well."""
        builder = self._builder(job)
        try:
            async with aclosing(self._run(job, builder)) as events:
                async for event in events:
                    yield event
        except Exception as error:
            if not builder.started:
                raise
            failed = _failed(job.response, builder, error)
            self._keep(job, failed)
            yield builder.response_event("failed", failed)

    def _start(self, job: _Job) -> Response:
        """Run a response in the background and return it as it begins."""
        task = asyncio.ensure_future(self._work(job))
        self._store.put(Stored(job.response, job.messages, task))
        return job.response

    async def _work(self, job: _Job) -> None:
        builder = self._builder(job)
        try:
            with self._admission.hold():
                await self._complete(job, builder)
        except asyncio.CancelledError:
            list(builder.finish("incomplete"))
            self._keep(job, replace(job.response, status="cancelled", output=builder.items))
            raise
        except Exception as error:
            self._keep(job, _failed(job.response, builder, error))

    def _keep(self, job: _Job, response: Response) -> None:
        """Store a response that has ended, unless it was forgotten while it was computed."""
        if not response.store or (response.background and self._store.get(response.id) is None):
            return
        self._store.put(Stored(response, (*job.messages, output_message(response.output))))

    def _stored(self, response_id: str) -> Stored:
        stored = self._store.get(response_id)
        if stored is None:
            why = "" if self._store.capacity else " This server stores none (--response-store)."
            raise NotFoundError(
                f"The response '{response_id[:64]}' is not stored.{why}",
                param="response_id",
                code="response_not_found",
            )
        return stored


async def _end(stored: Stored) -> None:
    """Cancel what still computes a response, and wait until it is gone."""
    if stored.task is not None and not stored.task.done():
        stored.task.cancel()
        await asyncio.wait([stored.task])


def _store_is_off(param: str) -> RequestError:
    return RequestError(
        f"'{param}' needs stored responses, and this server stores none:"
        " start it with --response-store N.",
        param=param,
        code="feature_disabled",
    )


def _thinking(reasoning: Reasoning) -> dict[str, Any]:
    return {"enable_thinking": False} if reasoning.effort == "none" else {}


def _fields(body: ResponsesRequest) -> TurnFields:
    return TurnFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=body.stop,
        thinking_token_budget=body.thinking_token_budget,
    )


def _logprobs(body: ResponsesRequest) -> int | None:
    """Return how many alternatives to give: they are given where they are asked for in any way."""
    if body.top_logprobs is not None:
        check_logprobs(body.top_logprobs, "top_logprobs")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        return body.top_logprobs or 0
    return None


def _begun(
    body: ResponsesRequest,
    response_id: str,
    model: str,
    reasoning: Reasoning,
    turn: Turn,
    store: bool,
) -> Response:
    sampling = turn.generation.sampling
    return Response(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        output=[],
        background=bool(body.background),
        store=store,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=turn.parallel_calls,
        previous_response_id=body.previous_response_id,
        reasoning=reasoning,
        temperature=sampling.temperature,
        text=TextSettings((body.text or {}).get("format") or {"type": "text"}),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
    )


def _item_status(progress: Progress) -> ItemStatus:
    return "completed" if progress.finish_reason == "stop" else "incomplete"


def _ended(job: _Job, builder: ItemBuilder, progress: Progress) -> Response:
    cut = progress.finish_reason == "length"
    prompt_tokens, output_tokens = (
        len(job.turn.generation.prompt_ids),
        progress.completion_tokens,
    )
    return replace(
        job.response,
        status=_item_status(progress),
        output=builder.items,
        completed_at=int(time.time()),
        incomplete_details=IncompleteDetails() if cut else None,
        usage=Usage(
            prompt_tokens,
            InputTokensDetails(progress.cached_tokens),
            output_tokens,
            OutputTokensDetails(progress.reasoning_tokens),
            prompt_tokens + output_tokens,
        ),
    )


def _failed(response: Response, builder: ItemBuilder, error: Exception) -> Response:
    message = describe(error)[1].error.message
    return replace(response, status="failed", output=builder.items, error=ResponseError(message))
