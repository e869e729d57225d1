"""From checked fields to a request for the engine: what every API does between body and tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from trnc.checkpoint.generation import GenerationDefaults
from trnc.checkpoint.tokenizer import Tokenizer
from trnc.engine.messages import Grammar, Ready
from trnc.errors import RequestError
from trnc.serve.engine_client import EngineClient
from trnc.serve.generation import GenerationRequest
from trnc.serve.reasoning import ReasoningTags
from trnc.serve.sampling import (
    INT64,
    SamplingFields,
    keep_stop,
    sampling_params,
    stop_strings,
    stop_token_ids,
    with_seed_offset,
)
from trnc.serve.stop_regex import stop_regexes
from trnc.serve.structured import RuleFields, token_rules
from trnc.serve.tools.formats import CallGrammar


class RequestFields(SamplingFields, RuleFields, Protocol):
    """The fields that say how to sample and when to stop; None is "not set"."""

    @property
    def stop(self) -> str | list[str] | None:
        """Strings that end the text."""

    @property
    def stop_regex(self) -> str | list[str] | None:
        """Patterns that end the text."""

    @property
    def stop_token_ids(self) -> list[int] | None:
        """Ids that end the text, beside eos."""

    @property
    def ignore_eos(self) -> bool | None:
        """Whether eos does not end the text."""

    @property
    def include_stop_str_in_output(self) -> bool | None:
        """Whether what ended the text is a part of it."""

    @property
    def no_stop_trim(self) -> bool | None:
        """Another name of `include_stop_str_in_output`."""

    @property
    def skip_special_tokens(self) -> bool | None:
        """Whether special tokens are left out of the text; they are unless this is false."""


class RequestPlanner:
    """Builds `GenerationRequest`s within what the engine said that it can do."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        reasoning: ReasoningTags | None,
        priorities: bool,
    ) -> None:
        """`priorities`: whether requests may have one."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token_ids
        self._defaults = defaults
        self._reasoning = reasoning
        self._priorities = priorities

    def plan(
        self,
        fields: RequestFields,
        *,
        request_id: str,
        prompt_ids: tuple[int, ...],
        prompt_param: str,
        max_tokens: int | None,
        max_tokens_param: str,
        default_max_tokens: int | None,
        logprobs: int | None,
        least_tokens: int = 1,
        scored_from: int = 1,
        priority: int = 0,
        max_temperature: float | None = 2.0,
        calls: CallGrammar | None = None,
        text: tuple[Grammar, str] | None = None,
        penalize_prompt: bool = True,
    ) -> GenerationRequest:
        """Return the checked request; raises RequestError, or EngineUnavailableError.

        `default_max_tokens` None means all that the context has room for, `least_tokens` is the
        API's lowest `max_tokens` and `max_temperature` its highest temperature: OpenAI's unless
        said otherwise. `scored_from` is the first token of the prompt whose log-probability is
        given, if they are asked for. A higher `priority` is admitted first. `calls` are those of
        its tools; `text` is a grammar that the route brings, with the name of its field;
        `penalize_prompt` says whether its repetition penalty counts the prompt.
        """
        info = self._engine.info
        budget = output_budget(
            len(prompt_ids),
            max_tokens,
            default=default_max_tokens,
            least=least_tokens,
            context=context_size(info),
            prompt_param=prompt_param,
            max_tokens_param=max_tokens_param,
        )
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=sampling_params(
                fields,
                logprobs=logprobs,
                defaults=self._defaults,
                vocab_size=info.vocab_size,
                features=info.features,
                max_temperature=max_temperature,
                penalize_prompt=penalize_prompt,
            ),
            max_tokens=budget,
            rules=token_rules(
                fields,
                calls=calls,
                text=text,
                prompt_ids=prompt_ids,
                max_tokens=budget,
                tokenizer=self._tokenizer,
                reasoning=self._reasoning,
                vocab_size=info.vocab_size,
                features=info.features,
            ),
            stops=stop_strings(fields.stop),
            stop_regexes=stop_regexes(fields.stop_regex),
            stop_token_ids=stop_token_ids(
                fields.stop_token_ids,
                eos=self._eos,
                ignore_eos=bool(fields.ignore_eos),
                vocab_size=info.vocab_size,
            ),
            scored_from=scored_from,
            priority=self._check_priority(priority),
            keep_stop=keep_stop(fields.include_stop_str_in_output, fields.no_stop_trim),
            skip_special_tokens=fields.skip_special_tokens is not False,
        )

    def _check_priority(self, priority: int) -> int:
        if priority and not self._priorities:
            raise RequestError(
                "'priority' is not available: the server runs without --priority-scheduling.",
                param="priority",
                code="feature_disabled",
            )
        if priority not in INT64:
            raise RequestError("'priority' must be a 64-bit signed integer.", param="priority")
        return priority


def choices(
    request: GenerationRequest, count: int, *, score_each: bool = False
) -> list[GenerationRequest]:
    """Return `count` requests with the same prompt, which is computed once.

    Choice i has the request's seed plus i, and so the answer that this seed gives alone. The first
    one has the prompt's log-probabilities, if they are asked for; with `score_each` all have.
    """
    if count == 1:
        return [request]
    ids = [f"{request.request_id}-{i}" for i in range(count)]
    unscored = replace(request.sampling, prompt_logprobs=None)
    return [
        replace(
            request,
            request_id=choice_id,
            sampling=with_seed_offset(request.sampling if score_each or not i else unscored, i),
            fork_of=ids[0] if i else None,
        )
        for i, choice_id in enumerate(ids)
    ]


def context_size(info: Ready) -> int:
    """Return the most tokens of prompt and answer: the preset's limit, or what the KV pages hold.

    Page 0 is not handed out, and the last token of an answer is never computed.
    """
    return min(info.max_context, (info.num_pages - 1) * info.page_size + 1)


def output_budget(
    prompt_tokens: int,
    requested: int | None,
    *,
    default: int | None,
    least: int = 1,
    context: int,
    prompt_param: str,
    max_tokens_param: str,
) -> int:
    """Return how many tokens may be generated, at least `least`.

    Without a request it is the default, or all that the context has room for.

    Raises:
        RequestError: the prompt leaves no room, or less than was requested.
    """
    room = context - prompt_tokens
    if room < 1:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens, but the context of this server holds"
            f" {context} with the answer. Shorten it, or serve a preset with a larger"
            " 'max_context'.",
            param=prompt_param,
            code="context_length_exceeded",
        )
    if requested is None:
        return room if default is None else min(default, room)
    if requested < least:
        raise RequestError(
            f"'{max_tokens_param}' must be at least {least}, got {requested}.",
            param=max_tokens_param,
        )
    if requested > room:
        raise RequestError(
            f"'{max_tokens_param}' is {requested}, but the context of this server holds"
            f" {context} tokens and the prompt has {prompt_tokens}: at most {room} are left.",
            param=max_tokens_param,
            code="context_length_exceeded",
        )
    return requested
