"""A variant as a program: a straight line of stage calls, then the updates of the device state.

Values are named by what they are: `weight.*` (bound once, after loading), `state.*` (lives on the
device between steps), `input.*` (written by the host for each step), and `value.*` (inside the
step). Thirty equal layers are thirty calls of one stage with other names bound to its ports.

The state is read by stages and written only by the `Update`s at the end, so a step is pure until
then, and what a step wrote for tokens that are dropped later never needs undoing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trnc.core import VariantKey
from trnc.models.config import ModelConfig
from trnc.models.registry import build_stage
from trnc.models.stage import StageKind, StageSpec, WeightFormats
from trnc.presets import Preset


@dataclass(frozen=True, slots=True)
class Call:
    """Run one stage: `inputs` and `outputs` are value names in the order of the stage's ports."""

    stage: StageSpec
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Write to the device state with one of our operators (`kv_write`, `store_tokens`)."""

    op: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One variant, ready to link. `outputs` are the values that the host reads back."""

    calls: tuple[Call, ...]
    updates: tuple[Update, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """What all programs of a manifest have in common.

    With `static_buckets` each bucket has stages of its own, for backends that compile for exact
    shapes. Without, token rows and sequences are symbolic and all buckets share their stages: on
    the CPU the bits of a row do not depend on the bucket, so nothing is lost.
    """

    model: ModelConfig
    formats: WeightFormats
    preset: Preset
    static_buckets: bool = False

    def spec(self, kind: StageKind, key: VariantKey) -> StageSpec:
        """The spec of a stage at the bucket of `key`; the caller adds what else it depends on."""
        return StageSpec(
            kind=kind,
            model=self.model,
            tokens=key.tokens if self.static_buckets else "tokens",
            rows=key.rows if self.static_buckets else "rows",
        )


def build_program(config: ProgramConfig, key: VariantKey) -> Program:
    """Return the program of one variant."""
    calls = [_embed(config, key), *_layers(config, key), _head(config, key)]
    calls += _sampling(config, key)
    outputs = ["value.tokens"]
    if key.logprobs:
        outputs += ["value.logprob", "value.top_ids", "value.top_logprobs"]
    return Program(calls=tuple(calls), updates=tuple(_updates(config)), outputs=tuple(outputs))


def distinct_specs(programs: Iterator[Program]) -> tuple[StageSpec, ...]:
    """Return every stage spec that the programs call, once, in order of first use."""
    return tuple(dict.fromkeys(call.stage for program in programs for call in program.calls))


def _call(spec: StageSpec, bindings: dict[str, str], outputs: dict[str, str]) -> Call:
    """Bind ports to values. A port without a binding takes the value or input of its own name."""
    stage = build_stage(spec)
    return Call(
        stage=spec,
        inputs=tuple(bindings.get(port, f"input.{port}") for port in stage.inputs),
        outputs=tuple(outputs.get(port, f"value.{port}") for port in stage.outputs),
    )


def _embed(config: ProgramConfig, key: VariantKey) -> Call:
    # Neither the number of sequences nor anything of the cache shapes this graph.
    spec = replace(config.spec("embed", key), rows=0, formats=config.formats)
    bindings = {
        "last_tokens": "state.last_tokens",
        "cos_table": "weight.cos_table",
        "sin_table": "weight.sin_table",
        "embed": "weight.embed",
    }
    return _call(spec, bindings, {})


def _layers(config: ProgramConfig, key: VariantKey) -> Iterator[Call]:
    for index, formats in enumerate(config.formats.layers):
        spec = replace(
            config.spec("layer", key),
            formats=formats,
            kv_dtype=config.preset.kv_dtype,
            page_size=config.preset.page_size,
        )
        fixed = {name: f"value.{name}" for name in ("hidden", "cos", "sin")}
        fixed |= {name: f"state.{name}.{index}" for name in ("k_pages", "v_pages")}
        fixed |= {name: f"input.{name}" for name in ("block_tables", "sequences")}
        weights = {
            port: f"weight.layers.{index}.{port}"
            for port in build_stage(spec).inputs
            if port not in fixed
        }
        new = {name: f"value.{name}.{index}" for name in ("k_new", "v_new")}
        yield _call(spec, fixed | weights, new)


def _head(config: ProgramConfig, key: VariantKey) -> Call:
    spec = replace(config.spec("head", key), formats=config.formats)
    head = "weight.embed" if config.model.tie_embeddings else "weight.head"
    bindings = {"hidden": "value.hidden", "norm": "weight.norm", "head": head}
    return _call(spec, bindings, {})


def _sampling(config: ProgramConfig, key: VariantKey) -> Iterator[Call]:
    def spec(kind: StageKind) -> StageSpec:
        return replace(config.spec(kind, key), tokens=0)

    logits = "value.logits"
    if key.logit_bias:
        logits = "value.biased_logits"
        yield _call(spec("logit_bias"), {"logits": "value.logits"}, {"logits": logits})
    yield _call(spec(key.sampling), {"logits": logits}, {})
    if key.logprobs:
        # Log-probabilities are of the raw logits, before any bias or filter.
        bindings = {"logits": "value.logits", "tokens": "value.tokens"}
        yield _call(spec("logprobs"), bindings, {})


def _updates(config: ProgramConfig) -> Iterator[Update]:
    for i in range(config.model.num_layers):
        pages = (f"state.k_pages.{i}", f"state.v_pages.{i}", f"value.k_new.{i}", f"value.v_new.{i}")
        yield Update("kv_write", (*pages, "input.block_tables", "input.sequences"))
    yield Update("store_tokens", ("state.last_tokens", "input.sample_slots", "value.tokens"))
