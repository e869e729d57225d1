"""The bodies of Anthropic's Messages API as msgspec structs: requests are strict, answers complete.

The fields that are no struct fields are in tables, as for OpenAI's API (`serve/body.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from trnc.serve.body import BodyRules, Inert, Refused

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]

_NO = Refused()
_FALSE = Refused((None, False))
_CACHE = {"cache_control": Inert(dict[str, Any], "every prompt is cached, by its content")}
_BODY_REFUSED = {
    "container": _NO,
    "context_management": _NO,
    "mcp_servers": Refused((None, [])),
    "diagnostics": _NO,
    "inference_geo": _NO,
    "speed": Refused((None, "standard")),
    "user_profile_id": _NO,
    "workspace_id": _NO,
}


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a prompt: the body of /v1/messages/count_tokens."""

    model: str
    messages: list[Any]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/messages. `min_p` and `seed` are extensions."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None


class Message(msgspec.Struct, frozen=True):
    """One message; `content` is text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class TextParam(msgspec.Struct, frozen=True):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingParam(msgspec.Struct, frozen=True):
    """A block of an earlier answer's thinking."""

    type: Literal["thinking"]
    thinking: str


class ToolUseParam(msgspec.Struct, frozen=True):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultParam(msgspec.Struct, frozen=True):
    """What a tool gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None


class ToolParam(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """What the answer is to be like."""

    format: dict[str, Any] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """JSON of this schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


MESSAGES_RULES = BodyRules(
    MessagesRequest,
    {
        **_CACHE,
        "metadata": Inert(dict[str, Any], "an identifier for the caller's own records"),
        "service_tier": Inert(str, "there is one tier"),
    },
    _BODY_REFUSED,
)
COUNT_RULES = BodyRules(Conversation, _CACHE, _BODY_REFUSED)
MESSAGE_RULES = BodyRules(Message, {}, {})
TEXT_RULES = BodyRules(TextParam, _CACHE, {"citations": Refused((None, []))})
THINKING_PARAM_RULES = BodyRules(
    ThinkingParam, {"signature": Inert(str, "thinking is taken as it is, signed or not")}, {}
)
TOOL_USE_RULES = BodyRules(
    ToolUseParam, {**_CACHE, "caller": Inert(dict[str, Any], "what called it is in the order")}, {}
)
TOOL_RESULT_RULES = BodyRules(
    ToolResultParam,
    {
        **_CACHE,
        "is_error": Inert(bool, "templates have no place for it; the content says what failed"),
    },
    {},
)
TOOL_RULES = BodyRules(
    ToolParam,
    {
        **_CACHE,
        "eager_input_streaming": Inert(bool, "inputs are always streamed as they are written"),
    },
    {
        "defer_loading": _FALSE,
        "input_examples": Refused((None, [])),
        "allowed_callers": Refused((None, ["direct"])),
    },
)
TOOL_CHOICE_RULES = BodyRules(ToolChoice, {}, {})
THINKING_RULES = BodyRules(Thinking, {}, {"display": _NO})
OUTPUT_CONFIG_RULES = BodyRules(OutputConfig, {}, {"effort": Refused((None, "high"))})
OUTPUT_FORMAT_RULES = BodyRules(OutputFormat, {}, {})


class Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str
    citations: None = None


class ThinkingText(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Thinking of an answer. Nothing is signed: the signature is empty."""

    thinking: str
    signature: str = ""


class ToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A tool call of an answer."""

    id: str
    name: str
    input: dict[str, Any]


Block = Text | ThinkingText | ToolUse


class Usage(msgspec.Struct, frozen=True):
    """Token counts. Prompt tokens found in the prefix cache are in `cache_read_input_tokens` only.

    Writing to the cache is not counted: it costs nothing.
    """

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessageAnswer(msgspec.Struct, frozen=True):
    """The whole answer."""

    id: str
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, frozen=True):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True):
    """The first event: the message without content."""

    message: MessageAnswer
    type: Literal["message_start"] = "message_start"


class BlockStart(msgspec.Struct, frozen=True):
    """A block begins, empty."""

    index: int
    content_block: Block
    type: Literal["content_block_start"] = "content_block_start"


class TextDelta(msgspec.Struct, frozen=True):
    """More text."""

    text: str
    type: Literal["text_delta"] = "text_delta"


class ThinkingDelta(msgspec.Struct, frozen=True):
    """More thinking."""

    thinking: str
    type: Literal["thinking_delta"] = "thinking_delta"


class SignatureDelta(msgspec.Struct, frozen=True):
    """The signature that ends thinking; empty."""

    signature: str = ""
    type: Literal["signature_delta"] = "signature_delta"


class InputDelta(msgspec.Struct, frozen=True):
    """More of a tool call's input, as text of a JSON object."""

    partial_json: str
    type: Literal["input_json_delta"] = "input_json_delta"


class BlockDelta(msgspec.Struct, frozen=True):
    """What a block gains."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta
    type: Literal["content_block_delta"] = "content_block_delta"


class BlockStop(msgspec.Struct, frozen=True):
    """A block is complete."""

    index: int
    type: Literal["content_block_stop"] = "content_block_stop"


class Ending(msgspec.Struct, frozen=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True):
    """The message ended; usage is of all of it."""

    delta: Ending
    usage: Usage
    type: Literal["message_delta"] = "message_delta"


class MessageStop(msgspec.Struct, frozen=True):
    """The last event."""

    type: Literal["message_stop"] = "message_stop"
