"""From what a client sends to prompt ids.

One path for every API, so that the same conversation has the same ids on every route. A large
prompt is templated and tokenised in a thread: the event loop keeps serving the other streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from trnc.checkpoint.chat_template import ChatTemplate
from trnc.checkpoint.tokenizer import Tokenizer
from trnc.errors import RequestError
from trnc.serve.sampling import check_token_id

IN_THREAD = 16_384  # characters; about a millisecond of tokenising


class PromptBuilder:
    """Turns text and conversations into prompt ids."""

    def __init__(self, *, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    async def from_text(self, text: str, param: str) -> tuple[int, ...]:
        """Return the ids of a plain prompt, with the special tokens that start one."""
        ids = await _off_loop(
            len(text), lambda: self._tokenizer.encode(text, add_special_tokens=True)
        )
        return _not_empty(ids, param)

    def from_ids(self, ids: Sequence[int], param: str, vocab_size: int) -> tuple[int, ...]:
        """Return ids that the client made itself, checked."""
        for token_id in ids:
            check_token_id(token_id, param, vocab_size)
        return _not_empty(ids, param)

    async def from_messages(self, messages: list[dict[str, Any]], param: str) -> tuple[int, ...]:
        """Return the ids of a conversation, up to where the assistant's answer starts.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
        """
        template = self._template
        if template is None:
            raise RequestError(
                "The model has no chat template: use /v1/completions.", code="no_chat_template"
            )

        def encode() -> list[int]:
            # The template writes the special tokens itself.
            text = template.render(messages, add_generation_prompt=True)
            return self._tokenizer.encode(text, add_special_tokens=False)

        size = sum(_size(message.get("content")) for message in messages)
        return _not_empty(await _off_loop(size, encode), param)


def _size(content: Any) -> int:
    """Return the characters of a message's content, which may be a list of text parts."""
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content)
    return len(content or "")


async def _off_loop(size: int, encode: Callable[[], list[int]]) -> list[int]:
    return encode() if size < IN_THREAD else await asyncio.to_thread(encode)


def _not_empty(ids: Sequence[int], param: str) -> tuple[int, ...]:
    if not ids:
        raise RequestError(f"'{param}' must hold at least one token.", param=param)
    return tuple(ids)
