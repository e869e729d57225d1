"""A variant as a program: a straight line of stage calls and updates of the device state.

Values are named by what they are: `weight.*` (bound once, after loading), `state.*` (lives on the
device between steps), `input.*` (written by the host for each step), and `value.*` (inside the
step). Thirty equal layers are thirty calls of one stage with other names bound to its ports.

The state is read by stages and written only by `Update`s, which come last: so a step is pure until
then, and what it wrote for tokens that are dropped later never needs undoing. Only a draft writes
before its end: the MTP layer's keys of drafted tokens, which its next round attends to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from trnc.compiler.matrix import variant_matrix
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

    steps: tuple[Call | Update, ...]
    outputs: tuple[str, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """The stage calls, in order."""
        return tuple(step for step in self.steps if isinstance(step, Call))

    @property
    def updates(self) -> tuple[Update, ...]:
        """The writes to the state, in order."""
        return tuple(step for step in self.steps if isinstance(step, Update))


OVER_LOGITS = frozenset({"head", "mask", "logit_bias", "penalties", "greedy", "sample", "logprobs"})


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """What all programs of a manifest have in common.

    With `static_buckets` each bucket has stages of its own, for backends that compile for exact
    shapes. Without, token rows and sequences are symbolic and all buckets share their stages: on
    the CPU the bits of a row do not depend on the bucket, so nothing is lost. `contexts` are the
    context buckets of the matrix, (0,) for a backend that does without.
    """

    model: ModelConfig
    formats: WeightFormats
    preset: Preset
    static_buckets: bool = False
    contexts: tuple[int, ...] = (0,)

    @property
    def speculates(self) -> bool:
        """Whether the programs keep what a draft needs."""
        return bool(self.preset.mtp_depths)

    @property
    def table_formats(self) -> WeightFormats:
        """The formats of the embedding and the head, without those of the layers."""
        return replace(self.formats, layers=())

    def spec(self, kind: StageKind, key: VariantKey) -> StageSpec:
        """The spec of a stage at the bucket of `key`; the caller adds what else it depends on.

        A stage from the logits on has as many rows as there are logits. Only the MTP layer's head
        depends on what there is of that layer: presets with and without it share all the rest.
        """
        own = kind == "mtp_head"
        model = self.model if own else replace(self.model, mtp_layers=0, mtp_vocab=0)
        rows = key.logit_rows if kind in OVER_LOGITS else key.rows
        return StageSpec(
            kind=kind,
            model=model,
            tokens=key.tokens if self.static_buckets else "tokens",
            rows=rows if self.static_buckets else "rows",
        )


def build_programs(config: ProgramConfig) -> dict[VariantKey, Program]:
    """Return the program of every variant of the preset."""
    keys = variant_matrix(config.preset, config.contexts)
    return {key: build_program(config, key) for key in keys}


def build_program(config: ProgramConfig, key: VariantKey) -> Program:
    """Return the program of one variant."""
    if key.step == "draft":
        return draft_program(config, key)
    calls = [_embed(config, key), *_layers(config, key), _head(config, key)]
    calls += _sampling(config, key)
    if key.prompt_logprobs:
        calls += _prompt_logprobs(config, key)
    outputs = ["value.tokens"]
    if key.step == "verify":
        calls.append(accept_call(config, key))
        outputs.append("value.accepted")
    if config.speculates:
        calls.append(mtp_cache_call(config, key))
    if key.logprobs:
        outputs += ["value.logprob", "value.top_ids", "value.top_logprobs"]
    if key.prompt_logprobs:
        outputs += ["value.prompt_logprob", "value.prompt_top_ids", "value.prompt_top_logprobs"]
    return Program(steps=(*calls, *_updates(config, key)), outputs=tuple(outputs))


def draft_program(config: ProgramConfig, key: VariantKey) -> Program:
    """`key.depth` rounds of the MTP layer, each from the state and the token of the one before.

    The layer's keys of a round are written before the next one, which attends to them. A mask is of
    the first round: the host does not know what the later ones follow.
    """
    fixed = {"lengths": "state.lengths", "mtp_states": "state.mtp_states"}
    steps: list[Call | Update] = [_call(config.spec("draft_begin", key), fixed, {})]
    places = ("positions", "sequences", "output_index")
    names = {name: f"value.{name}" for name in places} | {
        "previous": "value.states",
        "token_ids": "input.slots",  # of no account: every token is taken from a slot
        "token_slots": "input.slots",
        "sample_rows": "input.own_rows",
    }
    for depth in range(key.depth):
        draft = f"value.drafts.{depth}"
        if depth:
            steps.append(cache_update(config, config.model.num_layers, "value.sequences"))
            moving = {name: f"value.{name}" for name in places}
            steps.append(_call(config.spec("draft_next", key), moving, {}))
            last = f"value.drafts.{depth - 1}"
            names |= {"last_tokens": last, "token_slots": "input.own_rows"}
        steps += mtp_calls(config, key, names)
        masked = replace(key, mask=key.mask and not depth)
        steps += _sampling(config, masked, names | {"tokens": draft})
    drafts = tuple(f"value.drafts.{depth}" for depth in range(key.depth))
    for depth, draft in enumerate(drafts):
        slots = f"input.draft_slots.{depth}"
        steps.append(Update("store_tokens", ("state.last_tokens", slots, draft)))
    return Program(steps=tuple(steps), outputs=drafts)


def accept_call(config: ProgramConfig, key: VariantKey) -> Call:
    """After the sampling of a verify: what of it counts."""
    bindings = {"tokens": "value.tokens", "last_tokens": "state.last_tokens"}
    return _call(config.spec("accept", key), bindings, {})


def mtp_cache_call(config: ProgramConfig, key: VariantKey) -> Call:
    """After the sampling: what the MTP layer keeps of every position of the step.

    The token after a row is `input.next_ids`, or the token picked in the row that `input.next_rows`
    names. The target's states become `value.states`.
    """
    index, preset = config.model.num_layers, config.preset
    cache = cache_layout(config.model, preset.kv_dtype, preset.page_size)
    spec = replace(
        config.spec("mtp_cache", key),
        rows=0,
        formats=config.formats,
        kv_dtype=preset.kv_dtype,
        page_size=preset.page_size,
    )
    own = {port: f"weight.layers.{index}.{port}" for port in build_stage(spec).inputs}
    names = {
        "hidden": "value.hidden",
        "norm": "weight.norm",
        "token_ids": "input.next_ids",
        "token_slots": "input.next_rows",
        "positions": "input.positions",
    }
    bindings = {**own, **_EMBEDDING, **names, "last_tokens": "value.tokens"}
    return _call(spec, bindings, {name: f"value.{name}.{index}" for name in cache.new})


def distinct_specs(programs: Iterator[Program]) -> tuple[StageSpec, ...]:
    """Return every stage spec that the programs call, once, in order of first use."""
    return tuple(dict.fromkeys(call.stage for program in programs for call in program.calls))


def _call(spec: StageSpec, bindings: Mapping[str, str], outputs: Mapping[str, str]) -> Call:
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
    spec = replace(config.spec("embed", key), rows=0, formats=config.table_formats)
    return _call(spec, _EMBEDDING, {})


def mtp_calls(
    config: ProgramConfig, key: VariantKey, names: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Call]:
    """One pass of the MTP layer: the states and logits of the rows that sample.

    Row i has the token at position i + 1 and, as `previous`, the state at position i; its
    position and its place in the cache are i. `cache_update` of layer `num_layers` belongs to it.
    `names` binds ports that are not inputs of the step.
    """
    index = config.model.num_layers
    yield _mtp_embed(config, key, names)
    yield layer_call(config, key, index, names)
    bindings = {
        **names,
        "hidden": "value.hidden",
        "shared_norm": f"weight.layers.{index}.shared_norm",
        "head": _head_weight(config),
    }
    if config.model.mtp_vocab:
        own = {"head": "draft_head", "draft_ids": "draft_ids"}
        bindings |= {port: f"weight.layers.{index}.{name}" for port, name in own.items()}
    spec = replace(config.spec("mtp_head", key), formats=config.table_formats)
    yield _call(spec, bindings, {})


def _mtp_embed(config: ProgramConfig, key: VariantKey, names: Mapping[str, str]) -> Call:
    index = config.model.num_layers
    own = {name: f"weight.layers.{index}.{name}" for name in ("enorm", "hnorm", "eh_proj")}
    spec = replace(config.spec("mtp_embed", key), rows=0, formats=config.formats)
    return _call(spec, {**_EMBEDDING, **own, **names}, {})


def _layers(config: ProgramConfig, key: VariantKey) -> Iterator[Call]:
    for index in range(config.model.num_layers):
        yield layer_call(config, key, index)


def layer_call(
    config: ProgramConfig,
    key: VariantKey,
    index: int,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Call:
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
    outputs = {name: f"value.{name}.{index}" for name in cache.new}
    return _call(spec, {**names, **fixed, **weights}, outputs)


def _head(config: ProgramConfig, key: VariantKey) -> Call:
    spec = replace(config.spec("head", key), formats=config.table_formats)
    bindings = {
        "hidden": "value.hidden",
        "norm": "weight.norm",
        "head": _head_weight(config),
    }
    return _call(spec, bindings, {})


def _head_weight(config: ProgramConfig) -> str:
    return "weight.embed" if config.model.tie_embeddings else "weight.head"


def _sampling(
    config: ProgramConfig, key: VariantKey, names: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Call]:
    """From `value.logits` to the picked tokens, `value.tokens` unless `names` says otherwise."""

    def spec(kind: StageKind) -> StageSpec:
        return replace(config.spec(kind, key), tokens=0)

    # The order of DESIGN §5. Each takes the logits of the one before.
    logits = "value.logits"
    tokens = names.get("tokens", "value.tokens")
    shaping: list[tuple[StageSpec, str]] = []
    if key.mask:
        shaping.append((spec("mask"), "value.masked_logits"))
    if key.logit_bias:
        shaping.append((spec("logit_bias"), "value.biased_logits"))
    if key.penalties:
        entries = key.penalties if config.static_buckets else "entries"
        shaping.append((replace(spec("penalties"), entries=entries), "value.penalized_logits"))
    for stage, shaped in shaping:
        yield _call(stage, {"logits": logits}, {"logits": shaped})
        logits = shaped
    yield _call(spec(key.sampling), {**names, "logits": logits}, {"tokens": tokens})
    if key.logprobs:
        # Log-probabilities are of the raw logits, before any bias or filter.
        bindings = {"logits": "value.logits", "tokens": tokens}
        yield _call(spec("logprobs"), bindings, {})


def _prompt_logprobs(config: ProgramConfig, key: VariantKey) -> Iterator[Call]:
    """Score `input.targets`, the tokens after each token row, with the stages of the output's."""
    rows = key.tokens if config.static_buckets else "rows"
    head = _head(config, key)
    ports = dict(zip(build_stage(head.stage).inputs, head.inputs, strict=True))
    ports["sample_rows"] = "input.prompt_rows"
    yield _call(replace(head.stage, rows=rows), ports, {"logits": "value.prompt_logits"})
    yield _call(
        replace(config.spec("logprobs", key), tokens=0, rows=rows),
        {"logits": "value.prompt_logits", "tokens": "input.targets"},
        {
            "logprob": "value.prompt_logprob",
            "top_ids": "value.prompt_top_ids",
            "top_logprobs": "value.prompt_top_logprobs",
        },
    )


def _updates(config: ProgramConfig, key: VariantKey) -> Iterator[Update]:
    layers = config.model.num_layers + config.speculates
    for index in range(layers):
        yield cache_update(config, index)
    slots, tokens = "input.sample_slots", "value.tokens"
    lengths, rows = "input.lengths", "input.sample_rows"
    if key.step == "verify":
        tokens, lengths, rows = "value.next_tokens", "value.lengths", "value.last_rows"
    yield Update("store_tokens", ("state.last_tokens", slots, tokens))
    if config.speculates:
        yield Update("store_tokens", ("state.lengths", slots, lengths))
        yield Update("store_states", ("state.mtp_states", slots, "value.states", rows))


def cache_update(config: ProgramConfig, index: int, sequences: str = "input.sequences") -> Update:
    """The write of what one layer adds to its pages."""
    cache = cache_layout(config.model, config.preset.kv_dtype, config.preset.page_size)
    pages = (f"state.{name}.{index}" for name in cache.pages)
    new = (f"value.{name}.{index}" for name in cache.new)
    return Update(cache.write, (*pages, *new, "input.block_tables", sequences))
