"""What the product promises of its graphs, as claims that are proved for every configuration.

1. A variant with features, given the inputs of requests that use none of them, picks the tokens
   and leaves the state of the variant without them.
2. A layer computes one function of a position, whatever the step: a token row of `decode`,
   `verify`, `draft` or `prefill` is the layer of one token, in the context that the row attends in.
   That is claimed with symbolic buckets, which covers every bucket at once, and for the graph of
   each bucket where a backend has them static.

The proofs look into stages one at a time, and into each distinct text once: a stage that takes
neutral inputs is shown to pass on what it is given, and a layer to be the layer of one token. Then
two programs are compared by how their values are wired: so thirty equal layers cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import Call, Program, ProgramConfig, build_program, distinct_specs
from trnc.core import VariantKey
from trnc.equiv.egraph import Limits
from trnc.equiv.lemmas import Role, prove_passes_on, prove_row
from trnc.equiv.prove import Proof
from trnc.equiv.text import parse
from trnc.models.cache import cache_layout
from trnc.models.layer import layer_weights
from trnc.models.registry import build_stage
from trnc.models.stage import StageSpec
from trnc.presets import FEATURES, with_features

# What the host gives for a request that does not use a feature (`trnc.runtime.inputs`).
NEUTRAL: Mapping[str, float] = {
    "bias_ids": -1,
    "bias_values": 0,
    "mask": -1,
    "penalty_ids": -1,
    "penalty_counts": 0,
    "repetition": 1,
    "frequency": 0,
    "presence": 0,
}

_LAYERS = ("layer", "moe_layer")


@dataclass(frozen=True, slots=True)
class SamePrograms:
    """`program`, with neutral inputs for its features, is `plain`."""

    program: Program
    plain: Program


@dataclass(frozen=True, slots=True)
class OneLayer:
    """A token row of the layer `step` is the layer `single` of one token."""

    step: StageSpec
    single: StageSpec


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise: in words, and what is to be proved."""

    statement: str
    subject: SamePrograms | OneLayer

    @property
    def stages(self) -> Iterator[StageSpec]:
        """The stages that the proof looks into."""
        if isinstance(self.subject, OneLayer):
            return iter((self.subject.step, self.subject.single))
        return filter(neutral_ports, distinct_specs(iter((self.subject.program,))))


def claims(config: ProgramConfig) -> Iterator[Claim]:
    """Yield every promise of a configuration: each feature alone and all at once, and its layers.

    Features are claimed of the preset whether or not it has them on.
    """
    yield from _feature_claims(config)
    yield from _layer_claims(config)


def _feature_claims(config: ProgramConfig) -> Iterator[Claim]:
    on = [dict.fromkeys(FEATURES, True)]
    on += [{other: other == name for other in FEATURES} for name in FEATURES]
    presets = [config.preset, *(with_features(config.preset, features) for features in on)]
    keys = dict.fromkeys(key for preset in presets for key in variant_matrix(preset))
    plain = {key: build_program(config, key) for key in dict.fromkeys(map(without_features, keys))}
    for key in keys:
        if key not in plain:
            other = without_features(key)
            subject = SamePrograms(build_program(config, key), plain[other])
            yield Claim(f"{key} with neutral inputs is {other}", subject)


def _layer_claims(config: ProgramConfig) -> Iterator[Claim]:
    steps: dict[StageSpec, dict[str, None]] = {}
    for key in dict.fromkeys(map(without_features, variant_matrix(config.preset))):
        for spec in distinct_specs(iter((build_program(config, key),))):
            if spec.kind in _LAYERS:
                name = str(key).partition("/")[0] if config.static_buckets else key.step
                steps.setdefault(spec, {})[name] = None
    size = "" if config.static_buckets else " in any bucket"
    for spec, names in steps.items():
        statement = f"{spec.kind}, a row of {', '.join(names)}{size} is a step of one token"
        yield Claim(statement, OneLayer(spec, replace(spec, tokens=1, rows=1)))


def without_features(key: VariantKey) -> VariantKey:
    """The variant of the same bucket and sampling mode with every feature off."""
    step, tokens, rows, sampling = key.step, key.tokens, key.rows, key.sampling
    return VariantKey(step, tokens, rows, sampling, depth=key.depth, context=key.context)


class Prover:
    """Proves claims. What is known of a text, or of two programs, is not proved again."""

    def __init__(self, *, texts: Mapping[StageSpec, str], limits: Limits | None = None) -> None:
        """Take the canonical texts of the claims' stages."""
        self._texts = texts
        self._limits = limits or Limits()
        self._known: dict[object, Proof] = {}

    def prove(self, claim: Claim) -> Proof:
        """Return the answer to a claim; a refutation says which stage breaks it, and how."""
        subject = claim.subject
        if isinstance(subject, OneLayer):
            step, single = self._texts[subject.step], self._texts[subject.single]
            roles = layer_roles(subject.step)
            return self._once(
                (step, single, roles),
                lambda: prove_row(parse(step), parse(single), roles, self._limits),
            )
        return self._once(subject, lambda: self._prove_programs(subject))

    def _once(self, subject: object, proof: Callable[[], Proof]) -> Proof:
        if subject not in self._known:
            self._known[subject] = proof()
        return self._known[subject]

    def _prove_programs(self, subject: SamePrograms) -> Proof:
        numbers: dict[object, int] = {}
        left = self._wire(subject.program, numbers)
        right = self._wire(subject.plain, numbers)
        neutral = [p for s in distinct_specs(iter((subject.program,))) if (p := self._neutral(s))]
        is_same = left.written == right.written and all(
            left.known[name] == right.known[name]
            for name in (*subject.plain.outputs, *right.written)
        )
        if is_same:
            rules = dict.fromkeys(rule for proof in neutral for rule in proof.rules)
            return Proof("proved", "the tokens and the state are computed alike", tuple(rules))
        broken = [proof for proof in neutral if proof.verdict != "proved"]
        return broken[0] if broken else Proof("unknown", "the programs are wired otherwise")

    def _wire(self, program: Program, numbers: dict[object, int]) -> _Wiring:
        """Number the values of a program: those with one number are computed alike."""
        values = _Wiring(numbers)
        for step in program.steps:
            if not isinstance(step, Call):
                values.update(step.op, step.inputs)
                continue
            proof = self._neutral(step.stage)
            if proof is not None and proof.verdict == "proved":
                values.pass_on(step, passed_ports(step.stage))
            else:
                values.call(step)
        return values

    def _neutral(self, spec: StageSpec) -> Proof | None:
        """What is known of a stage of a feature whose inputs are neutral; None for others."""
        ports = neutral_ports(spec)
        if not ports:
            return None
        text, passed = self._texts[spec], passed_ports(spec)
        return self._once(
            (text, tuple(ports.items()), passed),
            lambda: prove_passes_on(parse(text), ports, passed, self._limits),
        )


class _Wiring:
    """The values of a program by name, as numbers."""

    def __init__(self, numbers: dict[object, int]) -> None:
        self._numbers = numbers
        self.known: dict[str, int] = {}
        self.written: dict[str, None] = {}  # names of the state

    def _number(self, *value: object) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _operands(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(
            self.known[name] if name in self.known else self._number("given", name)
            for name in names
        )

    def call(self, call: Call) -> None:
        """A stage is a function of its operands."""
        result = self._number(call.stage, self._operands(call.inputs))
        for index, name in enumerate(call.outputs):
            self.known[name] = self._number(result, index)

    def pass_on(self, call: Call, passed: Sequence[int]) -> None:
        """A stage that gives back operands."""
        operands = self._operands(call.inputs)
        self.known.update((n, operands[i]) for n, i in zip(call.outputs, passed, strict=True))

    def update(self, op: str, names: Sequence[str]) -> None:
        """A write to the state: every state it takes may be another one afterwards."""
        result = self._number("update", op, self._operands(names))
        for index, name in enumerate(names):
            if name.startswith("state."):
                self.known[name] = self._number(result, index)
                self.written[name] = None


@lru_cache(maxsize=256)
def neutral_ports(spec: StageSpec) -> Mapping[int, float]:
    """The inputs of a stage that belong to a feature, by position, and their neutral numbers."""
    ports = build_stage(spec).inputs
    return {index: NEUTRAL[port] for index, port in enumerate(ports) if port in NEUTRAL}


def passed_ports(spec: StageSpec) -> tuple[int, ...]:
    """Which input each output of a feature's stage takes the place of: the one of its name."""
    stage = build_stage(spec)
    ports = list(stage.inputs)
    return tuple(ports.index(name) for name in stage.outputs)


def layer_roles(spec: StageSpec) -> tuple[Role, ...]:
    """What each input of a layer's stage is to one of its token rows."""
    pages = cache_layout(spec.model, spec.kv_dtype, spec.page_size).pages
    context = {*pages, "block_tables", "sequences"}
    weights = layer_weights(spec)
    return tuple(
        "context" if port in context else "shared" if port in weights else "row"
        for port in build_stage(spec).inputs
    )
