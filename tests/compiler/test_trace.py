"""Digests of the real stages: what changes one, and above all what does not."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

import trnc
from tests.models.tiny import PRESET
from trnc.compiler.canonical import canonical_text, digest
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import ProgramConfig, build_program, distinct_specs
from trnc.compiler.texts import stage_texts
from trnc.compiler.trace import trace_stage
from trnc.models.config import ModelConfig, RopeConfig
from trnc.models.stage import LayerFormats, StageSpec, WeightFormats

LAYER = LayerFormats(qkv="i4g32", o="i4g32", gate_up="i8g32", down="f32")
FORMATS = WeightFormats(embed="i8g32", head="i8g32", layers=(LAYER, LAYER))
MODEL = ModelConfig(
    architecture="llama",
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-5,
    rope=RopeConfig(theta=10000.0, dim=16),
    qk_norm=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    tie_embeddings=True,
    max_position=256,
)
CONFIG = ProgramConfig(model=MODEL, formats=FORMATS, preset=PRESET)
SAMPLING = {"logit_bias", "greedy", "sample", "logprobs"}
ALL = {"embed", "layer", "head"} | SAMPLING

Digests = dict[str, str]


@cache
def traced(spec: StageSpec) -> str:
    return digest(canonical_text(trace_stage(spec)))


def digests(config: ProgramConfig) -> Digests:
    """The digest of every distinct stage by its kind."""
    specs = distinct_specs(build_program(config, key) for key in variant_matrix(config.preset))
    kinds = [spec.kind for spec in specs]
    assert len(kinds) == len(set(kinds)), "buckets share their stages"
    return {spec.kind: traced(spec) for spec in specs}


def changed(before: Digests, after: Digests) -> set[str]:
    assert before.keys() == after.keys()
    return {kind for kind in before if before[kind] != after[kind]}


@pytest.fixture(scope="module")
def base() -> Digests:
    return digests(CONFIG)


def test_the_order_of_tracing_changes_nothing(base: Digests) -> None:
    assert set(base) == ALL
    specs = distinct_specs(build_program(CONFIG, key) for key in variant_matrix(PRESET))
    again = {spec.kind: digest(canonical_text(trace_stage(spec))) for spec in reversed(specs)}
    assert again == base


def test_parallel_processes_trace_the_same_texts(base: Digests) -> None:
    specs = distinct_specs(build_program(CONFIG, key) for key in variant_matrix(PRESET))
    few = [spec for spec in specs if spec.kind in ("greedy", "sample")]
    found = stage_texts([*few, *few], workers=2)
    assert {spec.kind: text.digest for spec, text in found.items()} == {
        kind: base[kind] for kind in ("greedy", "sample")
    }
    assert all(
        "models/sampling.py" in source for t in found.values() for source in t.sources.values()
    )


def with_model(**changes: object) -> ProgramConfig:
    return replace(CONFIG, model=replace(MODEL, **changes))  # type: ignore[arg-type]


def with_layer(**changes: str) -> ProgramConfig:
    layer = replace(LAYER, **changes)
    return replace(CONFIG, formats=replace(FORMATS, layers=(layer, layer)))


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        pytest.param(with_model(rms_eps=1e-6), {"layer", "head"}, id="rms_eps"),
        pytest.param(with_layer(down="bf16"), {"layer"}, id="format of down"),
        pytest.param(
            replace(CONFIG, preset=replace(PRESET, kv_dtype="float32")), {"layer"}, id="kv_dtype"
        ),
        pytest.param(
            replace(CONFIG, formats=replace(FORMATS, head="f32")), {"head"}, id="format of head"
        ),
        pytest.param(with_model(vocab_size=232), {"embed", "head", *SAMPLING}, id="vocab_size"),
        pytest.param(with_model(qk_norm=False), {"layer"}, id="qk_norm"),
        pytest.param(
            replace(
                with_model(
                    rope=RopeConfig(5e5, 16, "linear", 2.0), max_position=4096, num_layers=5
                ),
                formats=replace(FORMATS, layers=(LAYER,) * 5),
            ),
            set(),
            id="rope (its tables are inputs), the context and the number of layers",
        ),
        pytest.param(
            replace(CONFIG, preset=replace(PRESET, decode_rows=(1, 3), max_context=64)),
            set(),
            id="buckets: they share symbolic stages",
        ),
    ],
)
def test_a_change_of_one_number_changes_exactly_the_stages_that_hold_it(
    base: Digests, config: ProgramConfig, stages: set[str]
) -> None:
    assert changed(base, digests(config)) == stages


# Edits of the sources, in a copy of the package

SCRIPT = """
import json, msgspec, sys, trnc
from trnc.compiler.canonical import canonical_text, digest
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import ProgramConfig, build_program, distinct_specs
from trnc.compiler.trace import trace_stage

config = msgspec.json.decode(sys.stdin.read(), type=ProgramConfig)
programs = (build_program(config, key) for key in variant_matrix(config.preset))
result = {spec.kind: digest(canonical_text(trace_stage(spec))) for spec in distinct_specs(programs)}
print(json.dumps([trnc.__file__, result]))
"""


def digests_of_edited(folder: Path, edit: Callable[[str], str]) -> Digests:
    """Edit models/llama.py in a copy, and trace there: another process, folder and hash seed."""
    package = folder / "trnc"
    shutil.copytree(Path(trnc.__file__).parent, package)
    source = package / "models" / "llama.py"
    text = source.read_text()
    edited = edit(text)
    assert edited != text
    source.write_text(edited)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        input=json.dumps(asdict(CONFIG)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, result = json.loads(done.stdout)
    assert Path(where).parent == package
    return dict(result)


def cosmetic(text: str) -> str:
    """Reverse the functions of the file, rename locals, add comments and blank lines."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    sources = [ast.get_source_segment(text, node) or "" for node in functions]
    head = text[: text.index(sources[0])]
    moved = head + "\n\n# moved\n\n\n".join(reversed(sources)) + "\n"
    for name in ("normed", "fused", "attended", "wide", "narrow", "sampled"):
        moved = re.sub(rf"\b{name}\b", f"{name}_under_another_name", moved)
    return re.sub(r"(?m)^(    +)(q = |hidden = )", r"\1# a comment\n\n\1\2", moved)


def test_moving_functions_renaming_locals_and_comments_change_no_digest(
    base: Digests, tmp_path: Path
) -> None:
    assert changed(base, digests_of_edited(tmp_path, cosmetic)) == set()


def test_another_attention_scale_changes_the_layer_and_nothing_else(
    base: Digests, tmp_path: Path
) -> None:
    def edit(text: str) -> str:
        return text.replace("model.head_dim**-0.5", "model.head_dim**-0.25")

    assert changed(base, digests_of_edited(tmp_path, edit)) == {"layer"}
