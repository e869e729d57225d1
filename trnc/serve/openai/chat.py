"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.generation import GenerationRequest, Generator, Output, collect, merge
from trnc.serve.http import Answer
from trnc.serve.openai.common import (
    UsageMeter,
    UsageOptions,
    served_model,
    stop_reason,
    usage,
    usage_options,
)
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
from trnc.serve.planner import RequestPlanner, choices
from trnc.serve.prompt import PromptBuilder, template_options
from trnc.serve.sampling import check_logprobs, choice_count


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked chat request: a generation for each choice, all of the same prompt."""

    id: str
    requests: list[GenerationRequest]
    created: int
    model: str
    usage: UsageOptions
    token_ids: bool

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.requests[0].prompt_ids

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | UnsetType:
        return self.prompt_ids if self.token_ids else UNSET


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
        options = usage_options(body.stream, body.stream_options, body.speculation_stats)
        max_tokens, max_tokens_param = _max_tokens(body)
        logprobs = _logprobs(body)
        count = choice_count(body.n)
        template = template_options(
            body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
        )
        messages = template_messages(body.messages)
        job_id = f"chatcmpl-{uuid.uuid4().hex}"
        request = self._planner.plan(
            body,
            request_id=job_id,
            prompt_ids=await self._prompts.from_messages(messages, "messages", template),
            prompt_param="messages",
            max_tokens=max_tokens,
            max_tokens_param=max_tokens_param,
            default_max_tokens=None,
            logprobs=logprobs,
        )
        requests = choices(request, count)
        return _Job(job_id, requests, int(time.time()), model, options, bool(body.return_token_ids))

    async def _complete(self, job: _Job) -> ChatCompletion:
        outputs = await collect([self._generator.stream(request) for request in job.requests])
        return ChatCompletion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[self._choice(job, i, output) for i, output in enumerate(outputs)],
            usage=usage(len(job.prompt_ids), dict(enumerate(outputs)), len(outputs), job.usage),
            prompt_token_ids=job.prompt_token_ids,
        )

    def _choice(self, job: _Job, index: int, output: Output) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(output.text),
            finish_reason=output.finish_reason,
            logprobs=self._logprobs_of(job, output),
            matched_stop=output.matched,
            stop_reason=stop_reason(output.matched, self._tokenizer.eos_token_ids),
            token_ids=output.token_ids if job.token_ids else UNSET,
        )

    async def _stream(self, job: _Job) -> AsyncGenerator[ChatChunk, None]:
        """Yield each choice's role, text and finish reason as they come, then usage if asked for.

        The roles wait for the first tokens: an error before them is an HTTP error.
        """
        meter = UsageMeter(
            prompt_tokens=len(job.prompt_ids), choices=len(job.requests), options=job.usage
        )
        started: set[int] = set()
        streams = [self._generator.stream(request) for request in job.requests]
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                if index not in started:
                    role = ChatChunkChoice(index, ChoiceDelta("assistant", ""))
                    prompt = UNSET if started else job.prompt_token_ids
                    yield _chunk(job, [role], meter.of_chunk(), prompt)
                    started.add(index)
                meter.note(index, output)
                if output.text or output.tokens or job.token_ids:
                    yield _chunk(job, [self._part(job, index, output)], meter.of_chunk())
                if output.finish_reason is not None:
                    yield _chunk(job, [self._end(index, output)], meter.of_chunk())
        if job.usage.at_end:
            yield _chunk(job, [], meter.total())

    def _part(self, job: _Job, index: int, output: Output) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChoiceDelta(None, output.text),
            logprobs=self._logprobs_of(job, output),
            token_ids=output.token_ids if job.token_ids else UNSET,
        )

    def _end(self, index: int, output: Output) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChoiceDelta(),
            finish_reason=output.finish_reason,
            matched_stop=output.matched,
            stop_reason=stop_reason(output.matched, self._tokenizer.eos_token_ids),
        )

    def _logprobs_of(self, job: _Job, output: Output) -> ChatLogprobs | None:
        if job.requests[0].sampling.logprobs is None:
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


def _chunk(
    job: _Job,
    choices: list[ChatChunkChoice],
    usage: Usage | UnsetType | None,
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET,
) -> ChatChunk:
    return ChatChunk(
        id=job.id,
        created=job.created,
        model=job.model,
        choices=choices,
        usage=usage,
        prompt_token_ids=prompt_token_ids,
    )
