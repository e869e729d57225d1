"""The bodies of /tokenize and /detokenize: what SGLang and vLLM send, and both of their answers.

The two agree but for one key: the text of ids is `text` for SGLang and `prompt` for vLLM, so the
answer has both.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trnc.serve.body import BodyRules, Refused


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: `prompt` or `messages`. The last four fields go with `messages`."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Ids and their number; for a list of prompts, a list of each. `max_model_len` is in tokens."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: list[str] | list[list[str]] | None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text of ids, under SGLang's name and under vLLM's; for a batch, lists of texts."""

    text: str | list[str]
    prompt: str | list[str]


_REFUSED = {
    "tools": Refused((None, [])),
    "chat_template": Refused(),
    "mm_processor_kwargs": Refused((None, {})),
}
TOKENIZE_RULES = BodyRules(TokenizeRequest, {}, _REFUSED)
DETOKENIZE_RULES = BodyRules(DetokenizeRequest, {}, {})
