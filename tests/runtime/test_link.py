"""Linked programs: the code computes what the names say, and every value is freed in time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tests.models.tiny import PRESET, tiny_model
from trnc.compiler.manifest import LinkedCall, LinkedUpdate, Variant
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import Call, ProgramConfig, build_program
from trnc.core import VariantKey
from trnc.models.config import from_hf
from trnc.models.weights import exact_formats
from trnc.runtime.link import Linked, LinkedProgram, link


@dataclass(frozen=True)
class Instruction:
    target: int
    is_update: bool
    inputs: list[int]
    outputs: list[int]
    dead: list[int]


def decoded(program: LinkedProgram) -> list[Instruction]:
    """Read the flat code as the native runner does."""
    code = iter(program.code)

    def slots() -> list[int]:
        return [next(code) for _ in range(next(code))]

    return [Instruction(t, bool(next(code)), slots(), slots(), slots()) for t in code]


def real_variants() -> tuple[Variant, ...]:
    """Every variant of a tiny llama, its stages named by kind."""
    model = from_hf(tiny_model("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    config = ProgramConfig(model=model, formats=exact_formats(model), preset=PRESET)
    variants = []
    for key in variant_matrix(PRESET):
        program = build_program(config, key)
        steps = tuple(
            LinkedCall(step.stage.kind, step.inputs, step.outputs)
            if isinstance(step, Call)
            else LinkedUpdate(step.op, step.inputs)
            for step in program.steps
        )
        variants.append(Variant(key, steps, program.outputs))
    return tuple(variants)


KINDS = ("embed", "layer", "head", "logit_bias", "greedy", "sample", "logprobs")
STAGES = {kind: i for i, kind in enumerate(KINDS)}
UPDATES = {"kv_write": 0, "store_tokens": 1}


def test_every_value_of_a_real_program_dies_once_after_its_last_use_and_outputs_never() -> None:
    variants = real_variants()
    linked = link(variants, stages=STAGES, updates=UPDATES)
    assert set(linked.programs) == {v.key for v in variants}
    for variant in variants:
        check_lifetimes(variant, linked)


def check_lifetimes(variant: Variant, linked: Linked) -> None:
    program = linked.programs[variant.key]
    instructions = decoded(program)
    fixed = set(linked.bound.values()) | set(program.input_slots)
    alive: set[int] = set()
    died: list[int] = []
    for i, instruction in enumerate(instructions):
        assert set(instruction.inputs) <= fixed | alive, "a value is read before it is there"
        alive |= set(instruction.outputs)
        later = {slot for after in instructions[i + 1 :] for slot in after.inputs}
        for slot in instruction.dead:
            assert slot in alive
            assert slot not in later
            assert slot not in fixed, "weights, state and inputs stay"
        alive -= set(instruction.dead)
        died += instruction.dead
        unread = alive - later - set(program.output_slots)
        assert not unread, "a value that nothing reads is kept"
    assert len(died) == len(set(died))
    assert alive == set(program.output_slots)


def test_a_value_that_is_written_again_lives_until_its_last_reader() -> None:
    key = VariantKey("decode", 1, 1)
    chain = (
        LinkedCall("layer", ("input.x", "weight.0"), ("value.x",)),
        LinkedCall("layer", ("value.x", "weight.1"), ("value.x",)),
        LinkedCall("layer", ("value.x", "weight.0"), ("value.x", "value.unused")),
    )
    write = LinkedUpdate("kv_write", ("state.s", "value.x"))
    variant = Variant(key, (*chain, write), ("value.x",))
    program = link([variant], stages=STAGES, updates=UPDATES).programs[key]
    dead = [instruction.dead for instruction in decoded(program)]
    assert dead[0] == dead[1] == dead[3] == []
    assert dead[2] == [decoded(program)[2].outputs[1]], "what nobody reads dies at once"


def interpret(linked: Linked, program: LinkedProgram) -> list[object]:
    """Run linked code on symbols: a value is the expression that computed it."""
    table: list[object] = [None] * linked.table_size
    for name, slot in linked.bound.items():
        table[slot] = name
    for name, slot in zip(program.input_names, program.input_slots, strict=True):
        table[slot] = f"input.{name}"
    for instruction in decoded(program):
        arguments = tuple(table[slot] for slot in instruction.inputs)
        assert None not in arguments
        for port, slot in enumerate(instruction.outputs):
            table[slot] = (instruction.target, port, arguments)
        for slot in instruction.dead:
            table[slot] = None
    return [table[slot] for slot in program.output_slots]


def by_name(variant: Variant) -> list[object]:
    """The same on the variant's names, without slots."""
    values: dict[str, object] = {}
    for call in variant.steps:
        if isinstance(call, LinkedUpdate):
            continue
        arguments = tuple(values.get(name, name) for name in call.inputs)
        for port, name in enumerate(call.outputs):
            values[name] = (STAGES[call.artifact], port, arguments)
    return [values[name] for name in variant.outputs]


@st.composite
def random_variants(draw: st.DrawFn) -> list[Variant]:
    def one(index: int) -> Variant:
        known = ["input.a", "input.b", "weight.w", "state.s"]
        calls = []
        for _ in range(draw(st.integers(1, 8))):
            inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
            names = st.sampled_from([f"value.{i}" for i in range(5)])
            outputs = draw(st.lists(names, min_size=1, max_size=2, unique=True))
            calls.append(LinkedCall("layer", tuple(inputs), tuple(outputs)))
            known += [name for name in outputs if name not in known]
        outputs = draw(st.lists(st.sampled_from(known[4:]), min_size=1, unique=True))
        return Variant(VariantKey("decode", index, index), tuple(calls), tuple(outputs))

    return [one(i) for i in range(draw(st.integers(1, 3)))]


@given(random_variants())
def test_linked_code_computes_what_the_names_say(variants: list[Variant]) -> None:
    linked = link(variants, stages=STAGES, updates=UPDATES)
    for variant in variants:
        assert interpret(linked, linked.programs[variant.key]) == by_name(variant)


def test_real_programs_compute_what_their_names_say() -> None:
    variants = real_variants()
    linked = link(variants, stages=STAGES, updates=UPDATES)
    for variant in variants[:: len(variants) // 6]:
        assert interpret(linked, linked.programs[variant.key]) == by_name(variant)


def test_inputs_are_bare_names_and_are_not_bound() -> None:
    linked = link(real_variants(), stages=STAGES, updates=UPDATES)
    assert all(name.startswith(("weight.", "state.")) for name in linked.bound)
    greedy = linked.programs[VariantKey("decode", 1, 1)]
    sampled = linked.programs[VariantKey("decode", 1, 1, "sample", logit_bias=True)]
    assert "token_ids" in greedy.input_names
    extra = set(sampled.input_names) - set(greedy.input_names)
    assert extra == {
        *("temperature", "top_k", "top_p", "min_p", "seed", "output_index"),
        *("bias_ids", "bias_values"),
    }
