"""The eager step functions compute what transformers computes, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.models.tiny import DENSE_FAMILIES, FAMILIES, PRESET, VOCAB, tiny_model
from trnc.checkpoint.source import DEFAULT_MODEL
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import ProgramConfig, build_program
from trnc.core import SamplingParams, SequencePlan, StepPlan
from trnc.models.rope import rope_tables
from trnc.models.weights import bind_weights
from trnc.presets import Preset
from trnc.runtime.catalog import Catalog
from trnc.runtime.eager_runner import EagerRunner
from trnc.runtime.inputs import build_inputs
from trnc.runtime.start import Model, open_model, program_config
from trnc.runtime.state import allocate_state

Family = tuple[PreTrainedModel, Model]
PROMPT = torch.randint(0, VOCAB, (41,), generator=torch.Generator().manual_seed(1)).tolist()


class Oracle:
    """Logits of one sequence on pages in no particular order, from the eager runner."""

    def __init__(self, model: Model, preset: Preset, *, dtype: torch.dtype = torch.float32) -> None:
        self.config = program_config(model, preset, "eager")
        if dtype == torch.float64:
            exact = replace(self.config.preset, kv_dtype="float64")  # type: ignore[arg-type]
            self.config = replace(self.config, preset=exact)
        self._catalog = Catalog.of(variant_matrix(preset))
        self._pages = tuple(range(self.config.preset.max_pages, 0, -1))
        self._runner = EagerRunner(
            config=self.config, tensors=_tensors(model, self.config), dtype=dtype
        )

    def logits(self, tokens: Sequence[int], start: int) -> Tensor:
        """Compute `tokens` at positions `start..`; return the logits [V] after the last one."""
        preset = self.config.preset
        pages = self._pages[: -(-(start + len(tokens)) // preset.page_size)]
        sequence = SequencePlan(
            0, start, len(tokens), tuple(tokens), pages, True, 0, SamplingParams()
        )
        plan = StepPlan("prefill" if len(tokens) > 1 else "decode", (sequence,))
        key = self._catalog.select(plan)
        inputs = build_inputs(
            plan,
            key,
            max_pages=preset.max_pages,
            spare_slot=preset.max_rows,
            vocab_size=self.config.model.vocab_size,
        )
        program = build_program(self.config, key)
        return self._runner.evaluate(program, inputs)["value.logits"][0]


def _tensors(model: Model, config: ProgramConfig) -> dict[str, Tensor]:
    preset = config.preset
    with torch.inference_mode():
        weights = bind_weights(
            model.weights, config.model, config.formats, max_context=preset.max_context
        )
        return dict(weights) | allocate_state(config.model, preset, num_pages=preset.max_pages + 1)


def check(
    oracle: Oracle, reference: PreTrainedModel, chunks: Sequence[int], *, atol: float
) -> None:
    """Feed PROMPT in chunks; the logits at the end of each are those of the whole sequence."""
    assert sum(chunks) == len(PROMPT)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    start = 0
    for count in chunks:
        logits = oracle.logits(PROMPT[start : start + count], start)
        start += count
        assert logits.dtype == expected.dtype
        torch.testing.assert_close(logits, expected[start - 1], atol=atol, rtol=0)


CHUNKS = pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([32, 9], id="large chunks"),
        pytest.param([5, 16, 2, 8, 10], id="small chunks"),
        pytest.param([20] + [1] * 21, id="a prompt, then decode"),
    ],
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    reference = tiny_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, open_model(str(folder), report=lambda line: None)


@CHUNKS
def test_fp32_logits_are_those_of_transformers(family: Family, chunks: list[int]) -> None:
    reference, model = family
    check(Oracle(model, PRESET), reference, chunks, atol=1e-4)


def test_a_whole_prompt_in_one_chunk(family: Family) -> None:
    reference, model = family
    check(Oracle(model, replace(PRESET, prefill_tokens=(64,))), reference, [41], atol=1e-4)


@CHUNKS
@pytest.mark.parametrize("family", DENSE_FAMILIES, indirect=True)  # routers compute in f32
def test_fp64_logits_are_those_of_transformers_in_float64(
    family: Family, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = family
    exact = type(reference)(reference.config).double().eval()
    exact.load_state_dict(reference.double().state_dict())
    reference.float()
    _compute_in_float64(exact, model, monkeypatch)
    check(Oracle(model, PRESET, dtype=torch.float64), exact, chunks, atol=1e-10)


def _compute_in_float64(
    reference: PreTrainedModel, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undo what transformers rounds to f32 whatever its dtype: norms and rotary tables."""

    def norm(self: torch.nn.Module, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor)
        mean = x.square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))

    def rotary(self: torch.nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        tables = rope_tables(model.config.rope, PRESET.max_context)
        return tuple(torch.cat([t, t], -1)[position_ids].double() for t in tables)

    for module in reference.modules():
        kind = type(module)
        if kind.__name__.endswith("RMSNorm"):
            monkeypatch.setattr(kind, "forward", norm)
        elif kind.__name__.endswith("RotaryEmbedding"):
            monkeypatch.setattr(kind, "forward", rotary)


@pytest.mark.slow
def test_the_default_model_is_llama_with_its_own_dequantized_weights() -> None:
    model = open_model(DEFAULT_MODEL, report=lambda line: None)
    preset = replace(PRESET, max_context=256)
    check(Oracle(model, preset), _as_transformers(model), [32, 8, 1], atol=1e-4)


def _as_transformers(model: Model) -> LlamaForCausalLM:
    shape, weights = model.config, model.weights
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            rms_norm_eps=shape.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
            tie_word_embeddings=shape.tie_embeddings,
        )
    ).eval()
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    state = {"model.embed_tokens.weight": weights.matrix("embed").dequantize()}
    state["model.norm.weight"] = weights.vector("norm")
    for i in range(shape.num_layers):
        prefix, ours = f"model.layers.{i}.", f"layers.{i}."
        state[f"{prefix}input_layernorm.weight"] = weights.vector(f"{ours}attn_norm")
        state[f"{prefix}post_attention_layernorm.weight"] = weights.vector(f"{ours}mlp_norm")
        for name, theirs in names.items():
            state[f"{prefix}{theirs}.weight"] = weights.matrix(ours + name).dequantize()
    reference.load_state_dict(state, strict=False)
    reference.tie_weights()
    return reference
