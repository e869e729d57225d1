"""One turn of a conversation, as the APIs of blocks and items need it: messages in, parts out.

`/v1/responses` and `/v1/messages` translate their bodies into a `TurnRequest`, so that they have
the prompts, the limits and the sampling of `/v1/chat/completions`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from trnc.checkpoint.tokenizer import Tokenizer
from trnc.core import FinishReason
from trnc.engine.messages import Grammar
from trnc.errors import RequestError
from trnc.serve.answer import Part, ReasoningPart, ToolCallPart, Tools
from trnc.serve.errors import renamed
from trnc.serve.generation import GenerationRequest, Generator
from trnc.serve.markup import Markup
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder, TemplateOptions
from trnc.serve.tools.request import ToolChoice, ToolDemand, choose_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFields:
    """How to sample and when to stop, in the planner's names; None is "not set"."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A checked conversation. `messages` are a template's, `tools` in OpenAI's chat shape.

    The params are the API's names of what the limits may refuse. `text` is the grammar of the
    answer's text, with its param. With `clip`, a `max_tokens` that the context has no room for is
    cut to what it has.
    """

    request_id: str
    messages: list[dict[str, Any]]
    messages_param: str
    tools: Sequence[dict[str, Any]] = ()
    demand: ToolDemand
    text: tuple[Grammar, str] | None = None
    template: TemplateOptions
    fields: TurnFields
    max_tokens: int | None = None
    max_tokens_param: str
    budget_param: str = "thinking_token_budget"
    clip: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A planned turn."""

    generation: GenerationRequest
    tools: Tools
    parallel_calls: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """The next parts of an answer and what is known so far; the last has a finish reason.

    `matched` is what ended the text: a stop string or a token id. `called` says that the answer
    has a tool call.
    """

    parts: tuple[Part, ...]
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    called: bool = False


class TurnRunner:
    """Plans and runs turns."""

    def __init__(
        self,
        *,
        generator: Generator,
        planner: RequestPlanner,
        prompts: PromptBuilder,
        tokenizer: Tokenizer,
        markup: Markup,
    ) -> None:
        self._generator = generator
        self._planner = planner
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._markup = markup

    async def prompt_ids(self, request: TurnRequest) -> tuple[int, ...]:
        """Return the prompt of a turn; raises RequestError for what the model cannot be told."""
        return await self._prompt_ids(request, self._choose_tools(request))

    async def plan(self, request: TurnRequest) -> Turn:
        """Return the turn, ready to run; raises RequestError or EngineUnavailableError."""
        choice = self._choose_tools(request)
        prompt_ids = await self._prompt_ids(request, choice)
        try:
            generation = self._planner.plan(
                request.fields,
                request_id=request.request_id,
                prompt_ids=prompt_ids,
                prompt_param=request.messages_param,
                max_tokens=None if request.clip else request.max_tokens,
                max_tokens_param=request.max_tokens_param,
                default_max_tokens=request.max_tokens if request.clip else None,
                logprobs=request.logprobs,
                calls=choice.calls,
                text=request.text,
            )
        except RequestError as error:
            raise renamed(error, {"thinking_token_budget": request.budget_param}) from None
        if self._markup.is_special(self._tokenizer, tools=bool(choice.tools)):
            generation = replace(generation, skip_special_tokens=False)
        return Turn(generation, choice.tools, request.demand.parallel)

    def _choose_tools(self, request: TurnRequest) -> ToolChoice:
        return choose_tools(
            request.tools,
            request.demand,
            path="tools[{}]",
            markup=self._markup,
            tokenizer=self._tokenizer,
        )

    async def _prompt_ids(self, request: TurnRequest, choice: ToolChoice) -> tuple[int, ...]:
        template = replace(request.template, tools=choice.tools)
        return await self._prompts.from_messages(request.messages, request.messages_param, template)

    async def stream(self, turn: Turn) -> AsyncGenerator[Progress, None]:
        """Yield the answer as it comes; closing this aborts it. Raises what the engine raises.

        Where calls must not be parallel, the answer ends before a second one.
        """
        parser = self._markup.parser(self._tokenizer, turn.generation.prompt_ids, turn.tools)
        called, reasoning_tokens = False, 0
        async with aclosing(self._generator.stream(turn.generation)) as outputs:
            async for output in outputs:
                parts = list(parser.push(output.text, output.tokens))
                if output.finish_reason is not None:
                    parts += parser.finish()
                kept = parts if turn.parallel_calls else _until_second_call(parts, called)
                called |= any(isinstance(part, ToolCallPart) for part in kept)
                cut = len(kept) < len(parts)
                if any(isinstance(part, ReasoningPart) for part in kept):
                    reasoning_tokens += len(output.token_ids)
                yield Progress(
                    parts=tuple(kept),
                    completion_tokens=output.completion_tokens,
                    reasoning_tokens=reasoning_tokens,
                    cached_tokens=output.cached_tokens,
                    finish_reason="stop" if cut else output.finish_reason,
                    matched=None if cut else output.matched,
                    called=called,
                )
                if cut:
                    return


def _until_second_call(parts: list[Part], called: bool) -> list[Part]:
    for index, part in enumerate(parts):
        if isinstance(part, ToolCallPart) and part.name is not None:
            if called:
                return parts[:index]
            called = True
    return parts
