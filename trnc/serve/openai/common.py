"""What chat and completions share: which model, what ended a choice, and usage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from trnc.errors import RequestError
from trnc.serve.body import convert_object
from trnc.serve.errors import ModelNotFoundError
from trnc.serve.generation import Output
from trnc.serve.openai.protocol import (
    STREAM_OPTIONS_RULES,
    CompletionTokensDetails,
    PromptTokensDetails,
    Stop,
    Usage,
)


def served_model(requested: str | None, served: tuple[str, ...]) -> str:
    """Return the name to answer with: the one asked for, or the first where none is."""
    if requested is None:
        return served[0]
    if requested not in served:
        raise ModelNotFoundError(requested, served)
    return requested


def priority_of(priority: int | None) -> int:
    """Return the engine's priority. On OpenAI's routes it is vLLM's: the lower ones go first."""
    return -(priority or 0)


def stop_reason(matched: Stop, eos_token_ids: Collection[int]) -> Stop:
    """Return vLLM's `stop_reason` of what ended a text: nothing is said of eos."""
    return None if matched in eos_token_ids else matched


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """Where a stream tells its usage: in a chunk of its own at the end, and so far in each one.

    With `speculation` the usage says how many tokens were guessed.
    """

    at_end: bool = False
    in_chunks: bool = False
    speculation: bool = False


def usage_options(
    stream: bool | None, stream_options: Any, speculation_stats: bool | None
) -> UsageOptions:
    """Return what `stream_options` ask for; raises RequestError for options of no stream."""
    speculation = bool(speculation_stats)
    if stream_options is None:
        return UsageOptions(speculation=speculation)
    options = convert_object(stream_options, STREAM_OPTIONS_RULES, path="stream_options")
    if not stream:
        raise RequestError(
            "'stream_options' is only allowed with 'stream': true.", param="stream_options"
        )
    if options.continuous_usage_stats and not options.include_usage:
        raise RequestError(
            "'stream_options.continuous_usage_stats' needs 'include_usage': true.",
            param="stream_options.continuous_usage_stats",
        )
    in_chunks = bool(options.continuous_usage_stats)
    return UsageOptions(bool(options.include_usage), in_chunks, speculation)


def usage(
    prompt_tokens: int, last: Mapping[int, Output], choices: int, options: UsageOptions
) -> Usage:
    """Return the usage of a request from the last output of each choice.

    Each prompt has `choices` choices and counts once, in full and for what was found in the cache:
    the others take it from the first one's prefill.
    """
    completion_tokens = sum(output.completion_tokens for output in last.values())
    cached = sum(output.cached_tokens for index, output in last.items() if index % choices == 0)
    total = prompt_tokens + completion_tokens
    details: CompletionTokensDetails | UnsetType = UNSET
    if options.speculation:
        accepted = sum(output.accepted_tokens for output in last.values())
        drafted = sum(output.drafted_tokens for output in last.values())
        details = CompletionTokensDetails(accepted, drafted - accepted)
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached), details)


class UsageMeter:
    """The usage of a stream, as its chunks tell it."""

    def __init__(self, *, prompt_tokens: int, choices: int, options: UsageOptions) -> None:
        self._prompt_tokens = prompt_tokens
        self._choices = choices
        self._options = options
        self._last: dict[int, Output] = {}

    def note(self, index: int, output: Output) -> None:
        """Take the next output of a choice."""
        self._last[index] = output

    def total(self) -> Usage:
        """Return the usage so far."""
        return usage(self._prompt_tokens, self._last, self._choices, self._options)

    def of_chunk(self) -> Usage | UnsetType | None:
        """Return the `usage` of a chunk with choices: null where the usage comes at the end."""
        if self._options.in_chunks:
            return self.total()
        return None if self._options.at_end else UNSET
