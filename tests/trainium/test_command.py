"""`trnc compile --backend trainium`, as a person runs it."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from tests.checkpoint.files import gguf_tensors, shape_metadata, tiny_model, write_gguf
from tests.cli.command import trnc
from tests.trainium.test_neuron import SCRIPT
from tests.trainium.tiny_plans import TRACED
from trnc.cli.trainium_command import TrainiumArguments, run_trainium
from trnc.compiler.backends.stablehlo import build, bundle, neuron
from trnc.errors import CompileError, ConfigError

TOML = """
description = "Little"
decode_rows = [1]
prefill_tokens = [16]
max_context = 64
kv_memory_mib = 1
logprobs = false
logit_bias = false
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> TrainiumArguments:
    folder = tmp_path_factory.mktemp("trainium")
    tensors = gguf_tensors(tiny_model("mistral"), "llama")
    metadata = shape_metadata(**{"attention.key_length": 32, "attention.value_length": 32})
    model = write_gguf(folder / "tiny.gguf", metadata=metadata, tensors=tensors)
    (folder / "little.toml").write_text(TOML)
    return TrainiumArguments(
        model=str(model),
        preset=str(folder / "little.toml"),
        target="trn2",
        store=folder / "store",
        jobs=1,
        dry_run=False,
        bundle=None,
    )


@pytest.fixture(autouse=True)
def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process share what they trace."""
    monkeypatch.setattr(build, "plan_modules", partial(build.plan_modules, known=TRACED))


def run(arguments: TrainiumArguments) -> str:
    """Run the command in this process, and return what it prints."""
    out = io.StringIO()
    run_trainium(arguments, finish=None, console=Console(file=out, width=100))
    return out.getvalue()


def test_a_bundle_without_a_compiler_and_modules_with_one(arguments, tmp_path, monkeypatch):
    given = (arguments.model, "--preset", arguments.preset, "--store", arguments.store)
    command = ("compile", "--backend", "trainium", "--model", *given)
    ran = trnc(*command, "--bundle", tmp_path / "bundle", PATH="/usr/bin:/bin")
    assert ran.status == 0, ran.err
    assert "Preset little for trn2: 4 variants, 1 rank(s), contexts 64" in ran.out
    assert "In the store: 0 modules. To lower: 4." in ran.out
    assert "The Neuron rules find nothing." in ran.out
    assert "Memory of one core" in ran.out
    assert f"trnc compile --finish {tmp_path / 'bundle'}" in " ".join(ran.out.split())
    entries = bundle.read_bundle(tmp_path / "bundle").entries
    assert [str(entry.variant) for entry in entries] == [
        *("decode-1@64/greedy", "decode-1@64/sample"),
        *("prefill-16x1@64/greedy", "prefill-16x1@64/sample"),
    ]
    script = tmp_path / neuron.COMPILER
    script.write_text(SCRIPT.replace(".read_text()\nout", ".name\nout"))  # modules are bytes
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "All 4 modules are compiled" in run(arguments)
    assert len((tmp_path / "calls").read_text().splitlines()) == 4
    assert "In the store: 4 modules. To lower: 0." in run(replace(arguments, dry_run=True))


def test_wrong_targets_and_ranks_are_one_line(arguments, tmp_path):
    with pytest.raises(ConfigError, match=r"--target trn3: not one of trn1, trn2\. Did you mean"):
        run(replace(arguments, target="trn3"))
    preset = tmp_path / "other.toml"
    preset.write_text(TOML + "[trainium]\nranks = 3\n")
    with pytest.raises(ConfigError, match="ranks = 3: the model's heads, 4, do not divide"):
        run(replace(arguments, preset=str(preset)))
    preset.write_text(TOML + "[trainium]\nlnc = 2\n")
    with pytest.raises(ConfigError, match=r"'trainium\.lnc' is 2; target trn1 has 1"):
        run(replace(arguments, preset=str(preset), target="trn1"))


def test_a_broken_rule_refuses_and_compiles_nothing(arguments, tmp_path, monkeypatch):
    from trnc.compiler.backends.stablehlo import lint

    never = replace(lint.RULES[0], trips=lambda op, _: "no" if op.name == "func.call" else None)
    monkeypatch.setattr(lint, "RULES", (never,))
    with pytest.raises(CompileError, match=r"1 rule\(s\) of trn2 are broken"):
        run(replace(arguments, bundle=tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()
