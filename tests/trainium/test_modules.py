"""Modules: the same bytes everywhere, stages as functions, state in place; and what cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainium import module_bytes
from tests.trainium.serving import SMALL
from tests.trainium.tiny_plans import TRN2, config_of, plan_of
from tests.trainium.whole import lower_whole
from trnc.compiler.backends.stablehlo.build import (
    HLO_FILE,
    Plan,
    build_modules,
    load_modules,
    manifest_key,
    write_module,
)
from trnc.compiler.backends.stablehlo.check import check_modules
from trnc.compiler.backends.stablehlo.graph import read_graph, stage_function
from trnc.compiler.backends.stablehlo.mlir import split_functions
from trnc.compiler.backends.stablehlo.module import Module, hlo_proto
from trnc.compiler.backends.stablehlo.parallel import local_model, row_indexes, split_of
from trnc.compiler.backends.stablehlo.site import Site
from trnc.compiler.backends.stablehlo.table import TABLE
from trnc.compiler.backends.stablehlo.targets import NeuronTarget
from trnc.compiler.store import Store
from trnc.core import VariantKey
from trnc.errors import CompileError, ConfigError
from trnc.models.config import ModelConfig
from trnc.presets import TrainiumOptions

ROOT = Path(__file__).parents[2]
PRESET = replace(SMALL, logprobs=True, logit_bias=True)
DECODE = VariantKey("decode", 4, 4, "sample", True, True, context=80)
PREFILL = VariantKey("prefill", 16, 4, context=80)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(config_of("llama", PRESET))


@pytest.fixture(scope="module")
def decode(plan: Plan) -> Module:
    return plan.lower(DECODE)


@pytest.fixture(scope="module")
def prefill(plan: Plan) -> Module:
    return plan.lower(PREFILL)


def test_each_stage_is_one_function_called_for_each_layer(decode):
    functions = re.findall(r"func\.func private @(\w+)\(", decode.text)
    main = decode.text.split("func.func private")[0]
    for stage in ("embed", "layer", "head", "logit_bias", "sample", "logprobs", "kv_write"):
        assert functions.count(stage) == 1
    assert main.count("call @layer(") == main.count("call @kv_write(") == 2
    # Beside calls, the step itself computes nothing.
    assert set(re.findall(r"^ +%\S+ = (\S+)", main, re.MULTILINE)) == {"call"}
    assert sorted(functions) == sorted(
        ["embed", "layer", "head", "logit_bias", "sample", "logprobs", "kv_write", "store_tokens"]
    )


def test_state_is_donated_and_aliased(decode):
    interface = decode.interface
    state = [p.name for p in interface.parameters if p.name.startswith("state.")]
    aliased = {interface.parameters[p].name: interface.results[r] for r, p in interface.aliases}
    assert aliased == {name: name for name in state}
    assert decode.text.count("tf.aliasing_output") == len(state) == 5
    proto = hlo_proto(decode.text)
    from jax._src.lib import _jax

    text = _jax.HloModule.from_serialized_hlo_module_proto(proto).to_string()
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}, may-alias\)", text.splitlines()[0])
    assert {(int(r), int(p)) for r, p in pairs} == set(interface.aliases)


def test_the_bytes_are_the_same_in_another_process_folder_order_and_hash_seed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1234"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainium.module_bytes"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    here = module_bytes.digests(module_bytes.STEPS[::-1])
    assert done.stdout.splitlines() == here[::-1]


def test_steps_of_equal_shapes_have_functions_of_their_own():
    """A decode of 4 rows, a prefill of 4 tokens: attention may see one row of a sequence, or 4."""
    plan = plan_of(config_of("llama", replace(PRESET, prefill_tokens=(4,))))
    keys = (DECODE, replace(PREFILL, tokens=4))
    modules = [plan.lower(key) for key in keys]
    for key, module in zip(keys, modules, strict=True):
        assert module.text == lower_whole(plan.lowering(key), module)
    shared = set.intersection(*(set(split_functions(module.text)) for module in modules))
    names = {re.findall(r"@(\w+)", function)[0] for function in shared}
    assert "embed" in names
    assert "layer" not in names


def test_the_text_says_nothing_of_where_it_was_made(decode):
    assert not re.search(r"loc\(|\.py|jax\.result_info = \"[^r]", decode.text)
    assert str(ROOT) not in decode.text


def test_a_clean_bill_and_a_core_that_is_too_small(decode, prefill):
    modules = {DECODE: decode, PREFILL: prefill}
    checked = check_modules(modules.items(), TRN2, 2)
    assert checked.found == ()
    need = checked.needs["decode"]
    weights = [p for p in decode.interface.parameters if p.name.startswith("weight.")]
    assert need.weights == sum(p.size for p in weights) > 4 * 2 * 64 * (64 * 2 + 96 * 3)
    small = NeuronTarget("small", need.total // 2 + 1, (1, 2))
    errors = check_modules(modules.items(), small, 1).errors
    assert [f.rule for f in errors] == ["memory"]
    assert "kv_memory_mib" in errors[0].message


def test_an_op_without_a_row_names_itself_and_its_stage():
    text = (
        "trnc-graph 1\n# torch 2.13.0\ninput $0: f32[s0, 4]\n"
        "%0: f32[s0, 4] = aten.erfinv.default($0)\noutput %0\n"
    )
    with pytest.raises(CompileError, match=r"stage 'odd'.*no lowering for aten\.erfinv\.default"):
        stage_function(read_graph("odd", text), TABLE)


def test_sizes_that_do_not_agree_are_told():
    text = (
        "trnc-graph 1\n# torch 2.13.0\ninput $0: f32[s0, 4]\ninput $1: f32[s0]\n"
        "%0: f32[s0, 4] = aten.mul.Tensor($0, 2.0)\noutput %0\noutput $1\n"
    )
    run = stage_function(read_graph("pair", text), TABLE)
    doubled, other = run(Site(1), [jnp.ones((3, 4)), jnp.ones(3)])
    assert float(doubled.sum()) == 24
    assert other.shape == (3,)
    with pytest.raises(CompileError, match=r"stage 'pair': input 1 is f32\[s0\], where s0 is 3"):
        run(Site(1), [jnp.ones((3, 4)), jnp.ones(2)])


def test_the_store_has_the_modules_and_the_manifest_finds_them(plan, tmp_path):
    config = config_of("llama", PRESET)
    few = replace(plan, programs=dict(list(plan.programs.items())[:2]))
    store = Store(root=tmp_path, log=print)
    manifest = build_modules(few, store, report=lambda *_: None)
    built = store.builds
    assert built == 3
    assert build_modules(few, store, report=lambda *_: None) == manifest
    assert store.builds == built
    loaded = load_modules(config, TRN2, store)
    assert loaded is not None
    assert {k: m.text for k, m in loaded[1].items()} == {k: few.lower(k).text for k in few.programs}
    other = replace(config, preset=replace(PRESET, trainium=TrainiumOptions(lnc=1)))
    assert manifest_key(other, TRN2) != manifest_key(config, TRN2)
    (tmp_path / "out").mkdir()
    write_module(next(iter(loaded[1].values())), tmp_path / "out")
    assert (tmp_path / "out" / HLO_FILE).stat().st_size > 1000


def test_the_key_of_a_module_knows_the_drafts_of_the_state(plan):
    """One decode, and as many positions: but of the last tokens there are more."""

    def keyed(context: int, depth: int) -> str:
        preset = replace(PRESET, max_context=context, mtp_depths=(depth,))
        return replace(plan, config=replace(plan.config, preset=preset)).key(DECODE).id

    assert keyed(79, 1) != keyed(78, 2)
    assert keyed(79, 1) == keyed(79, 1)


# Dividing a model


def glm(**changes: object) -> ModelConfig:
    return replace(config_of("glm4_moe", PRESET).model, **changes)  # type: ignore[arg-type]


def test_what_cannot_be_divided_is_named():
    for ranks, said in ((3, "heads, 4"), (16, "heads, 4")):
        with pytest.raises(ConfigError, match=f"ranks = {ranks}: the model's {said}"):
            local_model(glm(), ranks)
    with pytest.raises(ConfigError, match="ranks = 2: 3 KV heads"):
        local_model(glm(num_heads=6, num_kv_heads=3), 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_row_has_its_rank(ranks):
    model = glm()
    for name in (
        "weight.layers.0.qkv",
        "weight.layers.0.gate_up",
        "weight.layers.1.shared_gate_up",
    ):
        split = split_of(name, model)
        assert split.kind == "rows"
        rows = np.concatenate([row_indexes(split, rank, ranks) for rank in range(ranks)])
        total = sum(section.rows for section in split.sections)
        assert sorted(set(rows.tolist())) == list(range(total))
        shared = sum(s.rows * max(1, ranks // s.parts) for s in split.sections)
        assert len(rows) == shared
    kinds = {
        "weight.embed": "vocabulary",
        "weight.layers.1.gate_up": "stack",
        "weight.layers.1.down": "stack",
        "weight.layers.0.down": "columns",
        "weight.layers.1.shared_down": "columns",
        "weight.layers.1.o": "columns",
        "weight.layers.1.router": "none",
        "weight.layers.1.attn_norm": "none",
    }
    assert {name: split_of(name, model).kind for name in kinds} == kinds


def test_collectives_name_their_ranks():
    preset = replace(SMALL, trainium=TrainiumOptions(ranks=4))
    plan = plan_of(config_of("glm4_moe", preset))
    module = plan.lower(PREFILL)
    assert module.text == lower_whole(plan.lowering(PREFILL), module)
    groups = re.findall(r"replica_groups = (dense<\[\[.*?\]\]>)", module.text)
    assert set(groups) == {"dense<[[0, 1, 2, 3]]>"}
    layer = module.text.split("func.func private @moe_layer(")[1].split("func.func private")[0]
    # One sum after attention, and one for routed and shared experts together.
    assert layer.count("all_reduce") == 2
    assert module.text.count('"stablehlo.all_gather"') == 1
    assert ("rank", "int32", (1,)) in {
        (p.name, p.dtype, p.shape) for p in module.interface.parameters
    }


# Imports


def test_nothing_imports_jax_before_it_is_asked_for():
    script = (
        "import sys\n"
        "import trnc.cli.main, trnc.cli.compile_command, trnc.cli.engine_command\n"
        "import trnc.cli.trainium_command, trnc.runtime.start, trnc.compiler.compile\n"
        "import trnc.compiler.backends.stablehlo.bundle\n"
        "assert 'jax' not in sys.modules, 'jax is imported'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_without_jax_the_extra_is_named(monkeypatch):
    from trnc.compiler.backends import stablehlo

    monkeypatch.setattr(stablehlo, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--backend trainium needs jax.*trnc\[trainium\]"):
        stablehlo.require_jax("--backend trainium")
