"""The fields of OpenAI's API, and common extensions of it, that are no struct fields here.

One table says what is accepted without effect and why, one what is refused unless neutral.
"""

from __future__ import annotations

from typing import Any

from trnc.serve.body import Inert, Refused

_NO = Refused()
_FALSE = Refused((None, False))
_EMPTY_LIST = Refused((None, []))

INERT = {
    "user": Inert(str, "an identifier for the caller's own records"),
    "safety_identifier": Inert(str, "an identifier for the caller's own records"),
    "metadata": Inert(dict[str, Any], "labels for stored answers; nothing is stored"),
    "spaces_between_special_tokens": Inert(
        bool, "the `tokenizers` library joins special tokens as the tokenizer's own decoder says"
    ),
    "prompt_cache_key": Inert(str, "a routing hint; the prefix cache finds prompts by content"),
}

_COMMON = {
    "service_tier": Refused((None, "auto", "default")),
}

CHAT_REFUSED = {
    **_COMMON,
    "functions": _EMPTY_LIST,
    "function_call": Refused((None, "none", "auto")),
    "modalities": Refused((None, ["text"])),
    "audio": _NO,
    "prediction": _NO,
    "reasoning_effort": Refused((None, "none")),
    "verbosity": Refused((None, "medium")),
    "web_search_options": _NO,
    "moderation": _NO,
    "store": _FALSE,
    "prompt_cache_options": _NO,
    "prompt_cache_retention": Refused((None, "in_memory")),
    "chat_template": _NO,
}

COMPLETION_REFUSED = {
    **_COMMON,
    "suffix": Refused((None, "")),
}

MESSAGE_INERT = {
    "parsed": Inert(Any, "what the client's own library made of the content"),
}

# Clients send an assistant's message back as they got it, with these fields empty.
MESSAGE_REFUSED = {
    "function_call": _NO,
    "refusal": _NO,
    "audio": _NO,
    "annotations": _EMPTY_LIST,
    "reasoning": Refused((None, "")),
}

STREAM_OPTIONS_REFUSED = {
    "include_obfuscation": _FALSE,
}
