"""The bodies of the Responses API as msgspec structs: requests are strict, answers complete."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from trnc.serve.body import BodyRules, Inert, Refused
from trnc.serve.openai.protocol import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

_NO = Refused()
_FALSE = Refused((None, False))
_EMPTY = Refused((None, []))
_ITEM_INERT = {
    "id": Inert(str, "items are found by their place, calls by their 'call_id'"),
    "status": Inert(str, "an item counts as it is, complete or not"),
}


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses. The last five fields are extensions."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    thinking_token_budget: int | None = None


class MessageItem(msgspec.Struct, frozen=True):
    """A message of the input; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] | None = None


class FunctionCallItem(msgspec.Struct, frozen=True):
    """A tool call of an earlier answer; `arguments` is a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct, frozen=True):
    """What a tool gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningInputItem(msgspec.Struct, frozen=True):
    """What the model thought before an earlier answer."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None


class TextContent(msgspec.Struct, frozen=True):
    """A part of a message, of a tool's output, or of reasoning."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class FunctionTool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the text: free, a JSON object, or JSON of the `schema`, kept to in any case."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """What the text is to be like."""

    format: dict[str, Any] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """How the model is to think; `summary` of `"auto"` is none: all of it is in the item."""

    effort: str | None = None
    summary: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream is sent."""


RESPONSES_RULES = BodyRules(
    ResponsesRequest,
    {
        "user": Inert(str, "an identifier for the caller's own records"),
        "safety_identifier": Inert(str, "an identifier for the caller's own records"),
        "prompt_cache_key": Inert(str, "a routing hint; the prefix cache finds prompts by content"),
        "prompt_cache_options": Inert(dict[str, Any], "every prompt is cached, by its content"),
        "max_tool_calls": Inert(int, "counts built-in tools, of which there are none"),
    },
    {
        "service_tier": Refused((None, "auto", "default")),
        "truncation": Refused((None, "disabled")),
        "prompt_cache_retention": Refused((None, "in_memory")),
        "conversation": _NO,
        "prompt": _NO,
        "moderation": _NO,
        "context_management": _EMPTY,
        "access_programs": _NO,
        "background_options": _NO,
        "image": _NO,
    },
)
MESSAGE_ITEM_RULES = BodyRules(
    MessageItem,
    {**_ITEM_INERT, "phase": Inert(str, "messages count by their place")},
    {},
)
FUNCTION_CALL_RULES = BodyRules(
    FunctionCallItem, _ITEM_INERT, {"namespace": _NO, "caller": _NO, "async": _FALSE}
)
FUNCTION_CALL_OUTPUT_RULES = BodyRules(
    FunctionCallOutputItem,
    {**_ITEM_INERT, "name": Inert(str, "the call says it")},
    {"namespace": _NO, "caller": _NO},
)
REASONING_ITEM_RULES = BodyRules(
    ReasoningInputItem, _ITEM_INERT, {"encrypted_content": Refused((None, ""))}
)
TEXT_CONTENT_RULES = BodyRules(
    TextContent,
    {"logprobs": Inert(list[Any], "a report of an earlier answer")},
    {"annotations": _EMPTY},
)
FUNCTION_TOOL_RULES = BodyRules(
    FunctionTool,
    {},
    {
        "defer_loading": _FALSE,
        "allowed_callers": Refused((None, ["direct"])),
        "async": _FALSE,
        "output_schema": _NO,
    },
)
TEXT_FORMAT_RULES = BodyRules(TextFormat, {}, {})
NAMED_TOOL_RULES = BodyRules(NamedTool, {}, {})
TEXT_CONFIG_RULES = BodyRules(TextConfig, {}, {"verbosity": Refused((None, "medium"))})
REASONING_RULES = BodyRules(
    Reasoning,
    {},
    {
        "generate_summary": Refused((None, "auto")),
        "mode": Refused((None, "standard")),
        "context": Refused((None, "auto")),
    },
)
STREAM_OPTIONS_RULES = BodyRules(StreamOptions, {}, {"include_obfuscation": _FALSE})


class OutputText(msgspec.Struct, frozen=True):
    """The text of an answer."""

    text: str
    logprobs: list[TokenLogprob] | None = None
    type: Literal["output_text"] = "output_text"
    annotations: tuple[()] = ()


class ReasoningText(msgspec.Struct, frozen=True):
    """The text of reasoning."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """An answer to the reader."""

    id: str
    content: list[OutputText]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought, all of it."""

    id: str
    content: list[ReasoningText]
    status: ItemStatus
    summary: tuple[()] = ()


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A tool call."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """What generated tokens were for."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    message: str
    code: str = "server_error"


class TextSettings(msgspec.Struct, frozen=True):
    """The text settings that applied."""

    format: dict[str, Any]
    verbosity: Literal["medium"] = "medium"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response, with the settings that applied to it."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[Item]
    background: bool
    store: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    usage: Usage | None = None
    object: Literal["response"] = "response"
    service_tier: Literal["default"] = "default"
    truncation: Literal["disabled"] = "disabled"


class Deleted(msgspec.Struct, frozen=True):
    """DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(msgspec.Struct, frozen=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete` or `.failed`."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct, frozen=True):
    """`response.output_item.added` or `.done`."""

    type: str
    sequence_number: int
    output_index: int
    item: Item


class ContentPartEvent(msgspec.Struct, frozen=True):
    """`response.content_part.added` or `.done`."""

    type: str
    sequence_number: int
    output_index: int
    item_id: str
    part: OutputText | ReasoningText
    content_index: int = 0


class TextEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`response.output_text.delta` or `.done`: `delta` is more text, `text` all of it."""

    type: str
    sequence_number: int
    output_index: int
    item_id: str
    logprobs: list[TokenLogprob]
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int = 0


class ReasoningEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`response.reasoning_text.delta` or `.done`."""

    type: str
    sequence_number: int
    output_index: int
    item_id: str
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int = 0


class ArgumentsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`response.function_call_arguments.delta` or `.done`."""

    type: str
    sequence_number: int
    output_index: int
    item_id: str
    name: str | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ErrorEvent(msgspec.Struct, frozen=True):
    """The stream broke."""

    message: str
    code: str | None
    param: str | None = None
    sequence_number: int = 0
    type: Literal["error"] = "error"
