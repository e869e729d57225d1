"""The engine through the Trainium modules, on XLA's CPU: the answers that the references give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.mtp_folder import write_checkpoint
from tests.models.tiny import tiny_model, write_mixed_gguf
from tests.trainium.serving import REQUESTS, SMALL, TEXT, answers, tokens
from trnc.core import SamplingParams
from trnc.engine.messages import Submit
from trnc.errors import ConfigError, StoreError
from trnc.presets import TrainiumOptions

CONTEXTS = TrainiumOptions(context_buckets=(48,))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


def save(family: str, folder: Path, **changes: object) -> Path:
    tiny_model(family, num_hidden_layers=2, **changes).save_pretrained(folder)
    return folder


def greedy(found: dict[str, list[int]]) -> dict[str, list[int]]:
    names = [r.request_id for r in REQUESTS if r.sampling.temperature == 0]
    return {name: found[name] for name in names}


def test_every_format_with_context_buckets_and_logprobs(tmp_path, store):
    model = write_mixed_gguf(tmp_path / "mixed.gguf")
    preset = replace(SMALL, kv_dtype="float32", logprobs=True, trainium=CONTEXTS)
    requests = (
        Submit("short", TEXT[5:14], SamplingParams(logprobs=5), 20),
        Submit("long", TEXT[:40], SamplingParams(logprobs=0), 30),
        Submit("seeded", TEXT[2:20], SamplingParams(temperature=1.2, seed=-3, logprobs=2), 16),
    )
    got = answers(model, preset, "xla-cpu", store, requests)
    wanted = answers(model, preset, "eager", store, requests)
    for name in ("short", "long"):
        assert got[name][0] == wanted[name][0]
        pairs = zip(got[name][1], wanted[name][1], strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4
    tops = [[token for token, _ in entry.top] for entry in got["short"][1]]
    assert tops == [[token for token, _ in entry.top] for entry in wanted["short"][1]]


def test_speculation_through_experts_gives_what_a_plain_decode_gives(tmp_path, store):
    write_checkpoint("glm4_moe", tmp_path)
    preset = replace(SMALL, kv_dtype="float32", mtp_depths=(2,))
    got = tokens(answers(tmp_path, preset, "xla-cpu", store))
    plain = replace(preset, mtp_depths=())
    assert got == tokens(answers(tmp_path, plain, "eager", store))


def test_latent_attention_in_an_int8_cache(tmp_path, store):
    save("deepseek_v3", tmp_path)
    preset = replace(SMALL, kv_dtype="int8")
    got = tokens(answers(tmp_path, preset, "xla-cpu", store, REQUESTS[:2]))
    wanted = tokens(answers(tmp_path, preset, "eager", store, REQUESTS[:2]))
    assert got == wanted


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        ("glm4_moe", 4, {}),  # two KV heads that two ranks each share, experts two by two
        ("deepseek_v3", 2, {}),
        ("llama-biased", 8, {"num_attention_heads": 8, "tie_word_embeddings": True}),
    ],
)
def test_several_ranks_answer_as_one(tmp_path, store, family, ranks, changes):
    folder = save(family, tmp_path / family, **changes)
    devices = f"--xla_force_host_platform_device_count={ranks}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainium.serving", str(folder), str(store), str(ranks)],
        env={**os.environ, "XLA_FLAGS": devices},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    wanted = tokens(answers(folder, replace(SMALL, kv_dtype="float32"), "eager", store))
    assert greedy(got) == greedy(wanted)


def test_more_ranks_than_devices_and_a_store_without_modules(tmp_path, store):
    from trnc.runtime.start import StartOptions, start_executor
    from trnc.runtime.xla_client import Devices

    with pytest.raises(ConfigError, match="--xla_force_host_platform_device_count=64"):
        Devices("cpu", 64)
    with pytest.raises(ConfigError, match="no device of platform 'neuron'"):
        Devices("neuron", 1)
    folder = save("llama", tmp_path / "llama")
    options = StartOptions(str(folder), SMALL, "xla-cpu", tmp_path / "empty", require_cache=True)
    with pytest.raises(StoreError, match="trnc compile --backend trainium"):
        start_executor(options, None, print)  # type: ignore[arg-type]
