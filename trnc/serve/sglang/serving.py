"""POST /generate: whole answers, or a stream whose events are cumulative."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.core import TokenLogprobs
from trnc.serve.engine_client import EngineClient
from trnc.serve.generation import Generator, Output, merge
from trnc.serve.http import Answer
from trnc.serve.openai.logprobs import FLOOR, token_name
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder
from trnc.serve.sglang.plan import Part, plan_parts, prompts_of
from trnc.serve.sglang.protocol import (
    Aborted,
    CutOff,
    Finish,
    GenerateAnswer,
    GenerateRequest,
    LogprobEntry,
    MetaInfo,
    Stopped,
)


@dataclass(frozen=True, slots=True)
class _Job:
    """One checked request. `batch`: the answer is a list, and a stream's events have indexes."""

    parts: list[Part]
    batch: bool
    with_text: bool
    with_prompt_ids: bool
    began: float


@dataclass(slots=True)
class _Sofar:
    """What one answer has so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    told: int = 0  # how many tokens the last event had

    def take(self, output: Output) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs


class GenerateServing:
    """Answers SGLang's /generate."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        generator: Generator,
        planner: RequestPlanner,
        prompts: PromptBuilder,
        tokenizer: Tokenizer,
    ) -> None:
        self._engine = engine
        self._generator = generator
        self._planner = planner
        self._prompts = prompts
        self._tokenizer = tokenizer

    async def generate(self, body: GenerateRequest) -> Answer:
        """Return one answer, a list of them, or a stream; raises RequestError or EngineError."""
        job = await self._job(body)
        return self._stream(job) if body.stream else await self._complete(job)

    async def _job(self, body: GenerateRequest) -> _Job:
        began = time.perf_counter()
        prompts, param, batch = prompts_of(body)
        vocab_size = self._engine.info.vocab_size
        prompt_ids = await self._prompts.from_prompts(prompts, param, vocab_size)
        parts = plan_parts(self._planner, body, prompt_ids, param)
        return _Job(
            parts=parts,
            batch=batch or len(parts) > 1,
            with_text=bool(body.return_text_in_logprobs),
            with_prompt_ids=bool(body.return_prompt_token_ids),
            began=began,
        )

    async def _complete(self, job: _Job) -> Answer:
        async with aclosing(self._events(job, whole=True)) as events:
            answers = {index: answer async for index, answer in events}
        whole = [answers[index] for index in range(len(job.parts))]
        return whole if job.batch else whole[0]

    async def _stream(self, job: _Job) -> AsyncGenerator[GenerateAnswer, None]:
        async with aclosing(self._events(job, whole=False)) as events:
            async for _, answer in events:
                yield answer

    async def _events(
        self, job: _Job, *, whole: bool
    ) -> AsyncGenerator[tuple[int, GenerateAnswer], None]:
        """Yield what there is of each answer: at its end and, unless `whole`, on the way."""
        sofar = [_Sofar() for _ in job.parts]
        streams = [self._generator.stream(part.request) for part in job.parts]
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                state, part = sofar[index], job.parts[index]
                state.take(output)
                due = output.completion_tokens - state.told >= part.stream_interval
                if output.finish_reason is not None or (due and not whole):
                    state.told = output.completion_tokens
                    shown = index if job.batch and not whole else UNSET
                    yield index, self._answer(job, part, state, output, shown)

    def _answer(
        self, job: _Job, part: Part, state: _Sofar, output: Output, index: int | UnsetType
    ) -> GenerateAnswer:
        return GenerateAnswer(
            text=state.text,
            output_ids=list(state.token_ids),
            meta_info=self._meta_info(job, part, state, output),
            index=index,
            prompt_token_ids=part.request.prompt_ids if job.with_prompt_ids else UNSET,
        )

    def _meta_info(self, job: _Job, part: Part, state: _Sofar, output: Output) -> MetaInfo:
        ended = output.finish_reason is not None
        alternatives = part.request.sampling.logprobs
        entries: list[LogprobEntry] | UnsetType = UNSET
        top: list[list[LogprobEntry]] | UnsetType = UNSET
        if alternatives is not None:
            chosen = zip(state.token_ids, state.logprobs, strict=True)
            entries = self._entries([(i, one.logprob) for i, one in chosen], job)
            if alternatives:
                top = [self._entries(one.top[:alternatives], job) for one in state.logprobs]
        input_entries, input_top = self._of_input(job, part, state)
        drafted = output.drafted_tokens
        return MetaInfo(
            id=part.request.request_id,
            finish_reason=_finish(output),
            prompt_tokens=len(part.request.prompt_ids),
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            e2e_latency=time.perf_counter() - job.began if ended else UNSET,
            input_token_logprobs=UNSET if alternatives is None else input_entries,
            output_token_logprobs=entries,
            output_token_logprobs_length=UNSET if alternatives is None else len(state.logprobs),
            input_top_logprobs=input_top if alternatives else UNSET,
            output_top_logprobs=top,
            spec_num_proposed_drafts=drafted or UNSET,
            spec_num_correct_drafts=output.accepted_tokens if drafted else UNSET,
            spec_accept_rate=output.accepted_tokens / drafted if drafted else UNSET,
        )

    def _of_input(
        self, job: _Job, part: Part, state: _Sofar
    ) -> tuple[list[LogprobEntry], list[list[LogprobEntry] | None]]:
        """Return the prompt's tokens from where they are scored on, and the alternatives to them.

        The first one has no log-probability, wherever it is.
        """
        if part.scored_from < 0:
            return [], []
        first, *rest = part.request.prompt_ids[part.scored_from :]
        name = token_name(first, self._tokenizer) if job.with_text else None
        chosen = zip(rest, state.prompt_logprobs, strict=True)
        entries = self._entries([(i, one.logprob) for i, one in chosen], job)
        wanted = part.request.sampling.logprobs
        tops = [self._entries(one.top[:wanted], job) for one in state.prompt_logprobs]
        return [(None, first, name), *entries], [None, *tops]

    def _entries(self, tokens: Sequence[tuple[int, float]], job: _Job) -> list[LogprobEntry]:
        return [
            (max(value, FLOOR), i, token_name(i, self._tokenizer) if job.with_text else None)
            for i, value in tokens
        ]


def _finish(output: Output) -> Finish | None:
    match output.finish_reason:
        case None:
            return None
        case "stop":
            return Stopped(output.matched)
        case "length":
            return CutOff(output.completion_tokens)
        case _:
            return Aborted("The request was aborted.")
