"""From the fields of a request to `SamplingParams` and stops: ranges and defaults, written once.

Every API goes through here, so that a field means the same on every route.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypeVar

from trnc.checkpoint.generation import GenerationDefaults
from trnc.core import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from trnc.errors import RequestError

T = TypeVar("T")

MAX_STOPS = 32
MAX_CHOICES = 128
MAX_ANSWERS = 1024
INT64 = range(-(2**63), 2**63)


class SamplingFields(Protocol):
    """The sampling fields that all request bodies share; None is "not set"."""

    @property
    def temperature(self) -> float | None:
        """0 is greedy."""

    @property
    def top_p(self) -> float | None:
        """In (0, 1]."""

    @property
    def top_k(self) -> int | None:
        """0 and -1 mean all tokens."""

    @property
    def min_p(self) -> float | None:
        """In [0, 1]."""

    @property
    def seed(self) -> int | None:
        """64 bits, signed."""

    @property
    def logit_bias(self) -> dict[str, float] | None:
        """From token ids, as decimal strings, to -100 .. 100."""

    @property
    def repetition_penalty(self) -> float | None:
        """In (0, 2]; 1 is neutral."""

    @property
    def frequency_penalty(self) -> float | None:
        """In [-2, 2]; 0 is neutral."""

    @property
    def presence_penalty(self) -> float | None:
        """In [-2, 2]; 0 is neutral."""

    @property
    def prompt_logprobs(self) -> int | None:
        """How many alternatives to each token of the prompt."""


def sampling_params(
    fields: SamplingFields,
    *,
    logprobs: int | None,
    defaults: GenerationDefaults,
    vocab_size: int,
    features: Sequence[str],
    max_temperature: float | None,
    penalize_prompt: bool = True,
) -> SamplingParams:
    """Return checked parameters; a field that is not set takes the model's or OpenAI's default.

    `max_temperature` is the API's own limit, if it has one, and `penalize_prompt` its meaning of
    repetition: whether it counts the prompt. A seed is drawn when there is none, so that every
    request can be replayed.

    Raises:
        RequestError: a value is out of range, or needs a feature that the preset leaves out.
    """
    _check_temperature(fields.temperature, max_temperature)
    _check_ranges(fields)
    penalties = _penalties(fields, defaults, features)
    if fields.prompt_logprobs is not None:
        need_feature("prompt_logprobs", "prompt_logprobs", features)
        check_logprobs(fields.prompt_logprobs, "prompt_logprobs")
    seed = secrets.randbelow(2**63) if fields.seed is None else fields.seed
    if logprobs is not None:
        need_feature("logprobs", "logprobs", features)
    return SamplingParams(
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_k=min(max(_first(fields.top_k, defaults.top_k, 0), 0), vocab_size),
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        seed=seed,
        logprobs=logprobs,
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size, features),
        repetition_penalty=penalties["repetition_penalty"],
        frequency_penalty=penalties["frequency_penalty"],
        presence_penalty=penalties["presence_penalty"],
        penalize_prompt=penalize_prompt,
        prompt_logprobs=fields.prompt_logprobs,
    )


def _penalties(
    fields: SamplingFields, defaults: GenerationDefaults, features: Sequence[str]
) -> dict[str, float]:
    """Return the penalties by name. The model's own default holds where the server has them."""
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    given = {name: _first(getattr(fields, name), None, value) for name, value in neutral.items()}
    for name, value in given.items():
        if value != neutral[name]:
            need_feature(name, "penalties", features)
    if fields.repetition_penalty is None and "penalties" in features:
        given["repetition_penalty"] = _first(None, defaults.repetition_penalty, 1.0)
    return given


def check_logprobs(count: int, param: str) -> int:
    """Return a number of alternatives that the logprobs stage can give."""
    _check(0 <= count <= MAX_LOGPROBS, param, f"between 0 and {MAX_LOGPROBS}", count)
    return count


def choice_count(n: int | None, best_of: int | None = None) -> int:
    """Return how many answers a request wants; all that are made are given.

    Raises:
        RequestError: `n` is out of range, or `best_of` asks for more than are given.
    """
    count = 1 if n is None else n
    _check(1 <= count <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}", count)
    if best_of not in (None, count):
        _refuse("best_of", f"equal to 'n' ({count})", best_of)
    return count


def check_answers(prompts: int, choices: int, param: str) -> None:
    """Raise RequestError if one request wants more answers than it may."""
    if prompts * choices > MAX_ANSWERS:
        raise RequestError(
            f"'{param}': {prompts} prompts with {choices} choices each are over {MAX_ANSWERS}"
            " answers.",
            param=param,
        )


def with_seed_offset(sampling: SamplingParams, offset: int) -> SamplingParams:
    """Return the parameters of choice `offset`; its seed wraps around as a 64-bit integer does."""
    return replace(sampling, seed=(sampling.seed + offset - INT64.start) % 2**64 + INT64.start)


def keep_stop(include_stop_str_in_output: bool | None, no_stop_trim: bool | None) -> bool:
    """Return whether the stop is part of the answer: vLLM's and SGLang's name for one thing."""
    if None not in (include_stop_str_in_output, no_stop_trim):
        _check(
            include_stop_str_in_output == no_stop_trim,
            "no_stop_trim",
            "equal to 'include_stop_str_in_output', its other name",
            no_stop_trim,
        )
    return bool(include_stop_str_in_output or no_stop_trim)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a request; raises RequestError for an empty one or too many."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        _refuse("stop", f"at most {MAX_STOPS} strings", f"{len(stops)} of them")
    _check(all(stops), "stop", "made of strings that are not empty", "''")
    return stops


def stop_token_ids(
    requested: list[int] | None, *, eos: Sequence[int], ignore_eos: bool, vocab_size: int
) -> tuple[int, ...]:
    """Return the ids that end the text, the eos ids among them unless `ignore_eos`."""
    check_token_ids(requested or (), "stop_token_ids", vocab_size)
    ids = (*(() if ignore_eos else eos), *(requested or ()))
    return tuple(dict.fromkeys(ids))


def check_token_ids(token_ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raise RequestError unless all ids are in the vocabulary."""
    for extreme in (min, max):  # and no loop: there may be millions
        token_id = extreme(token_ids, default=0)
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"'{param}': token id {token_id} is not in the vocabulary (0 to {vocab_size - 1}).",
                param=param,
            )


def _check_temperature(value: float | None, most: float | None) -> None:
    rule = "a non-negative finite number" if most is None else f"between 0 and {most:g}"
    _check(
        value is None or (value >= 0 and (most is None or value <= most)),
        "temperature",
        rule,
        value,
    )


def _check_ranges(fields: SamplingFields) -> None:
    """Check what the client set; null means "not set"."""
    rules: list[tuple[str, Callable[[Any], bool], str]] = [
        ("top_p", lambda v: 0.0 < v <= 1.0, "above 0 and at most 1"),
        ("top_k", lambda v: v >= -1, "at least 1, or 0 or -1 for all tokens"),
        ("min_p", lambda v: 0.0 <= v <= 1.0, "between 0 and 1"),
        ("seed", lambda v: v in INT64, "a 64-bit signed integer"),
        ("repetition_penalty", lambda v: 0.0 < v <= 2.0, "above 0 and at most 2"),
        ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "between -2 and 2"),
        ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "between -2 and 2"),
    ]
    for name, fits, rule in rules:
        value = getattr(fields, name)
        _check(value is None or fits(value), name, rule, value)


def _logit_bias(
    bias: Mapping[str, float], vocab_size: int, features: Sequence[str]
) -> tuple[tuple[int, float], ...]:
    if bias:
        need_feature("logit_bias", "logit_bias", features)
    if len(bias) > MAX_LOGIT_BIAS:
        _refuse("logit_bias", f"at most {MAX_LOGIT_BIAS} entries", f"{len(bias)} of them")
    entries = []
    for key, value in bias.items():
        # Only the plain spelling of an id: "7" and "07" would be one token with two biases.
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and str(int(key)) == key):
            _refuse("logit_bias", "a map from token ids to numbers", f"the key {key[:40]!r}")
        check_token_ids((int(key),), "logit_bias", vocab_size)
        _check(-100.0 <= value <= 100.0, "logit_bias", "between -100 and 100", value)
        entries.append((int(key), float(value)))
    return tuple(sorted(entries))


def need_feature(param: str, feature: str, features: Sequence[str]) -> None:
    """Raise RequestError, naming the flag, for a field whose feature the server runs without."""
    if feature not in features:
        flag = "--" + feature.replace("_", "-")
        raise RequestError(
            f"'{param}' is not available: the server runs without {flag}. Start it with {flag},"
            f" or with a preset that sets `{feature} = true`.",
            param=param,
            code="feature_disabled",
        )


def _first(field: T | None, default: T | None, fallback: T) -> T:
    if field is not None:
        return field
    return fallback if default is None else default


def _check(ok: bool, param: str, rule: str, got: object) -> None:
    if not ok:
        _refuse(param, rule, got)


def _refuse(param: str, rule: str, got: object) -> NoReturn:
    raise RequestError(f"'{param}' must be {rule}, got {got}.", param=param)
