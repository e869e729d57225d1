"""The engine through the Trainium modules, on XLA's CPU: the answers that the references give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.mtp_folder import write_checkpoint
from tests.models.tiny import tiny_model, write_mixed_gguf
from tests.trainium.serving import (
    FULL,
    PLAIN,
    SHAPED,
    SMALL,
    TEXT,
    largest_error,
    lower,
    prompt_logprobs,
    serve,
    serve_eagerly,
    widest,
)
from trnc.core import SamplingParams, VariantKey
from trnc.engine.messages import Submit
from trnc.errors import ConfigError, StoreError
from trnc.presets import Preset, TrainiumOptions
from trnc.runtime.start import StartOptions, start_executor

BOUND = 1e-4  # of log-probabilities; docs/TRAINIUM.md states it
SCORED = SamplingParams(prompt_logprobs=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


def on(model: Path, preset: Preset, store: Path) -> StartOptions:
    return StartOptions(str(model), preset, "xla-cpu", store)


def test_every_format_and_feature_answers_as_the_cpu_backend_does(
    tmp_path, store, store_root, native_library
):
    model = write_mixed_gguf(tmp_path / "mixed.gguf")
    contexts = TrainiumOptions(context_buckets=(48,))
    options = on(model, replace(FULL, trainium=contexts), store)
    with_noise, greedy = (widest(FULL, kind) for kind in ("sample", "greedy"))

    def only(key: VariantKey) -> bool:
        return greedy(key) or (with_noise(key) and key.context == 80)

    lower(options, only)
    filtered = SamplingParams(0.9, top_k=60, top_p=0.9, min_p=0.01, seed=77 << 40 | 5)
    requests = (
        *SHAPED,
        Submit("filtered", TEXT[1:23], filtered, 16),
        Submit("seeded", TEXT[2:20], SamplingParams(1.2, seed=-3, logprobs=2), 16),
    )
    got = serve(options, requests)
    assert (
        got.tokens == serve(replace(options, backend="inductor", store=store_root), requests).tokens
    )
    wanted = serve_eagerly(options, requests)
    assert got.tokens == wanted.tokens
    # A key that lies between two values of the float16 cache may be rounded to the other one.
    assert largest_error(got.logprobs, wanted.logprobs) < 0.005
    assert largest_error(got.prompt_logprobs, wanted.prompt_logprobs) < 0.005
    tops = [[[token for token, _ in e.top] for e in s.logprobs["scored"]] for s in (got, wanted)]
    assert tops[0] == tops[1]


def test_speculation_with_features_gives_what_a_plain_decode_gives(tmp_path, store):
    write_checkpoint("glm4_moe", tmp_path)
    options = on(tmp_path, replace(FULL, kv_dtype="float32", mtp_depths=(2,)), store)
    lower(options, widest(options.preset, "greedy"))
    # Both the drafts and the target like these tokens, until the penalty, which drafts do not have.
    biased = SamplingParams(logit_bias=((5, 60.0), (9, 59.0)), frequency_penalty=0.7)
    requests = (*SHAPED, Submit("biased", TEXT[4:30], biased, 20))
    got, plain = serve(options, requests), serve_eagerly(options, requests, mtp_depths=())
    assert got.tokens == plain.tokens
    assert largest_error(got.logprobs, plain.logprobs) < BOUND
    accepted = {len(t) - 1 for step, tokens in got.steps if step == "verify" for t in tokens}
    assert accepted == {0, 1, 2}


def test_latent_attention_in_an_int8_cache_drafts_as_the_reference_does(tmp_path, store):
    write_checkpoint("deepseek_v3", tmp_path)
    preset = replace(SMALL, kv_dtype="int8", mtp_depths=(2,), mtp_always=True)
    options = on(tmp_path, preset, store)
    lower(options, widest(preset, "greedy"))
    got = serve(options, PLAIN)
    assert got.steps == serve_eagerly(options, PLAIN).steps
    assert {step for step, _ in got.steps} == {"prefill", "draft", "verify"}


@pytest.mark.parametrize(
    ("family", "ranks", "changes"),
    [
        # Two KV heads that two ranks each share, experts two by two, and an MTP layer.
        ("glm4_moe", 4, {"mtp_depths": (2,), "mtp_always": True}),
        ("deepseek_v3", 2, {}),
        ("llama-biased", 8, {}),
    ],
)
def test_several_ranks_answer_as_one_and_as_transformers(tmp_path, store, family, ranks, changes):
    if changes:
        model, _ = write_checkpoint(family, tmp_path)
    else:
        heads = {"num_attention_heads": 8} if ranks == 8 else {}
        model = tiny_model(family, num_hidden_layers=2, **heads)
        model.save_pretrained(tmp_path)
    preset = replace(SMALL, kv_dtype="float32", prompt_logprobs=True, **changes)
    options = on(tmp_path, replace(preset, trainium=TrainiumOptions(ranks=ranks)), store)
    lower(options, widest(preset, "greedy"))
    requests = [Submit(r.request_id, r.prompt_ids, SCORED, r.max_tokens) for r in PLAIN]
    got = serve(options, requests)
    assert got.steps == serve_eagerly(options, requests).steps
    exact = prompt_logprobs(model, requests)
    assert largest_error(got.prompt_logprobs, exact) < BOUND


def test_torch_neuronx_alone_is_not_enough_and_the_message_says_so(monkeypatch):
    from trnc.runtime import xla_client

    there = {"torch_neuronx"}
    monkeypatch.setattr(xla_client, "find_spec", lambda name: name if name in there else None)
    with pytest.raises(ConfigError, match=r"'libneuronxla'; torch-neuronx, which is installed"):
        xla_client.Devices("neuron", 1)
    there.add("libneuronxla")  # the plugin is there: what jax says of it is all there is to say
    with pytest.raises(ConfigError) as raised:
        xla_client.Devices("neuron", 1)
    assert "nstall" not in str(raised.value)


def test_more_ranks_than_devices_and_a_store_without_modules(tmp_path):
    from trnc.runtime.xla_client import Devices

    with pytest.raises(ConfigError, match="--xla_force_host_platform_device_count=64"):
        Devices("cpu", 64)
    with pytest.raises(ConfigError, match=r"no device of platform 'neuron'.*Install 'jax-neuronx'"):
        Devices("neuron", 1)
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    options = replace(on(tmp_path / "llama", SMALL, tmp_path / "empty"), require_cache=True)
    with pytest.raises(StoreError, match="trnc compile --backend trainium"):
        start_executor(options, None, print)  # type: ignore[arg-type]
