"""What chat and completions share: which model, which sampling, and usage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trnc.errors import RequestError
from trnc.serve.body import convert_object
from trnc.serve.errors import ModelNotFoundError
from trnc.serve.generation import Output
from trnc.serve.openai.protocol import STREAM_OPTIONS_RULES, PromptTokensDetails, Usage


def served_model(requested: str | None, served: tuple[str, ...]) -> str:
    """Return the name to answer with: the one asked for, or the first where none is."""
    if requested is None:
        return served[0]
    if requested not in served:
        raise ModelNotFoundError(requested, served)
    return requested


def wants_usage(stream: bool | None, stream_options: Any) -> bool:
    """Return whether a stream ends with usage; raises RequestError for options of no stream."""
    if stream_options is None:
        return False
    options = convert_object(stream_options, STREAM_OPTIONS_RULES, path="stream_options")
    if not stream:
        raise RequestError(
            "'stream_options' is only allowed with 'stream': true.", param="stream_options"
        )
    return bool(options.include_usage)


def usage(prompt_tokens: int, last: Iterable[Output]) -> Usage:
    """Return the usage of a request from the last output of each of its answers."""
    outputs = list(last)
    completion_tokens = sum(output.completion_tokens for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached))
