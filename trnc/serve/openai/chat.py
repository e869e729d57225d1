"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.generation import GenerationRequest, Generator, Output, collect
from trnc.serve.http import Answer
from trnc.serve.openai.common import served_model, usage, wants_usage
from trnc.serve.openai.logprobs import chat_logprobs
from trnc.serve.openai.messages import template_messages
from trnc.serve.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChoiceDelta,
    Usage,
)
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder
from trnc.serve.sampling import check_logprobs


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked chat request."""

    request: GenerationRequest
    created: int
    model: str
    include_usage: bool


class ChatServing:
    """Answers chat requests, whole or as a stream."""

    def __init__(
        self,
        *,
        generator: Generator,
        planner: RequestPlanner,
        prompts: PromptBuilder,
        tokenizer: Tokenizer,
        model_names: tuple[str, ...],
    ) -> None:
        self._generator = generator
        self._planner = planner
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._model_names = model_names

    async def create(self, body: ChatRequest) -> Answer:
        """Return the answer to a chat request; raises RequestError or EngineError."""
        job = await self._job(body)
        return self._stream(job) if body.stream else await self._complete(job)

    async def _job(self, body: ChatRequest) -> _Job:
        model = served_model(body.model, self._model_names)
        include_usage = wants_usage(body.stream, body.stream_options)
        max_tokens, max_tokens_param = _max_tokens(body)
        logprobs = _logprobs(body)
        messages = template_messages(body.messages)
        request = self._planner.plan(
            body,
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompt_ids=await self._prompts.from_messages(messages, "messages"),
            prompt_param="messages",
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            default_max_tokens=None,
            logprobs=logprobs,
        )
        return _Job(request, int(time.time()), model, include_usage)

    async def _complete(self, job: _Job) -> ChatCompletion:
        [output] = await collect([self._generator.stream(job.request)])
        message = AssistantMessage(output.text)
        choice = ChatChoice(0, message, output.finish_reason, self._logprobs_of(job, output))
        return ChatCompletion(
            id=job.request.request_id,
            created=job.created,
            model=job.model,
            choices=[choice],
            usage=usage(len(job.request.prompt_ids), [output]),
        )

    async def _stream(self, job: _Job) -> AsyncGenerator[ChatChunk, None]:
        """Yield the role, then the text, then the finish reason, then usage if asked for."""
        started = False
        async with aclosing(self._generator.stream(job.request)) as outputs:
            async for output in outputs:
                if not started:  # not sooner: an error before the first token is an HTTP error
                    yield _chunk(job, ChatChunkChoice(0, ChoiceDelta("assistant", "")))
                    started = True
                if output.text or output.tokens:
                    logprobs = self._logprobs_of(job, output)
                    yield _chunk(job, ChatChunkChoice(0, ChoiceDelta(None, output.text), logprobs))
        reason = output.finish_reason
        yield _chunk(job, ChatChunkChoice(0, ChoiceDelta(), None, reason))
        if job.include_usage:
            yield _chunk(job, None, usage(len(job.request.prompt_ids), [output]))

    def _logprobs_of(self, job: _Job, output: Output) -> ChatLogprobs | None:
        if job.request.sampling.logprobs is None:
            return None
        return chat_logprobs(output.tokens, self._tokenizer)


def _max_tokens(body: ChatRequest) -> tuple[int | None, str]:
    """Return the limit and the name of the field that holds it; the newer name wins."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise RequestError(
            "'max_tokens' and 'max_completion_tokens' differ: set one of them.",
            param="max_tokens",
        )
    return body.max_completion_tokens, "max_completion_tokens"


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None:
        check_logprobs(body.top_logprobs, "top_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return None


def _chunk(job: _Job, choice: ChatChunkChoice | None, last: Usage | None = None) -> ChatChunk:
    return ChatChunk(
        id=job.request.request_id,
        created=job.created,
        model=job.model,
        choices=[] if choice is None else [choice],
        usage=last if job.include_usage else UNSET,
    )
