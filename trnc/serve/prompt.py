"""From what a client sends to prompt ids.

One path for every API, so that the same conversation has the same ids on every route. A large
prompt is templated and tokenised in a thread: the event loop keeps serving the other streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.sampling import check_token_ids

T = TypeVar("T")

_TAKEN = ("messages", "tools", "add_generation_prompt", "continue_final_message")
IN_THREAD = 4096  # characters; about a millisecond of tokenising


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a conversation is rendered; `variables` are further variables of the template.

    `tools` have OpenAI's chat shape.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


def template_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> TemplateOptions:
    """Return checked options; who continues a message need not say that none is begun.

    Raises:
        RequestError: two options exclude each other, or a variable has a name that is taken.
    """
    continues = bool(continue_final_message)
    begins = not continues if add_generation_prompt is None else add_generation_prompt
    if continues and begins:
        raise RequestError(
            "'continue_final_message' needs 'add_generation_prompt' to be false.",
            param="continue_final_message",
        )
    for name in chat_template_kwargs or {}:
        if name in _TAKEN:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"'{param}': use the request's own field for it.", param=param)
    return TemplateOptions(begins, continues, chat_template_kwargs or {})


class PromptBuilder:
    """Turns text and conversations into prompt ids."""

    def __init__(self, *, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    async def from_prompts(
        self, prompts: Sequence[str | list[int]], param: str, vocab_size: int
    ) -> list[tuple[int, ...]]:
        """Return the ids of plain prompts: of text, with the special tokens that start one.

        Raises:
            RequestError: a prompt is empty, or has an id that is not in the vocabulary.
        """

        def encode() -> list[list[int]]:
            return [self._ids(prompt, param, vocab_size) for prompt in prompts]

        encoded = await _off_loop(sum(map(len, prompts)), encode)
        return [_not_empty(ids, param) for ids in encoded]

    def _ids(self, prompt: str | list[int], param: str, vocab_size: int) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special_tokens=True)
        check_token_ids(prompt, param, vocab_size)
        return prompt

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of texts, which may be empty; raises RequestError for lone surrogates."""

        def encode() -> list[list[int]]:
            return [self._tokenizer.encode(t, add_special_tokens=add_special_tokens) for t in texts]

        return await _off_loop(sum(map(len, texts)), encode)

    async def decode(
        self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """Return the text of each list of ids."""

        def decode() -> list[str]:
            return [
                self._tokenizer.decode(i, skip_special_tokens=skip_special_tokens) for i in batch
            ]

        return await _off_loop(sum(map(len, batch)), decode)

    async def from_messages(
        self,
        messages: list[dict[str, Any]],
        param: str,
        options: TemplateOptions,
        *,
        add_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """Return the ids of a conversation, up to where the assistant's answer starts or goes on.

        Templates write the special tokens themselves; `add_special_tokens` adds the tokenizer's.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
        """
        template = self._template
        if template is None:
            raise RequestError(
                "The model has no chat template: use /v1/completions.", code="no_chat_template"
            )

        if options.tools and not template.takes_tools:
            raise RequestError(
                "The model's chat template has no place for tools: it was not made to call them.",
                param="tools",
                code="unsupported_field",
            )

        def encode() -> list[int]:
            text = template.render(
                messages,
                tools=options.tools,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                variables=options.variables,
            )
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        size = sum(_size(message.get("content")) for message in messages)
        return _not_empty(await _off_loop(size, encode), param)


def _size(content: Any) -> int:
    """Return the characters of a message's content, which may be a list of text parts."""
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content)
    return len(content or "")


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return work() if size < IN_THREAD else await asyncio.to_thread(work)


def _not_empty(ids: Sequence[int], param: str) -> tuple[int, ...]:
    if not ids:
        raise RequestError(f"'{param}' must hold at least one token.", param=param)
    return tuple(ids)
