"""Sampling defaults of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import write_gguf
from trnc.checkpoint.generation import GenerationDefaults, generation_defaults
from trnc.checkpoint.source import Source
from trnc.errors import CheckpointError


def defaults_of(folder: Path, table: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(table))
    return generation_defaults(Source("folder", folder, "m"))


SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05}


def test_nothing_is_invented(tmp_path: Path) -> None:
    assert generation_defaults(Source("folder", tmp_path, "m")) == GenerationDefaults()
    assert defaults_of(tmp_path, {"eos_token_id": 2}) == GenerationDefaults(eos_token_ids=(2,))


def test_what_is_given_is_read(tmp_path: Path) -> None:
    table = {"do_sample": True, **SAMPLING, "repetition_penalty": 1.1, "max_new_tokens": 9}
    wanted = GenerationDefaults(
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=9,
        eos_token_ids=(3, 1),
    )
    assert defaults_of(tmp_path, {**table, "eos_token_id": [3, 1]}) == wanted


def test_do_sample_false_is_greedy_and_absent_is_advice(tmp_path: Path) -> None:
    greedy = defaults_of(tmp_path, {"do_sample": False, **SAMPLING})
    assert greedy == GenerationDefaults(temperature=0.0)
    assert defaults_of(tmp_path, SAMPLING).temperature == 0.6


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("top_p", 1.5), ("top_k", 0.5), ("min_p", "x"), ("eos_token_id", "x")],
)
def test_a_wrong_value_names_its_key(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}'"):
        defaults_of(tmp_path, {key: value})


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        generation_defaults(Source("folder", tmp_path, "m"))


def test_gguf_sampling_keys(tmp_path: Path) -> None:
    keys = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "penalty_repeat": 1.5}
    path = write_gguf(
        tmp_path / "m.gguf", metadata={f"general.sampling.{k}": v for k, v in keys.items()}
    )
    wanted = GenerationDefaults(
        temperature=0.5, top_k=20, top_p=0.75, min_p=0.25, repetition_penalty=1.5
    )
    assert generation_defaults(Source("gguf", path, "m")) == wanted
