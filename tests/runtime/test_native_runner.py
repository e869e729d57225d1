"""The compiled programs against the eager oracle, step by step: logits, picks and logprobs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.tiny import PRESET, VOCAB
from tests.runtime.serving import alone
from trnc import ops
from trnc.compiler.manifest import STAGE_FILE
from trnc.compiler.program import build_program
from trnc.compiler.store import Store
from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
from trnc.engine.messages import Submit
from trnc.models.weights import bind_weights
from trnc.ops import native
from trnc.ops.library import reference_mode
from trnc.runtime.catalog import Catalog
from trnc.runtime.eager_runner import EagerRunner
from trnc.runtime.executor import ProgramExecutor
from trnc.runtime.inputs import Inputs, build_inputs
from trnc.runtime.native_runner import NativeRunner
from trnc.runtime.start import (
    StartOptions,
    load_manifest,
    open_model,
    program_config,
    start_executor,
)
from trnc.runtime.state import allocate_state

GREEDY = SamplingParams()
LOGPROBS = SamplingParams(logprobs=20)
BIASED = SamplingParams(logit_bias=((3, 100.0), (7, 50.0)), logprobs=3)
SEEDED = SamplingParams(temperature=1.3, top_k=90, top_p=0.95, min_p=0.01, seed=2**62 + 5)
TEXT = tuple((i * 37 + 11) % VOCAB for i in range(64))


class Pair:
    """One model in both runners, over equal weights and separate state.

    The compiled variants return `value.logits` after what they return anyway.
    """

    def __init__(self, options: StartOptions) -> None:
        model = open_model(options.model, report=print)
        self.config = program_config(model, options.preset, "inductor")
        store = Store(root=options.store, log=print)
        manifest = load_manifest(self.config, native.detect_target(), store)
        assert manifest is not None
        outspoken = tuple(
            replace(v, outputs=(*v.outputs, "value.logits")) for v in manifest.variants
        )
        folders = {artifact: store.find(artifact) for artifact in manifest.stages}
        weights = dict(
            bind_weights(
                model.weights,
                self.config.model,
                self.config.formats,
                max_context=PRESET.max_context,
            )
        )
        self.catalog = Catalog.of(v.key for v in manifest.variants)
        self.native = NativeRunner(
            manifest=replace(manifest, variants=outspoken),
            stage_paths={a: f"{folder}/{STAGE_FILE}" for a, folder in folders.items()},
            tensors=weights | self._state(),
        )
        self.eager = EagerRunner(config=self.config, tensors=weights | self._state())

    def _state(self) -> dict[str, Tensor]:
        return allocate_state(self.config.model, self.config.preset, num_pages=65)

    def run(self, plan: StepPlan) -> tuple[VariantKey, Inputs, list[Tensor], dict[str, Tensor]]:
        """Return the variant, its inputs, what the compiled one returned, the oracle's values."""
        key = self.catalog.select(plan)
        preset = self.config.preset
        inputs = build_inputs(
            plan,
            key,
            max_pages=preset.max_pages,
            spare_slot=preset.max_rows,
            vocab_size=self.config.model.vocab_size,
        )
        expected = self.eager.evaluate(build_program(self.config, key), inputs)
        return key, inputs, self.native.run(key, inputs), expected


@pytest.fixture
def pair(name: str, request: pytest.FixtureRequest) -> Pair:
    request.getfixturevalue(name)  # compiled, kernels and runner loaded
    return Pair(request.getfixturevalue(f"{name}_options"))


def part(
    slot: int, start: int, count: int, sampling: SamplingParams, *, known: bool = True
) -> SequencePlan:
    """Positions start..start+count-1 of a text of its own, in the pages of its slot."""
    text = TEXT[slot : slot + start + count]
    pages = tuple(range(64 - 8 * slot, 64 - 8 * slot - -(-(start + count) // 16), -1))
    ids = text[start:] if known else None
    return SequencePlan(slot, start, count, ids, pages, True, start, sampling)


def steps(*samplings: SamplingParams) -> list[StepPlan]:
    """Prompts of several lengths in two chunks, then decodes of known and of sampled tokens."""
    counts = [9, 4, 1, 12][: len(samplings)]
    rows = list(enumerate(zip(counts, samplings, strict=True)))
    return [
        StepPlan("prefill", tuple(part(slot, 0, n, s) for slot, (n, s) in rows)),
        StepPlan("prefill", tuple(part(slot, n, 3, s) for slot, (n, s) in rows)),
        StepPlan("decode", tuple(part(slot, n + 3, 1, s) for slot, (n, s) in rows)),
        StepPlan("decode", tuple(part(slot, n + 4, 1, s, known=False) for slot, (n, s) in rows)),
    ]


# Activations of 12 bits differ from the oracle's by more than the order of additions does.
@pytest.mark.parametrize(
    ("name", "atol"),
    [("f32", 1e-4), ("quantized", 5e-2), ("glm4_moe", 1e-2), ("deepseek_v3", 1e-4)],
)
@pytest.mark.parametrize(
    "samplings",
    [
        pytest.param([GREEDY], id="one row"),
        pytest.param([GREEDY] * 4, id="four rows"),
        pytest.param([GREEDY, LOGPROBS, GREEDY], id="logprobs"),
        pytest.param([GREEDY, BIASED], id="logit_bias"),
    ],
)
def test_every_step_gives_the_oracle_s_logits(
    pair: Pair, atol: float, samplings: Sequence[SamplingParams]
) -> None:
    for plan in steps(*samplings):
        key, _, outputs, expected = pair.run(plan)
        used = len(plan.sequences)
        logits = outputs[-1][:used]
        torch.testing.assert_close(logits, expected["value.logits"][:used], atol=atol, rtol=0)
        assert torch.equal(outputs[0][:used], expected["value.tokens"][:used])
        if key.logprobs:
            _, logprob, _, best, _ = outputs
            wanted = expected["value.logprob"], expected["value.top_logprobs"]
            torch.testing.assert_close(logprob[:used], wanted[0][:used], atol=2 * atol, rtol=0)
            torch.testing.assert_close(best[:used], wanted[1][:used], atol=2 * atol, rtol=0)


@pytest.mark.parametrize("name", ["f32", "quantized"])
def test_logit_bias_picks_the_favoured_token_and_leaves_logprobs_raw(pair: Pair) -> None:
    _, _, (tokens, logprob, *_, logits), _ = pair.run(steps(BIASED, GREEDY)[0])
    assert tokens[0] == 3
    assert tokens[1] == logits[1].argmax()
    expected = logits[:2].log_softmax(-1)
    torch.testing.assert_close(logprob[0], expected[0, 3])


def sampling_columns(plan: StepPlan) -> list[Tensor]:
    """The parameters that `ops.sample` takes after the logits, as the plan has them."""
    rows = [s.sampling for s in plan.sequences]
    return [
        torch.tensor([r.temperature for r in rows]),
        torch.tensor([r.top_k for r in rows], dtype=torch.int32),
        torch.tensor([r.top_p for r in rows]),
        torch.tensor([r.min_p for r in rows]),
        torch.tensor([r.seed for r in rows]),
        torch.tensor([s.output_index for s in plan.sequences]),
    ]


@pytest.mark.parametrize("name", ["f32", "quantized"])
@pytest.mark.parametrize("biased", [False, True])
def test_equal_logits_give_the_oracle_s_picks(pair: Pair, biased: bool) -> None:
    bias = BIASED.logit_bias if biased else ()
    rows = [replace(SEEDED, seed=SEEDED.seed + i, logit_bias=bias) for i in range(3)]
    picked = set()
    for plan in steps(*rows, LOGPROBS):
        key, inputs, (tokens, *_, logits), _ = pair.run(plan)
        assert key.logit_bias == biased
        used = len(plan.sequences)
        with reference_mode():
            if biased:
                logits = ops.logit_bias(logits, inputs["bias_ids"], inputs["bias_values"])
            expected = ops.sample(logits[:used], *sampling_columns(plan))
        assert torch.equal(tokens[:used], expected)
        picked |= set(tokens[:3].tolist())
    assert biased or len(picked) > 3


def test_a_text_is_the_oracle_s(f32: ProgramExecutor, f32_options: StartOptions) -> None:
    oracle, _, features = start_executor(
        replace(f32_options, backend="eager", store=Path("/nonexistent")), _never, print
    )
    request = Submit("it", TEXT[:23], LOGPROBS, 12)
    tokens, logprobs, finish = alone(f32, request)
    wanted_tokens, wanted_logprobs, wanted_finish = alone(oracle, request)
    oracle.close()
    assert (tokens, finish) == (wanted_tokens, wanted_finish)
    for got, wanted in zip(logprobs, wanted_logprobs, strict=True):
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-3)
        assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=1e-3)
    assert features == ("logprobs", "logit_bias")


def _never(*_: object) -> None:
    pytest.fail("the eager backend compiles nothing")


@pytest.mark.parametrize("name", ["quantized"])
def test_the_writes_to_the_state_and_the_check_of_drafts_are_those_of_the_references(
    pair: Pair,
) -> None:
    pick = torch.Generator().manual_seed(4)
    sampled = torch.randint(0, 9, (24,), generator=pick)
    drafted = torch.where(torch.arange(24) % 8 == 3, 9, sampled.roll(1))  # all right but three
    sequences = torch.tensor([[4 * r, r % 5, 7] for r in range(6)], dtype=torch.int32)
    hidden, rows = torch.randn(24, 8, generator=pick), torch.tensor([3, 1, 20])
    results = []
    for operators in (contextlib.nullcontext(), reference_mode()):
        states = torch.zeros(5, 8)
        with operators:
            accepted, last = ops.accept_drafts(sampled, drafted, sequences)
            ops.store_states(states, torch.tensor([4, 0, 2]), hidden, rows)
        results.append((accepted, last, states))
    for native_result, reference in zip(*results, strict=True):
        assert torch.equal(native_result, reference)
    assert results[0][0].tolist() == [0, 0, 1, 2, 2, 0]
