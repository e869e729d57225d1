"""`trnc compile --backend trainium`, as a person runs it."""

from __future__ import annotations

import pytest

from tests.checkpoint.files import gguf_tensors, shape_metadata, tiny_model, write_gguf
from tests.cli.command import fails, trnc
from tests.trainium.test_neuron import SCRIPT
from trnc.compiler.backends.stablehlo import bundle, neuron

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
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("trainium")
    tensors = gguf_tensors(tiny_model("mistral"), "llama")
    metadata = shape_metadata(**{"attention.key_length": 32, "attention.value_length": 32})
    model = write_gguf(folder / "tiny.gguf", metadata=metadata, tensors=tensors)
    (folder / "little.toml").write_text(TOML)
    options = ("--model", model, "--preset", folder / "little.toml", "--store", folder / "store")
    return ("compile", "--backend", "trainium", *options)


def test_a_bundle_without_a_compiler_and_modules_with_one(arguments, tmp_path):
    ran = trnc(*arguments, "--bundle", tmp_path / "bundle", PATH="/usr/bin:/bin")
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
    with_compiler = trnc(*arguments, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert with_compiler.status == 0, with_compiler.err
    assert "All 4 modules are compiled" in with_compiler.out
    assert len((tmp_path / "calls").read_text().splitlines()) == 4
    again = trnc(*arguments, "--dry-run")
    assert "In the store: 4 modules. To lower: 0." in again.out


def test_wrong_targets_and_ranks_are_one_line(arguments, tmp_path):
    assert "--target trn3: not one of trn1, trn2. Did you mean" in fails(
        *arguments, "--target", "trn3"
    )
    toml = tmp_path / "three.toml"
    toml.write_text(TOML + "[trainium]\nranks = 3\n")
    assert "ranks = 3: the model's heads, 4, do not divide" in fails(*arguments, "--preset", toml)
    toml.write_text(TOML + "[trainium]\nlnc = 2\n")
    said = fails(*arguments, "--preset", toml, "--target", "trn1")
    assert "'trainium.lnc' is 2; target trn1 has 1" in said
