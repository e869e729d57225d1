"""The bodies of OpenAI's API as msgspec structs: requests are strict, answers complete."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trnc.serve.body import BodyRules
from trnc.serve.openai import fields

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
# What ended a text. `matched_stop` (SGLang's name) is the stop string, the pattern or the token id,
# the eos ids included; `stop_reason` (vLLM's) is the same, but null for eos.
Stop = str | int | None


class StreamOptions(msgspec.Struct, frozen=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _SamplingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and completions share; from `top_k` on they are extensions."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: Any = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    speculation_stats: bool | None = None
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
    priority: int | None = None


class ChatRequest(_SamplingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. The messages are checked one by one, see `prompt.py`."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_SamplingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is a string, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation; `content` is text, or a list of parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


CHAT_RULES = BodyRules(ChatRequest, fields.INERT, fields.CHAT_REFUSED)
COMPLETION_RULES = BodyRules(CompletionRequest, fields.INERT, fields.COMPLETION_REFUSED)
MESSAGE_RULES = BodyRules(Message, fields.MESSAGE_INERT, fields.MESSAGE_REFUSED)
TEXT_PART_RULES = BodyRules(TextPart, {}, {})
STREAM_OPTIONS_RULES = BodyRules(StreamOptions, {}, fields.STREAM_OPTIONS_REFUSED)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How many tokens speculation guessed, in OpenAI's words: right ones, and wrong ones."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative. `bytes` are the token's own, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer and the alternatives to it, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities in chat's shape."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token of the prompt, or an alternative to it, in vLLM's shape.

    `rank` counts from 1 among the alternatives that were asked for; null beyond them.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of the prompt; the first one has none.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """The function of a call; a chunk has more of its `arguments`, the first one its `name`."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of an answer; `arguments` are JSON as text."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a call. The first one of a call has its id."""

    index: int
    function: Function
    id: str | None = None
    type: Literal["function"] | None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a chat. `content` is null where it is tool calls alone."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer. The last three fields are extensions."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None
    matched_stop: Stop | UnsetType = UNSET
    stop_reason: Stop | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The whole answer to a chat request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    system_fingerprint: None = None


class ChoiceDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    index: int
    delta: ChoiceDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: Stop | UnsetType = UNSET
    stop_reason: Stop | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a chat stream. `usage` is there, and null, where it was asked for."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    system_fingerprint: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities in completions' shape; offsets are characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: Stop | UnsetType = UNSET
    stop_reason: Stop | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The whole answer to a completion request, or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: None = None


class Model(msgspec.Struct, frozen=True):
    """A served model. `max_model_len` is in tokens, null until the engine is ready."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "trnc"


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"
