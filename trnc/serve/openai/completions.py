"""POST /v1/completions. Several prompts in one request are one answer with indexes."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import UNSET, UnsetType, structs

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.core import TokenLogprobs
from trnc.errors import RequestError
from trnc.serve.engine_client import EngineClient
from trnc.serve.generation import GenerationRequest, Generator, Output, collect, merge
from trnc.serve.http import Answer
from trnc.serve.openai.common import (
    UsageMeter,
    UsageOptions,
    priority_of,
    served_model,
    stop_reason,
    usage,
    usage_options,
)
from trnc.serve.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from trnc.serve.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptLogprobs,
    Usage,
)
from trnc.serve.planner import RequestPlanner, choices
from trnc.serve.prompt import PromptBuilder
from trnc.serve.sampling import (
    MAX_ANSWERS,
    check_answers,
    check_logprobs,
    choice_count,
    need_feature,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked completion request: `choices` generations a prompt, prompt after prompt."""

    id: str
    requests: list[GenerationRequest]
    choices: int
    created: int
    model: str
    usage: UsageOptions
    logprobs: bool
    token_ids: bool
    echo: bool
    prompt_logprobs: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests[:: self.choices])

    def prompt_of(self, index: int) -> tuple[int, ...]:
        return self.requests[index].prompt_ids


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
        options = usage_options(body.stream, body.stream_options, body.speculation_stats)
        logprobs = None if body.logprobs is None else check_logprobs(body.logprobs, "logprobs")
        count = choice_count(body.n, body.best_of)
        prompts = split_prompt(body.prompt)
        check_answers(len(prompts), count, "n")
        vocab_size = self._engine.info.vocab_size
        encoded = await self._prompts.from_prompts(prompts, "prompt", vocab_size)
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
                least_tokens=0,
                priority=priority_of(body.priority),
                logprobs=logprobs,
            )
            for index, prompt_ids in enumerate(encoded)
        ]
        if body.echo and logprobs is not None:
            _check_echo(count)
            requests = [self._scored(request, logprobs) for request in requests]
        return _Job(
            id=job_id,
            requests=[choice for request in requests for choice in choices(request, count)],
            choices=count,
            created=int(time.time()),
            model=model,
            usage=options,
            logprobs=logprobs is not None,
            token_ids=bool(body.return_token_ids),
            echo=bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None,
        )

    def _scored(self, request: GenerationRequest, logprobs: int) -> GenerationRequest:
        """Ask for the log-probabilities of the prompt, too: it is a part of the text."""
        need_feature("echo", "prompt_logprobs", self._engine.info.features)
        wanted = max(logprobs, request.sampling.prompt_logprobs or 0)
        return replace(request, sampling=replace(request.sampling, prompt_logprobs=wanted))

    async def _complete(self, job: _Job) -> Completion:
        outputs = await collect([self._generator.stream(request) for request in job.requests])
        answers = [self._choice(job, i, output, whole=True) for i, output in enumerate(outputs)]
        total = usage(job.prompt_tokens, dict(enumerate(outputs)), job.choices, job.usage)
        return _completion(job, answers, total)

    async def _stream(self, job: _Job) -> AsyncGenerator[Completion, None]:
        """Yield the text of all choices as it comes, each one's finish reason, then usage."""
        meter = UsageMeter(prompt_tokens=job.prompt_tokens, choices=job.choices, options=job.usage)
        streams = [self._generator.stream(request) for request in job.requests]
        started: set[int] = set()
        scores: dict[int, tuple[TokenLogprobs, ...]] = defaultdict(tuple)
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                meter.note(index, output)
                scores[index] += output.prompt_logprobs
                begins = index not in started and bool(output.token_ids or output.finish_reason)
                shows = output.text or output.tokens or (job.token_ids and output.token_ids)
                if shows or (begins and (job.echo or job.prompt_logprobs)):
                    whole = replace(output, prompt_logprobs=scores[index])
                    part = self._choice(job, index, whole, whole=False, first=index not in started)
                    started.add(index)
                    yield _completion(job, [part], meter.of_chunk())
                if output.finish_reason is not None:
                    yield _completion(job, [self._end(index, output)], meter.of_chunk())
        if job.usage.at_end:
            yield _completion(job, [], meter.total())

    def _choice(
        self, job: _Job, index: int, output: Output, *, whole: bool, first: bool = True
    ) -> CompletionChoice:
        """Return a whole choice, or a part of one; the `first` part has the prompt's ids."""
        logprobs: CompletionLogprobs | None = None
        if job.logprobs:
            logprobs = completion_logprobs(output.tokens, self._tokenizer)
        text = output.text
        if job.echo:
            prompt = self._tokenizer.decode(job.prompt_of(index))
            text = prompt + text if first else text
            logprobs = logprobs and self._with_prompt(logprobs, job, index, output, first=first)
        end = self._end(index, output) if whole else CompletionChoice(index, "")
        prompt_ids = job.prompt_of(index)
        return structs.replace(
            end,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(job, index, output) if first else UNSET,
            token_ids=output.token_ids if job.token_ids else UNSET,
            prompt_token_ids=prompt_ids if job.token_ids and first else UNSET,
        )

    def _with_prompt(
        self,
        logprobs: CompletionLogprobs,
        job: _Job,
        index: int,
        output: Output,
        *,
        first: bool,
    ) -> CompletionLogprobs:
        """Move the answer's offsets behind the prompt; the first part begins with the prompt's."""
        prompt_ids = job.prompt_of(index)
        offset = len(self._tokenizer.decode(prompt_ids))
        moved = structs.replace(logprobs, text_offset=[offset + o for o in logprobs.text_offset])
        if not first:
            return moved
        echoed = echoed_logprobs(prompt_ids, output.prompt_logprobs, self._tokenizer)
        return CompletionLogprobs(
            echoed.tokens + moved.tokens,
            echoed.token_logprobs + moved.token_logprobs,
            echoed.top_logprobs + moved.top_logprobs,
            echoed.text_offset + moved.text_offset,
        )

    def _prompt_logprobs(self, job: _Job, index: int, output: Output) -> PromptLogprobs | UnsetType:
        if not job.prompt_logprobs or index % job.choices:
            return UNSET
        return prompt_logprobs(job.prompt_of(index), output.prompt_logprobs, self._tokenizer)

    def _end(self, index: int, output: Output) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text="",
            finish_reason=output.finish_reason,
            matched_stop=output.matched,
            stop_reason=stop_reason(output.matched, self._tokenizer.eos_token_ids),
        )


def _check_echo(count: int) -> None:
    if count > 1:
        raise RequestError("'echo' with 'logprobs' gives one choice: set 'n' to 1.", param="n")


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
    if len(prompts) > MAX_ANSWERS:
        raise RequestError(
            f"'prompt' must hold at most {MAX_ANSWERS} prompts, got {len(prompts)}.",
            param="prompt",
        )
    return prompts or [ids]


def _completion(
    job: _Job, answers: list[CompletionChoice], usage: Usage | UnsetType | None
) -> Completion:
    return Completion(job.id, job.created, job.model, answers, usage)
