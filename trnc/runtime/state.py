"""Device state: the KV pages of every layer, and what every slot holds of its sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trnc.errors import ConfigError
from trnc.models.cache import cache_layout
from trnc.models.config import ModelConfig
from trnc.presets import Preset

_MIB = 1 << 20


def page_bytes(model: ModelConfig, preset: Preset) -> int:
    """Bytes of one page of the cache over all layers."""
    layout = cache_layout(model, preset.kv_dtype, preset.page_size)
    return (model.num_layers + model.mtp_layers) * layout.page_bytes


def count_pages(model: ModelConfig, preset: Preset, *, free_bytes: int) -> int:
    """Return how many KV pages to allocate, page 0 included.

    `free_bytes` is what is measured to be free once the weights are loaded.

    Raises:
        ConfigError: not even one sequence of a page fits; names `kv_memory_mib`.
    """
    full = preset.max_rows * preset.max_pages
    budget = preset.kv_memory_mib * _MIB or min(full * page_bytes(model, preset), free_bytes // 2)
    pages = min(full, budget // page_bytes(model, preset))
    if pages < 1:
        needed = -(-page_bytes(model, preset) // _MIB)
        raise ConfigError(
            f"preset '{preset.name}': 'kv_memory_mib' allows {budget // _MIB} MiB for KV pages, "
            f"but one page of this model takes {needed} MiB; raise it"
        )
    return pages + 1


def allocate_state(model: ModelConfig, preset: Preset, *, num_pages: int) -> dict[str, Tensor]:
    """Return the tensors of every `state.*` name.

    Pages are left uninitialised, so that memory is taken when it is used: attention never lets a
    position count that was not written. There is one slot more than there are rows: rows that
    sample nothing write there. With speculation `last_tokens` has the slots once more for each
    depth: the drafts. `trnc.models.speculation` says what the rest is.
    """
    layout = cache_layout(model, preset.kv_dtype, preset.page_size)
    slots = preset.max_rows + 1
    tokens = slots * (1 + max(preset.mtp_depths, default=0))
    state = {"state.last_tokens": torch.zeros(tokens, dtype=torch.int64)}
    if preset.mtp_depths:
        state["state.lengths"] = torch.zeros(slots, dtype=torch.int64)
        state["state.mtp_states"] = torch.zeros(slots, model.hidden_size)
    for index in range(model.num_layers + model.mtp_layers):
        for name, spec in layout.pages.items():
            shape = (num_pages, *map(int, spec.shape[1:]))
            state[f"state.{name}.{index}"] = torch.empty(shape, dtype=spec.torch_dtype)
    return state


def free_memory_bytes() -> int:
    """Return how many bytes this process may still take, of the machine or its cgroup."""
    fields: Mapping[str, str] = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines()
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)
