"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.answer import AnswerParser, PlainAnswer, ToolCallPart, Tools
from trnc.serve.generation import GenerationRequest, Generator, Output, collect, merge
from trnc.serve.http import Answer
from trnc.serve.markup import Markup
from trnc.serve.openai.common import (
    UsageMeter,
    UsageOptions,
    priority_of,
    served_model,
    stop_reason,
    usage,
    usage_options,
)
from trnc.serve.openai.deltas import DeltaMaker, message_of
from trnc.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from trnc.serve.openai.messages import template_messages
from trnc.serve.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChoiceDelta,
    FinishReason,
    PromptLogprobs,
    Usage,
)
from trnc.serve.openai.tools import TOOL_PATH, chat_demand, chat_tools
from trnc.serve.planner import RequestPlanner, choices
from trnc.serve.prompt import PromptBuilder, template_options
from trnc.serve.sampling import check_logprobs, choice_count
from trnc.serve.tools.request import choose_tools


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked chat request: a generation for each choice, all of the same prompt."""

    id: str
    requests: list[GenerationRequest]
    created: int
    model: str
    usage: UsageOptions
    token_ids: bool
    tools: Tools

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
        markup: Markup,
        model_names: tuple[str, ...],
    ) -> None:
        self._generator = generator
        self._planner = planner
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._markup = markup
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
        tools = choose_tools(
            chat_tools(body.tools),
            chat_demand(body.tool_choice, body.parallel_tool_calls),
            path=TOOL_PATH,
            markup=self._markup,
            tokenizer=self._tokenizer,
        )
        template = replace(
            template_options(
                body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
            ),
            tools=tools.tools,
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
            calls=tools.calls,
            priority=priority_of(body.priority),
        )
        if self._markup.is_special(self._tokenizer, tools=bool(tools.tools)):
            request = replace(request, skip_special_tokens=False)
        return _Job(
            id=job_id,
            requests=choices(request, count),
            created=int(time.time()),
            model=model,
            usage=options,
            token_ids=bool(body.return_token_ids),
            tools=tools.tools,
        )

    def _parser(self, job: _Job) -> AnswerParser:
        return self._markup.parser(self._tokenizer, job.prompt_ids, job.tools)

    async def _complete(self, job: _Job) -> ChatCompletion:
        outputs = await collect([self._generator.stream(request) for request in job.requests])
        return ChatCompletion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[self._choice(job, i, output) for i, output in enumerate(outputs)],
            usage=usage(len(job.prompt_ids), dict(enumerate(outputs)), len(outputs), job.usage),
            prompt_token_ids=job.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(job, outputs[0]),
        )

    def _choice(self, job: _Job, index: int, output: Output) -> ChatChoice:
        parser = self._parser(job)
        parts = [*parser.push(output.text, ()), *parser.finish()]
        called = any(isinstance(part, ToolCallPart) for part in parts)
        return ChatChoice(
            index=index,
            message=message_of(parts),
            finish_reason=_finish_reason(output, called=called),
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
        readers = [_Reader(self._parser(job)) for _ in job.requests]
        streams = [self._generator.stream(request) for request in job.requests]
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                if index not in started and (output.token_ids or output.finish_reason):
                    role = ChatChunkChoice(index, ChoiceDelta("assistant", ""))
                    prompt = UNSET if started else job.prompt_token_ids
                    yield _chunk(job, [role], meter.of_chunk(), prompt)
                    started.add(index)
                meter.note(index, output)
                for part in self._parts(job, index, output, readers[index]):
                    yield _chunk(job, [part], meter.of_chunk())
                if output.finish_reason is not None:
                    end = self._end(index, output, called=readers[index].called)
                    yield _chunk(job, [end], meter.of_chunk())
        if job.usage.at_end:
            yield _chunk(job, [], meter.total())

    def _parts(
        self, job: _Job, index: int, output: Output, reader: _Reader
    ) -> Iterator[ChatChunkChoice]:
        """Yield a choice for each part of the answer; the first has what is said of the tokens."""
        deltas = list(reader.read(output))
        if not deltas and (output.tokens or (job.token_ids and output.token_ids)):
            deltas = [ChoiceDelta(content="")]
        for i, delta in enumerate(deltas):
            first = ChatChunkChoice(
                index=index,
                delta=delta,
                logprobs=self._logprobs_of(job, output),
                token_ids=output.token_ids if job.token_ids else UNSET,
            )
            yield ChatChunkChoice(index=index, delta=delta) if i else first

    def _end(self, index: int, output: Output, *, called: bool) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChoiceDelta(),
            finish_reason=_finish_reason(output, called=called),
            matched_stop=output.matched,
            stop_reason=stop_reason(output.matched, self._tokenizer.eos_token_ids),
        )

    def _logprobs_of(self, job: _Job, output: Output) -> ChatLogprobs | None:
        if job.requests[0].sampling.logprobs is None:
            return None
        return chat_logprobs(output.tokens, self._tokenizer)

    def _prompt_logprobs(self, job: _Job, output: Output) -> PromptLogprobs | UnsetType:
        if job.requests[0].sampling.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(job.prompt_ids, output.prompt_logprobs, self._tokenizer)


class _Reader:
    """Reads one choice of a stream; `called` says that it has a tool call."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._maker = DeltaMaker() if not isinstance(parser, PlainAnswer) else None

    @property
    def called(self) -> bool:
        return self._maker is not None and self._maker.called

    def read(self, output: Output) -> Iterator[ChoiceDelta]:
        """Yield what an output adds to the message."""
        if self._maker is None:
            if output.text:
                yield ChoiceDelta(content=output.text)
            return
        yield from self._maker.deltas(self._parser.push(output.text, ()))
        if output.finish_reason is not None:
            yield from self._maker.deltas(self._parser.finish())
            yield from self._maker.rest()


def _finish_reason(output: Output, *, called: bool) -> FinishReason | None:
    return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason


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
