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
from trnc.models.cache import cache_layout
from trnc.models.config import ModelConfig
from trnc.models.layer import layer_weights
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


_EMBEDDING = {
    "last_tokens": "state.last_tokens",
    "cos_table": "weight.cos_table",
    "sin_table": "weight.sin_table",
    "embed": "weight.embed",
}


def _embed(config: ProgramConfig, key: VariantKey) -> Call:
    # Neither the number of sequences nor anything of the cache shapes this graph.
    spec = replace(config.spec("embed", key), rows=0, formats=config.formats)
    return _call(spec, _EMBEDDING, {})


def final_norm_call(config: ProgramConfig, key: VariantKey) -> Call:
    """After the layers: `value.states`, what `mtp_calls` takes as `input.previous`."""
    spec = replace(config.spec("final_norm", key), rows=0)
    return _call(spec, {"hidden": "value.hidden", "norm": "weight.norm"}, {})


def mtp_calls(config: ProgramConfig, key: VariantKey) -> Iterator[Call]:
    """One pass of the MTP layer: the states and logits of the rows that sample.

    Row i has the token at position i + 1 and, in `input.previous`, the state at position i; its
    position and its place in the cache are i. `cache_update` of layer `num_layers` belongs to it.
    """
    index = config.model.num_layers
    own = {name: f"weight.layers.{index}.{name}" for name in ("enorm", "hnorm", "eh_proj")}
    spec = replace(config.spec("mtp_embed", key), rows=0, formats=config.formats)
    yield _call(spec, _EMBEDDING | own, {})
    yield layer_call(config, key, index)
    bindings = {
        "hidden": "value.hidden",
        "shared_norm": f"weight.layers.{index}.shared_norm",
        "head": _head_weight(config),
    }
    yield _call(replace(config.spec("mtp_head", key), formats=config.formats), bindings, {})


def _layers(config: ProgramConfig, key: VariantKey) -> Iterator[Call]:
    for index in range(config.model.num_layers):
        yield layer_call(config, key, index)


def layer_call(config: ProgramConfig, key: VariantKey, index: int) -> Call:
    """Bind one layer to its weights and pages; index `num_layers` is the MTP layer's."""
    preset = config.preset
    spec = replace(
        config.spec("moe_layer" if config.model.is_moe(index) else "layer", key),
        formats=config.formats.layers[index],
        kv_dtype=preset.kv_dtype,
        page_size=preset.page_size,
    )
    cache = cache_layout(config.model, preset.kv_dtype, preset.page_size)
    fixed = {name: f"value.{name}" for name in ("hidden", "cos", "sin")}
    fixed |= {name: f"state.{name}.{index}" for name in cache.pages}
    weights = {port: f"weight.layers.{index}.{port}" for port in layer_weights(spec)}
    return _call(spec, fixed | weights, {name: f"value.{name}.{index}" for name in cache.new})


def _head(config: ProgramConfig, key: VariantKey) -> Call:
    spec = replace(config.spec("head", key), formats=config.formats)
    bindings = {
        "hidden": "value.hidden",
        "norm": "weight.norm",
        "head": _head_weight(config),
    }
    return _call(spec, bindings, {})


def _head_weight(config: ProgramConfig) -> str:
    return "weight.embed" if config.model.tie_embeddings else "weight.head"


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
    for index in range(config.model.num_layers):
        yield cache_update(config, index)
    yield Update("store_tokens", ("state.last_tokens", "input.sample_slots", "value.tokens"))


def cache_update(config: ProgramConfig, index: int) -> Update:
    """The write of what one layer adds to its pages."""
    cache = cache_layout(config.model, config.preset.kv_dtype, config.preset.page_size)
    pages = (f"state.{name}.{index}" for name in cache.pages)
    new = (f"value.{name}.{index}" for name in cache.new)
    return Update(cache.write, (*pages, *new, "input.block_tables", "input.sequences"))
