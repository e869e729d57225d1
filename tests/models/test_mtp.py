"""The MTP layer of each family is the one of transformers, and is checked when it is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.models.mtp_folder import LAYERS, PREFIX, rewrite, write_checkpoint
from tests.models.tiny import FAMILIES_WITH_EXPERTS, PRESET, VOCAB, tiny_model
from trnc.compiler.canonical import canonical_text
from trnc.compiler.program import (
    Program,
    build_program,
    cache_update,
    mtp_calls,
)
from trnc.compiler.trace import trace_stage
from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
from trnc.engine.messages import Submit
from trnc.engine.scheduler import Scheduler
from trnc.errors import CheckpointError
from trnc.models.weights import bind_weights
from trnc.runtime.eager_runner import EagerRunner
from trnc.runtime.inputs import Inputs, build_inputs
from trnc.runtime.start import (
    Model,
    StartOptions,
    open_model,
    program_config,
    require_cache,
    start_executor,
)
from trnc.runtime.state import allocate_state

TOKENS = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(2)).tolist()
SPECULATING = replace(PRESET, mtp_depths=(1,))
FAMILIES = pytest.mark.parametrize("family", FAMILIES_WITH_EXPERTS)


@dataclass(eq=False)
class Drafter:
    """Runs the target and its MTP layer eagerly on one sequence."""

    model: Model

    def __post_init__(self) -> None:
        self.config = program_config(self.model, SPECULATING, "eager")
        self.key = VariantKey("prefill", 32, 1)
        with torch.inference_mode():
            weights = bind_weights(
                self.model.weights,
                self.config.model,
                self.config.formats,
                max_context=PRESET.max_context,
            )
            state = allocate_state(self.config.model, self.config.preset, num_pages=4)
            self.runner = EagerRunner(config=self.config, tensors=dict(weights) | state)

    def inputs(self, tokens: list[int], start: int) -> Inputs:
        pages = (3, 1)[: -(-(start + len(tokens)) // PRESET.page_size)]
        sequence = SequencePlan(
            0, start, len(tokens), tuple(tokens), pages, True, 0, SamplingParams()
        )
        plan = StepPlan("prefill", (sequence,))
        return build_inputs(
            plan,
            self.key,
            max_pages=SPECULATING.max_pages,
            spare_slot=PRESET.max_rows,
            vocab_size=self.config.model.vocab_size,
            speculates=True,
        )

    def states(self, tokens: list[int], start: int) -> Tensor:
        """The target's states after its last norm [n, H]."""
        program = build_program(self.config, self.key)
        values = self.runner.evaluate(program, self.inputs(tokens, start))
        return values["value.states"][: len(tokens)]

    def draft(self, tokens: list[int], states: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """One pass of the MTP layer: the last row's state [1, H] and logits [V]."""
        calls = tuple(mtp_calls(self.config, self.key))
        update = cache_update(self.config, self.config.model.num_layers)
        previous = torch.zeros(self.key.tokens, states.shape[1])
        previous[: len(tokens)] = states
        inputs = self.inputs(tokens, start) | {"previous": previous}
        values = self.runner.evaluate(Program((*calls, update), ()), inputs)
        return values["value.states"], values["value.logits"][0]


@FAMILIES
def test_drafts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference, mtp = write_checkpoint(family, tmp_path)
    drafter = Drafter(open_model(str(tmp_path), report=lambda line: None))
    cache = MtpCache(config=reference.config.get_mtp_config())
    hidden = reference.model(torch.tensor([TOKENS])).last_hidden_state
    for start, end in ((0, 13), (13, 14), (14, 25)):
        states = drafter.states(TOKENS[start:end], start)
        torch.testing.assert_close(states, hidden[0, start:end], atol=1e-4, rtol=0)
        chunk = TOKENS[start + 1 : end + 1]
        _, logits = drafter.draft(chunk, states, start)
        wanted = mtp.forward_layer(
            0,
            hidden[:, start:end],
            torch.arange(start + 1, end + 1)[None],
            cache,
            input_ids=torch.tensor([chunk]),
        )
        torch.testing.assert_close(logits, mtp.shared_head(wanted)[0, -1], atol=1e-4, rtol=0)


@FAMILIES
def test_a_second_draft_starts_from_the_state_after_the_norm(family: str, tmp_path: Path) -> None:
    reference, mtp = write_checkpoint(family, tmp_path)
    drafter = Drafter(open_model(str(tmp_path), report=lambda line: None))
    cache = MtpCache(config=reference.config.get_mtp_config())
    states = drafter.states(TOKENS[:10], 0)
    wanted = states[None]
    for start, chunk in ((0, TOKENS[1:11]), (10, TOKENS[11:12]), (11, TOKENS[12:13])):
        end = start + len(chunk)
        states, logits = drafter.draft(chunk, states, start)
        positions = torch.arange(start + 1, end + 1)[None]
        wanted = mtp.forward_layer(0, wanted, positions, cache, input_ids=torch.tensor([chunk]))[
            :, -1:
        ]
        torch.testing.assert_close(states, wanted[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, mtp.shared_head(wanted)[0, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "mlp.experts.7.up_proj.weight",
        "mlp.gate.e_score_correction_bias",
    ],
)
def test_a_missing_mtp_weight_is_named(name: str, tmp_path: Path) -> None:
    write_checkpoint("glm4_moe", tmp_path)
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != PREFIX + name})
    with pytest.raises(CheckpointError, match=re.escape(f"are missing: {PREFIX}{name}. ")):
        open_model(str(tmp_path), report=lambda line: None)


def test_copies_of_embedding_and_head_may_be_left_out(tmp_path: Path) -> None:
    write_checkpoint("glm4_moe", tmp_path)
    copies = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}shared_head.head.weight")
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k not in copies})
    assert open_model(str(tmp_path), report=lambda line: None).config.mtp_layers == 1


def test_names_are_matched_whole(tmp_path: Path) -> None:
    """`layers.13.` ends like the MTP layer's `layers.3.`, but is none of this model's."""
    write_checkpoint("glm4_moe", tmp_path)
    rewrite(
        tmp_path, lambda tensors: tensors | {"model.layers.13.embed_tokens.weight": torch.ones(1)}
    )
    with pytest.raises(CheckpointError, match=r"'model\.layers\.13\.embed_tokens\.weight'"):
        open_model(str(tmp_path), report=lambda line: None)


def test_a_checkpoint_without_mtp_says_how_to_do_without(tmp_path: Path) -> None:
    tiny_model("deepseek_v3", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="set 'num_nextn_predict_layers' to 0"):
        open_model(str(tmp_path), report=lambda line: None)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(str(tmp_path), report=lambda line: None).config.mtp_layers == 0


@FAMILIES
def test_every_stage_of_a_draft_can_be_traced(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    model = open_model(str(tmp_path), report=lambda line: None)
    config = program_config(model, SPECULATING, "inductor")
    keys = (VariantKey("draft", 4, 4, depth=2), VariantKey("verify", 12, 4, depth=2))
    draft, verify = (build_program(config, key) for key in keys)
    specs = dict.fromkeys(call.stage for call in (*draft.calls, *verify.calls[LAYERS + 2 :]))
    traced = {spec.kind: canonical_text(trace_stage(spec)) for spec in specs}
    own = ["draft_begin", "mtp_embed", "moe_layer", "mtp_head", "greedy", "draft_next"]
    assert list(traced) == [*own, "accept", "mtp_cache"]
    layer = verify.calls[LAYERS].stage
    assert traced["moe_layer"] == canonical_text(trace_stage(layer)), "shared with the model's own"


def test_without_drafts_the_mtp_layer_takes_no_memory(tmp_path: Path) -> None:
    write_checkpoint("deepseek_v3", tmp_path)
    model = open_model(str(tmp_path), report=lambda line: None)
    config = program_config(model, PRESET, "inductor")
    assert model.config.mtp_layers == 1
    assert config.model.mtp_layers == 0
    assert len(config.formats.layers) == LAYERS
    state = allocate_state(config.model, config.preset, num_pages=2)
    assert f"state.latent_pages.{LAYERS - 1}" in state
    assert f"state.latent_pages.{LAYERS}" not in state


@FAMILIES
def test_every_draft_of_a_served_text_is_the_one_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """The layer's keys have no gap and stand at their places, whatever was accepted before."""
    reference, mtp = write_checkpoint(family, tmp_path)
    preset = replace(PRESET, mtp_depths=(3,), mtp_always=True)
    executor, *_ = start_executor(
        StartOptions(str(tmp_path), preset, "eager", tmp_path / "store"), require_cache, print
    )
    served, drafts = TOKENS[:21], []
    scheduler = Scheduler(info=replace(executor.info, max_prefill_tokens=8))
    scheduler.submit(Submit("it", tuple(served), SamplingParams(), 24))
    while (plan := scheduler.plan()) is not None:
        if plan.step == "verify":  # some of the drafts shall be accepted
            (row,) = plan.sequences
            named = (served[-1], *truth(reference, served, len(served) % 4))[: row.count]
            result = executor.submit(replace(plan, sequences=(replace(row, token_ids=named),)))
        else:
            result = executor.submit(plan)
        if plan.step == "draft":
            drafts.append((list(served), list(result.result().tokens[0])))
        for delta in scheduler.commit(plan, result.result()):
            served += delta.token_ids
    assert len(drafts) > 5
    for text, drafted in drafts:
        assert drafted == reference_drafts(reference, mtp, text, len(drafted))


def truth(reference: PreTrainedModel, text: list[int], count: int) -> list[int]:
    """The next `count` tokens of the target, greedily."""
    tokens = list(text)
    for _ in range(count):
        tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(text) :]


def reference_drafts(
    reference: PreTrainedModel, mtp: MtpModel, text: list[int], depth: int
) -> list[int]:
    """What the MTP layer of transformers drafts after a text, from an empty cache."""
    cache = MtpCache(config=reference.config.get_mtp_config())
    states = reference.model(torch.tensor([text[:-1]])).last_hidden_state
    start, chunk, drafts = 1, text[1:], []
    for _ in range(depth):
        positions = torch.arange(start, start + len(chunk))[None]
        states = mtp.forward_layer(0, states, positions, cache, input_ids=torch.tensor([chunk]))
        states = states[:, -1:]
        drafts.append(int(mtp.shared_head(states)[0, -1].argmax()))
        start, chunk = start + len(chunk), drafts[-1:]
    return drafts
