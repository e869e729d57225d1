"""One request's way through the engine, as every API needs it: prompt ids in, shown text out.

Invariants: the text of all outputs joined is the same however the engine groups its tokens and
whether the client streams; a request whose consumer stops is aborted in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from trnc.checkpoint.tokenizer import Detokenizer, Tokenizer
from trnc.core import FinishReason, SamplingParams, TokenLogprobs
from trnc.engine.messages import Delta, Rules, Submit
from trnc.errors import EngineError
from trnc.serve.engine_client import EngineClient
from trnc.serve.metrics import Metrics
from trnc.serve.stop_regex import StopRegex
from trnc.serve.text import Piece, ShownToken, StopMatcher, TextAssembler

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request. `stop_token_ids` hold the eos ids unless the request ignores them.

    `max_tokens` 0 computes the prompt alone. `keep_stop`: the stop string, or the text of the stop
    token, is part of the answer. `fork_of`, `scored_from` and `priority` are `Submit`'s.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stops: tuple[str, ...] = ()
    stop_regexes: tuple[StopRegex, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    rules: Rules = field(default_factory=Rules)
    keep_stop: bool = False
    skip_special_tokens: bool = True
    fork_of: str | None = None
    scored_from: int = 1
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """The next part of an answer; the last one has a finish reason.

    `text` is what may be shown now and `tokens` are those that start in it. `token_ids` (with
    `logprobs` if asked for) are all that were generated, shown or not, up to the one that ended the
    text; `completion_tokens` counts them from the start. `matched` is the stop string, the pattern
    or the token id that ended the text. `prompt_logprobs` are of the prompt's tokens from the
    second on, if they were asked for: the first outputs have them, in order.
    """

    text: str
    tokens: tuple[ShownToken, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Generator:
    """Runs requests on the engine and turns their tokens into text."""

    def __init__(self, *, engine: EngineClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """Yield an output for each delta; closing this aborts the request.

        Raises what `EngineClient.generate` raises.
        """
        assembler = TextAssembler(
            detokenizer=Detokenizer(
                self._tokenizer, skip_special_tokens=request.skip_special_tokens
            ),
            matcher=StopMatcher(request.stops, request.stop_regexes, keep=request.keep_stop),
            unstoppable=request.rules.min_tokens,
        )
        submit = Submit(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            max_tokens=max(request.max_tokens, 1),  # the end of a prefill picks one in any case
            stop_token_ids=request.stop_token_ids,
            fork_of=request.fork_of,
            rules=request.rules,
            prompt_logprobs_from=request.scored_from,
            priority=request.priority,
        )
        cached_tokens = 0
        clock = _Clock(self._metrics)
        async with aclosing(self._engine.generate(submit)) as deltas:
            async for delta in deltas:
                if delta.token_ids or delta.finish_reason is not None:
                    clock.tick(len(delta.token_ids))
                cached_tokens = max(cached_tokens, delta.cached_tokens)
                output = _advance(assembler, delta, cached_tokens, keep_stop=request.keep_stop)
                if not request.max_tokens:
                    output = _without_tokens(output)
                if output.finish_reason is not None:
                    clock.stop()
                yield output
                if output.finish_reason is not None:
                    return  # at a stop string this closes the stream, which aborts the request


class _Clock:
    """Observes the latencies of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: float | None = None

    def tick(self, count: int) -> None:
        """`count` more tokens are here."""
        now = time.perf_counter()
        if self._last is None:
            self._metrics.time_to_first_token.observe(now - self._start)
        elif count:
            self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now

    def stop(self) -> None:
        """The answer is complete."""
        self._metrics.end_to_end_latency.observe(time.perf_counter() - self._start)


def _advance(
    assembler: TextAssembler, delta: Delta, cached_tokens: int, *, keep_stop: bool
) -> Output:
    """Take one delta; the token that ended the text is shown only with `keep_stop`."""
    if delta.finish_reason == "error":
        raise EngineError("The engine failed while it answered this request.")
    before = assembler.count
    ended_by, reason = delta.stop_token_id, delta.finish_reason
    hidden = ended_by is not None and not keep_stop
    shown = delta.token_ids[:-1] if hidden else delta.token_ids
    piece = assembler.push(shown, delta.logprobs[: len(shown)])
    if reason is not None and assembler.matched is None:
        piece = _join(piece, assembler.finish())
    matched: str | int | None = assembler.matched
    if matched is not None:
        reason, hidden = "stop", False
    else:
        matched = ended_by
    count = assembler.count + hidden
    return Output(
        text=piece.text,
        tokens=piece.tokens,
        token_ids=delta.token_ids[: count - before],
        logprobs=delta.logprobs[: count - before],
        completion_tokens=count,
        cached_tokens=cached_tokens,
        finish_reason=reason,
        matched=matched,
        drafted_tokens=delta.drafted_tokens,
        accepted_tokens=delta.accepted_tokens,
        prompt_logprobs=delta.prompt_logprobs,
    )


def _without_tokens(output: Output) -> Output:
    """Return the output of a request for no tokens."""
    return replace(
        output,
        text="",
        tokens=(),
        token_ids=(),
        logprobs=(),
        completion_tokens=0,
        finish_reason="length" if output.finish_reason == "stop" else output.finish_reason,
        matched=None,
    )


def _join(first: Piece, second: Piece) -> Piece:
    return Piece(first.text + second.text, first.tokens + second.tokens)


async def merge(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield what all streams yield, with the stream's index, as it comes.

    The first error of any ends them all, and so does closing this. One stream needs no task.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for first in only:
                yield 0, first
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(streams: Sequence[AsyncGenerator[Output, None]]) -> list[Output]:
    """Return whole answers, each as one output; the first error of any ends them all."""
    parts: list[list[Output]] = [[] for _ in streams]
    async with aclosing(merge(streams)) as outputs:
        async for index, output in outputs:
            parts[index].append(output)
    return [_whole(outputs_of_one) for outputs_of_one in parts]


def _whole(outputs: Sequence[Output]) -> Output:
    text = "".join(output.text for output in outputs)
    return replace(
        outputs[-1],
        text=text,
        tokens=tuple(token for output in outputs for token in output.tokens),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        prompt_logprobs=tuple(e for output in outputs for e in output.prompt_logprobs),
    )
