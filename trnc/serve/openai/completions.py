"""POST /v1/completions. Several prompts in one request are one answer with indexes."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.engine_client import EngineClient
from trnc.serve.generation import GenerationRequest, Generator, Output, collect, merge
from trnc.serve.http import Answer
from trnc.serve.openai.common import served_model, usage, wants_usage
from trnc.serve.openai.logprobs import completion_logprobs
from trnc.serve.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder
from trnc.serve.sampling import check_logprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked completion request: a generation for each prompt."""

    id: str
    requests: list[GenerationRequest]
    created: int
    model: str
    include_usage: bool
    logprobs: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


class CompletionServing:
    """Answers completion requests, whole or as a stream."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        generator: Generator,
        planner: RequestPlanner,
        prompts: PromptBuilder,
        tokenizer: Tokenizer,
        model_names: tuple[str, ...],
    ) -> None:
        self._engine = engine
        self._generator = generator
        self._planner = planner
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._model_names = model_names

    async def create(self, body: CompletionRequest) -> Answer:
        """Return the answer to a completion request; raises RequestError or EngineError."""
        job = await self._job(body)
        return self._stream(job) if body.stream else await self._complete(job)

    async def _job(self, body: CompletionRequest) -> _Job:
        model = served_model(body.model, self._model_names)
        include_usage = wants_usage(body.stream, body.stream_options)
        logprobs = None if body.logprobs is None else check_logprobs(body.logprobs, "logprobs")
        vocab_size = self._engine.info.vocab_size
        prompts = await self._prompts.from_prompts(split_prompt(body.prompt), "prompt", vocab_size)
        job_id = f"cmpl-{uuid.uuid4().hex}"
        requests = [
            self._planner.plan(
                body,
                request_id=f"{job_id}-{index}",
                prompt_ids=prompt_ids,
                prompt_param="prompt",
                max_tokens=body.max_tokens,
                max_tokens_param="max_tokens",
                default_max_tokens=DEFAULT_MAX_TOKENS,
                logprobs=logprobs,
            )
            for index, prompt_ids in enumerate(prompts)
        ]
        wants_logprobs = logprobs is not None
        return _Job(job_id, requests, int(time.time()), model, include_usage, wants_logprobs)

    async def _complete(self, job: _Job) -> Completion:
        outputs = await collect([self._generator.stream(request) for request in job.requests])
        choices = [self._choice(job, i, output, whole=True) for i, output in enumerate(outputs)]
        return _completion(job, choices, usage(job.prompt_tokens, outputs))

    async def _stream(self, job: _Job) -> AsyncGenerator[Completion, None]:
        """Yield the text of all prompts as it comes, each one's finish reason, then usage."""
        last: dict[int, Output] = {}
        streams = [self._generator.stream(request) for request in job.requests]
        empty = None if job.include_usage else UNSET
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                if output.text or output.tokens:
                    yield _completion(job, [self._choice(job, index, output, whole=False)], empty)
                if output.finish_reason is not None:
                    last[index] = output
                    end = CompletionChoice(index, "", None, output.finish_reason)
                    yield _completion(job, [end], empty)
        if job.include_usage:
            yield _completion(job, [], usage(job.prompt_tokens, last.values()))

    def _choice(self, job: _Job, index: int, output: Output, *, whole: bool) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None
        if job.logprobs:
            logprobs = completion_logprobs(output.tokens, self._tokenizer)
        reason = output.finish_reason if whole else None
        return CompletionChoice(index, output.text, logprobs, reason)


def split_prompt(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts of a request, each as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("'prompt' must not be an empty list.", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if ids and prompts:
        raise RequestError(
            "'prompt' must be a string, a list of strings, a list of token ids, or a list of"
            " lists of token ids.",
            param="prompt",
        )
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"'prompt' must hold at most {MAX_PROMPTS} prompts, got {len(prompts)}.",
            param="prompt",
        )
    return prompts or [ids]


def _completion(
    job: _Job, choices: list[CompletionChoice], last: Usage | UnsetType | None
) -> Completion:
    return Completion(job.id, job.created, job.model, choices, last)
