"""Tiny models, compiled once for the session: of all weight formats, in f32, and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models.mtp_folder import rewrite, write_checkpoint
from tests.models.tiny import PRESET, tiny_model, write_mixed_gguf
from tests.runtime.serving import compile_missing
from trnc.presets import FEATURES, with_features
from trnc.runtime.executor import ProgramExecutor
from trnc.runtime.start import StartOptions, start_executor


@pytest.fixture(scope="session")
def quantized_options(tmp_path_factory: pytest.TempPathFactory, store_root: Path) -> StartOptions:
    """A GGUF with i4g32, i4g32s, i8g32 and bf16 matrices, and a cache in float16."""
    model = write_mixed_gguf(tmp_path_factory.mktemp("gguf") / "mixed.gguf")
    return StartOptions(str(model), PRESET, "inductor", store_root)


@pytest.fixture(scope="session")
def f32_options(tmp_path_factory: pytest.TempPathFactory, store_root: Path) -> StartOptions:
    """A Hugging Face folder with qk-norm and biases, and a cache in float32."""
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3-biased").save_pretrained(folder)
    preset = replace(PRESET, name="tiny-f32", kv_dtype="float32")
    return StartOptions(str(folder), preset, "inductor", store_root)


@pytest.fixture(scope="session")
def glm4_moe_options(tmp_path_factory: pytest.TempPathFactory, store_root: Path) -> StartOptions:
    """Routed experts and an MTP layer in bf16, and a cache in float16."""
    folder = tmp_path_factory.mktemp("glm4_moe")
    write_checkpoint("glm4_moe", folder)
    rewrite(folder, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    return StartOptions(str(folder), PRESET, "inductor", store_root)


@pytest.fixture(scope="session")
def deepseek_v3_options(tmp_path_factory: pytest.TempPathFactory, store_root: Path) -> StartOptions:
    """Latent attention, grouped routing and an MTP layer in f32, and a cache in float32."""
    folder = tmp_path_factory.mktemp("deepseek_v3")
    write_checkpoint("deepseek_v3", folder)
    preset = replace(PRESET, name="tiny-f32", kv_dtype="float32")
    return StartOptions(str(folder), preset, "inductor", store_root)


@pytest.fixture(scope="session")
def quantized(quantized_options: StartOptions, native_library: Path) -> Iterator[ProgramExecutor]:
    yield from _started(quantized_options)


@pytest.fixture(scope="session")
def f32(f32_options: StartOptions, native_library: Path) -> Iterator[ProgramExecutor]:
    yield from _started(f32_options)


@pytest.fixture(scope="session")
def glm4_moe(glm4_moe_options: StartOptions, native_library: Path) -> Iterator[ProgramExecutor]:
    yield from _started(glm4_moe_options)


@pytest.fixture(scope="session")
def deepseek_v3(
    deepseek_v3_options: StartOptions, native_library: Path
) -> Iterator[ProgramExecutor]:
    yield from _started(deepseek_v3_options)


@pytest.fixture(scope="session")
def glm4_moe_mtp(glm4_moe_options: StartOptions, native_library: Path) -> Iterator[ProgramExecutor]:
    yield from _started(speculating(glm4_moe_options))


@pytest.fixture(scope="session")
def deepseek_v3_mtp(
    deepseek_v3_options: StartOptions, native_library: Path
) -> Iterator[ProgramExecutor]:
    yield from _started(speculating(deepseek_v3_options))


@pytest.fixture(scope="session")
def featured(glm4_moe_options: StartOptions, native_library: Path) -> Iterator[ProgramExecutor]:
    """Every feature at once, and speculation, which a test may leave out by its limits."""
    options = speculating(glm4_moe_options)
    full = with_features(options.preset, dict.fromkeys(FEATURES, True))
    preset = replace(full, name="tiny-featured", penalty_buckets=(4, 24))
    yield from _started(replace(options, preset=preset))


def speculating(options: StartOptions) -> StartOptions:
    return replace(options, preset=replace(options.preset, name="tiny-mtp", mtp_depths=(1, 2, 3)))


def _started(options: StartOptions) -> Iterator[ProgramExecutor]:
    executor, _, _ = start_executor(options, compile_missing, print)
    yield executor
    executor.close()
