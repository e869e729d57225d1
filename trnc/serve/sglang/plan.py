"""From the body of /generate to requests for the engine: batches, ids and SGLang's field names."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

from trnc.errors import RequestError
from trnc.serve.body import convert_object
from trnc.serve.errors import renamed
from trnc.serve.generation import GenerationRequest
from trnc.serve.planner import RequestPlanner, choices
from trnc.serve.sampling import check_answers, check_logprobs, choice_count
from trnc.serve.sglang.protocol import (
    CUSTOM_PARAMS_RULES,
    DEFAULT_MAX_NEW_TOKENS,
    SAMPLING_RULES,
    GenerateRequest,
    SamplingRequest,
)

T = TypeVar("T")

GREEDY_BELOW = 1e-6  # SGLang takes such a temperature for 0
# What is called otherwise here than in the shared layer, in `sampling_params` and beside them.
_SAMPLING_NAMES = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
_NAMES = {
    "logprobs": "return_logprob",
    "prompt_logprobs": "logprob_start_len",
    "thinking_token_budget": "max_thinking_tokens",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One answer: a request for the engine and how it is told.

    Log-probabilities of the input are told from token `scored_from` on, none if it is -1.
    """

    request: GenerationRequest
    stream_interval: int
    scored_from: int


@dataclass(frozen=True, slots=True)
class _Fields:
    """SGLang's sampling parameters under the shared names (`planner.RequestFields`)."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    logit_bias: dict[str, float] | None
    stop: str | list[str] | None
    stop_regex: str | list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    no_stop_trim: bool | None
    skip_special_tokens: bool | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    json_schema: str | None
    regex: str | None
    ebnf: str | None
    structural_tag: str | None
    min_tokens: int | None
    prompt_logprobs: int | None
    thinking_token_budget: int | None
    # What SGLang has no name for.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


def prompts_of(body: GenerateRequest) -> tuple[list[str | list[int]], str, bool]:
    """Return the prompts, the name of the field that holds them, and whether they are a batch.

    Raises:
        RequestError: neither field is there, or both; the batch is empty or mixed.
    """
    if (body.text is None) == (body.input_ids is None):
        raise RequestError(
            "Either text, input_ids or input_embeds should be provided. (One of them; this server"
            " has no input_embeds.)",
            param="text",
        )
    if isinstance(body.text, str):
        return [body.text], "text", False
    if body.text is not None:
        _check_batch(len(body.text), "text")
        return list(body.text), "text", True
    items = body.input_ids or []
    _check_batch(len(items), "input_ids")
    batch = [item for item in items if isinstance(item, list)]
    ids = [item for item in items if isinstance(item, int)]
    if batch and ids:
        raise RequestError(
            "'input_ids' must be a list of token ids, or a list of such lists.", param="input_ids"
        )
    return (list(batch), "input_ids", True) if batch else ([ids], "input_ids", False)


def _check_batch(size: int, param: str) -> None:
    if not size:
        raise RequestError(f"'{param}' must not be empty.", param=param)


def plan_parts(
    planner: RequestPlanner,
    body: GenerateRequest,
    prompt_ids: list[tuple[int, ...]],
    prompt_param: str,
) -> list[Part]:
    """Return the answers to give, prompt after prompt, `n` for each.

    Raises:
        RequestError: a field is wrong; `param` is its path, such as `sampling_params[1].top_p`.
    """
    count = len(prompt_ids)
    sampling = _sampling(body.sampling_params, count)
    n = _common_n(sampling)
    check_answers(count, n, "sampling_params.n")
    rids = _request_ids(body.rid, count)
    logprobs = _logprobs(body, count)
    starts = _scored_from(body, prompt_ids, logprobs)
    budgets = _for_each(body.max_thinking_tokens, count, "max_thinking_tokens", None)
    parts: list[Part] = []
    for i, (path, params) in enumerate(sampling):
        interval = _stream_interval(path, params)
        budget = _thinking_budget(path, params, budgets[i])
        scores = logprobs[i] if starts[i] >= 0 else None
        try:
            request = planner.plan(
                _fields(params, scores, budget),
                request_id=rids[i],
                prompt_ids=prompt_ids[i],
                prompt_param=prompt_param,
                max_tokens=params.max_new_tokens,
                max_tokens_param="max_new_tokens",
                default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
                least_tokens=0,
                logprobs=logprobs[i],
                scored_from=max(starts[i], 0) + 1,
                priority=body.priority or 0,
                max_temperature=None,
                penalize_prompt=False,
            )
        except RequestError as error:
            raise renamed(error, _client_names(path)) from None
        each = choices(request, n, score_each=True)
        parts += [Part(choice, interval, starts[i]) for choice in each]
    return parts


def _client_names(path: str) -> dict[str, str]:
    """Return what the client calls the fields of the shared layer."""
    names = {name: f"{path}.{name}" for name in SamplingRequest.__struct_fields__}
    return names | {ours: f"{path}.{name}" for ours, name in _SAMPLING_NAMES.items()} | _NAMES


def _sampling(given: Any, count: int) -> list[tuple[str, SamplingRequest]]:
    """Return each prompt's sampling parameters and where they are."""
    path = "sampling_params"
    if not isinstance(given, list):
        params = convert_object({} if given is None else given, SAMPLING_RULES, path=path)
        return [(path, params)] * count
    _check_length(given, count, path)
    paths = [f"{path}[{i}]" for i in range(count)]
    return [
        (p, convert_object(v, SAMPLING_RULES, path=p)) for p, v in zip(paths, given, strict=True)
    ]


def _common_n(sampling: list[tuple[str, SamplingRequest]]) -> int:
    counts = {choice_count(params.n) for _, params in sampling}
    if len(counts) > 1:
        raise RequestError(
            "'sampling_params': all prompts of a batch must have the same n.",
            param="sampling_params",
        )
    return counts.pop()


def _request_ids(rid: str | list[str] | None, count: int) -> list[str]:
    """Return an id for each prompt: the client's, or new ones."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        rids = [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    else:
        _check_length(rid, count, "rid")
        rids = rid
    if not all(rids):
        raise RequestError("'rid' must not be empty.", param="rid")
    twice = [name for name, times in Counter(rids).items() if times > 1]
    if twice:
        raise RequestError(
            f"Duplicate request IDs detected within the request: {twice}", param="rid"
        )
    return rids


def _logprobs(body: GenerateRequest, count: int) -> list[int | None]:
    """Return for each prompt how many alternatives are wanted, None for no log-probabilities."""
    wanted = _for_each(body.return_logprob, count, "return_logprob", False)
    numbers = _for_each(body.top_logprobs_num, count, "top_logprobs_num", 0)
    for want, number in zip(wanted, numbers, strict=True):
        check_logprobs(number, "top_logprobs_num")
        if number and not want:
            raise RequestError(
                "'top_logprobs_num' needs 'return_logprob': true.", param="top_logprobs_num"
            )
    return [number if want else None for want, number in zip(wanted, numbers, strict=True)]


def _scored_from(
    body: GenerateRequest, prompt_ids: list[tuple[int, ...]], logprobs: list[int | None]
) -> list[int]:
    """Return for each prompt where its log-probabilities start, -1 where none are wanted."""
    param = "logprob_start_len"
    starts = _for_each(body.logprob_start_len, len(prompt_ids), param, -1)
    for start, ids, wanted in zip(starts, prompt_ids, logprobs, strict=True):
        if not -1 <= start < len(ids):
            raise RequestError(
                f"'{param}' must be -1, or less than the {len(ids)} tokens of the prompt, got"
                f" {start}.",
                param=param,
            )
        if start >= 0 and wanted is None:
            raise RequestError(f"'{param}' needs 'return_logprob': true.", param=param)
    return starts


def _thinking_budget(path: str, params: SamplingRequest, budget: int | None) -> int | None:
    """Return the most tokens of thinking, by either name."""
    if params.custom_params is None:
        return budget
    path = f"{path}.custom_params"
    custom = convert_object(params.custom_params, CUSTOM_PARAMS_RULES, path=path).thinking_budget
    if None not in (budget, custom) and budget != custom:
        raise RequestError(
            f"'max_thinking_tokens' and '{path}.thinking_budget' differ: set one of them.",
            param="max_thinking_tokens",
        )
    return custom if budget is None else budget


def _for_each(value: T | list[T] | None, count: int, param: str, default: T) -> list[T]:
    if isinstance(value, list):
        _check_length(value, count, param)
        return value
    return [default if value is None else value] * count


def _check_length(values: list[Any], count: int, param: str) -> None:
    if len(values) != count:
        raise RequestError(
            f"'{param}' has {len(values)} entries, but there are {count} prompts.", param=param
        )


def _stream_interval(path: str, params: SamplingRequest) -> int:
    interval = 1 if params.stream_interval is None else params.stream_interval
    if interval < 1:
        param = f"{path}.stream_interval"
        raise RequestError(f"'{param}' must be at least 1, got {interval}.", param=param)
    return interval


def _fields(params: SamplingRequest, scores: int | None, budget: int | None) -> _Fields:
    temperature = params.temperature
    if temperature is not None and 0 < temperature < GREEDY_BELOW:
        temperature = 0.0
    return _Fields(
        temperature=temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.sampling_seed,
        logit_bias=params.logit_bias,
        stop=params.stop,
        stop_regex=params.stop_regex,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=None,
        no_stop_trim=params.no_stop_trim,
        skip_special_tokens=params.skip_special_tokens,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        json_schema=params.json_schema,
        regex=params.regex,
        ebnf=params.ebnf,
        structural_tag=params.structural_tag,
        min_tokens=params.min_new_tokens,
        prompt_logprobs=scores,
        thinking_token_budget=budget,
    )
