"""The bodies of SGLang's /generate as msgspec structs, with its names and defaults."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trnc.serve.body import BodyRules, Inert, Refused

DEFAULT_MAX_NEW_TOKENS = 128


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST or PUT /generate: one prompt, or a batch. What is a list has an entry for each prompt.

    `sampling_params` are checked one by one, see `SamplingRequest`. `logprob_start_len` is where in
    the prompt log-probabilities start; -1 means the output's tokens only. A higher `priority` is
    admitted first.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: Any = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    top_logprobs_num: int | list[int] | None = None
    logprob_start_len: int | list[int] | None = None
    max_thinking_tokens: int | list[int | None] | None = None
    priority: int | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample and when to stop. `stream_interval`: tokens between the chunks of a stream."""

    max_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    min_new_tokens: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None


class CustomParams(msgspec.Struct, frozen=True):
    """What SGLang's own logit processors take: the budget is another name of an option above."""

    thinking_budget: int | None = None


_NO = Refused()
_FALSE = Refused((None, False))
_EMPTY = Refused((None, []))

GENERATE_INERT = {
    "no_logs": Inert(bool, "requests are not logged"),
    "routing_key": Inert(str, "a routing hint; there is one engine"),
}
GENERATE_REFUSED = {
    "token_ids_logprob": _EMPTY,
    "log_metrics": Refused((None, True)),
    "input_embeds": _NO,
    "image_data": _EMPTY,
    "audio_data": _EMPTY,
    "video_data": _EMPTY,
    "modalities": _EMPTY,
    "session_params": _NO,
    "lora_path": _NO,
    "custom_logit_processor": _NO,
    "return_hidden_states": _FALSE,
    "return_routed_experts": _FALSE,
    "cache_salt": _NO,
    "extra_key": _NO,
    "background": _FALSE,
}
SAMPLING_INERT = {
    "spaces_between_special_tokens": Inert(
        bool, "the `tokenizers` library joins special tokens as the tokenizer's own decoder says"
    ),
}
SAMPLING_REFUSED = {
    "beam_width": Refused((None, 1)),
}
GENERATE_RULES = BodyRules(GenerateRequest, GENERATE_INERT, GENERATE_REFUSED)
SAMPLING_RULES = BodyRules(SamplingRequest, SAMPLING_INERT, SAMPLING_REFUSED)
CUSTOM_PARAMS_RULES = BodyRules(CustomParams, {}, {})


class Stopped(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """The text ended by itself: at a token id, a stop string or a pattern."""

    matched: int | str | None


class CutOff(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    """The limit of `length` tokens was reached."""

    length: int


class Aborted(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    """The request was aborted; the answer has what there was."""

    message: str
    status_code: int | None = None
    err_type: str | None = None


Finish = Stopped | CutOff | Aborted
LogprobEntry = tuple[float | None, int, str | None]  # log-probability, token id, its text


class MetaInfo(msgspec.Struct, frozen=True):
    """What is told beside the text. `finish_reason` is null while the request runs.

    `e2e_latency` (seconds) is there at the end, the log-probabilities if they were asked for: of
    the raw logits, cumulative in a stream. Those of the input begin at `logprob_start_len` with a
    token that has none. What speculation guessed is told where it guessed.
    """

    id: str
    finish_reason: Finish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: Literal["default"] = "default"
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobEntry]] | UnsetType = UNSET
    spec_num_proposed_drafts: int | UnsetType = UNSET
    spec_num_correct_drafts: int | UnsetType = UNSET
    spec_accept_rate: float | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct, frozen=True):
    """One answer, or one event of a stream, whose `text` and `output_ids` are cumulative.

    `output_ids` has every token, the one that ended the text included. `index` is there in the
    stream of several answers.
    """

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
