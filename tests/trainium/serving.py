"""Requests through the whole engine on any backend, and the Trainium modules that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from tests.models.tiny import PRESET, VOCAB
from tests.runtime.serving import Limited, compile_missing
from tests.trainium.tiny_plans import plan_of
from trnc.compiler.backends.stablehlo.build import build_modules
from trnc.compiler.program import ProgramConfig
from trnc.compiler.store import Store
from trnc.core import SamplingParams, TokenLogprobs, VariantKey
from trnc.engine.messages import Rules, Submit
from trnc.engine.offline import run_requests
from trnc.presets import Preset
from trnc.runtime import start
from trnc.runtime.start import (
    Backend,
    Model,
    StartOptions,
    open_model,
    program_config,
    start_executor,
)

TEXT = tuple((i * 7919 + i * i * 31) % VOCAB for i in range(96))
SMALL = replace(
    PRESET,
    name="small",
    decode_rows=(4,),
    prefill_tokens=(16,),
    max_context=80,
    logprobs=False,
    logit_bias=False,
)
FULL = replace(
    SMALL,
    name="full",
    logprobs=True,
    logit_bias=True,
    token_masks=True,
    min_tokens=True,
    penalties=True,
    penalty_buckets=(),
    prompt_logprobs=True,
)
GREEDY = SamplingParams()
PENALIZED = SamplingParams(
    logprobs=0,
    logit_bias=((5, 4.0), (9, -3.0)),
    repetition_penalty=1.3,
    frequency_penalty=0.7,
    presence_penalty=-0.4,
)
RULES = Rules(allowed_token_ids=(*range(0, VOCAB, 2), 11), bad_words=((4,), (8, 6)), min_tokens=5)
PLAIN = (
    Submit("short", TEXT[5:14], GREEDY, 20),
    Submit("long", TEXT[:40], GREEDY, 30),
    Submit("late", TEXT[30:47], GREEDY, 12),
)
SHAPED = (
    Submit("scored", TEXT[:40], SamplingParams(logprobs=5, prompt_logprobs=3), 30),
    Submit("penalized", TEXT[3:20], PENALIZED, 24),
    Submit("ruled", TEXT[1:23], GREEDY, 16, (2, 4), rules=RULES),
    Submit("late", TEXT[30:47], PENALIZED, 12, rules=RULES),
)

Only = Callable[[VariantKey], bool]


@dataclass(frozen=True)
class Served:
    """What each request got, and what each step gave: its kind and the tokens of its sequences."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    steps: list[tuple[str, tuple[tuple[int, ...], ...]]]


def widest(preset: Preset, *samplings: str) -> Only:
    """Take the variants that have all features: those that have less run in them, too."""
    sizes = preset.penalty_sizes or (0,)

    def has_all(key: VariantKey) -> bool:
        if key.sampling not in samplings or key.logit_bias != preset.logit_bias:
            return False
        shaped = key.mask == preset.masks and key.penalties == sizes[-1]
        scored = key.logprobs == preset.logprobs
        prompt = key.step != "prefill" or key.prompt_logprobs == preset.prompt_logprobs
        return key.step == "draft" or (shaped and scored and prompt)

    return has_all


def lower(options: StartOptions, only: Only) -> None:
    """Put some variants' modules into the store; a start finds these and no others."""
    model = open_model(options.model, report=print)
    config = program_config(model, options.preset, "xla-cpu")
    plan = plan_of(config)
    few = {key: program for key, program in plan.programs.items() if only(key)}
    store = Store(root=options.store, log=print)
    build_modules(replace(plan, programs=few), store, report=lambda *_: None)


def serve(
    options: StartOptions,
    requests: Sequence[Submit],
) -> Served:
    """Start an engine, serve the requests, and stop it."""
    executor, _, _ = start_executor(options, compile_missing, print)
    limited: Any = Limited(executor=executor, info=executor.info)
    names = [request.request_id for request in requests]
    found = Served({n: [] for n in names}, {n: [] for n in names}, {n: [] for n in names}, [])
    try:
        for delta in run_requests(limited, requests):
            found.tokens[delta.request_id] += delta.token_ids
            found.logprobs[delta.request_id] += delta.logprobs
            found.prompt_logprobs[delta.request_id] += delta.prompt_logprobs
        assert executor.compiles_after_ready() == 0
    finally:
        executor.close()
    for plan, future in zip(limited.plans, limited.futures, strict=True):
        found.steps.append((plan.step, future.result().tokens))
    return found


def serve_eagerly(options: StartOptions, requests: Sequence[Submit], **changes: Any) -> Served:
    """Serve on the eager backend with `changes` to the preset, and the preset's own cache dtype."""
    preset = replace(options.preset, **changes)

    def as_stored(model: Model, given: Preset, backend: Backend) -> ProgramConfig:
        config = program_config(model, given, backend)
        return replace(config, preset=replace(config.preset, kv_dtype=given.kv_dtype))

    with patch.object(start, "program_config", as_stored):
        return serve(replace(options, preset=preset, backend="eager"), requests)


def largest_error(found: Mapping[str, list[TokenLogprobs]], wanted: Mapping[str, Any]) -> float:
    """Compare the log-probabilities of the tokens themselves, of all requests."""
    pairs = [
        (entry.logprob, other.logprob if isinstance(other, TokenLogprobs) else float(other))
        for name in found
        for entry, other in zip(found[name], wanted[name], strict=True)
    ]
    assert pairs
    return max(abs(a - b) for a, b in pairs)


def prompt_logprobs(model: PreTrainedModel, requests: Sequence[Submit]) -> dict[str, Any]:
    """What `transformers` gives for every token of a prompt but the first.

    In float64; with experts in f32, since its routers compute in that and take nothing else.
    """
    exact = model if hasattr(model.config, "n_routed_experts") else model.double()
    wanted = {}
    with torch.inference_mode():
        for request in requests:
            ids = torch.tensor([request.prompt_ids])
            scores = exact(ids).logits[0, :-1].double().log_softmax(-1)
            wanted[request.request_id] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return wanted
