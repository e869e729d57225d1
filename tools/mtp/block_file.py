"""The block as a file that the engine loads (`trnc.checkpoint.mtp_file`), and back from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp.block import WEIGHTS
from trnc.checkpoint.layouts import GROUP, Int8Groups
from trnc.checkpoint.mtp_file import DRAFT_IDS, SCALE
from trnc.checkpoint.weights import folder_name


def quantize(weight: Tensor) -> Int8Groups:
    """Round [N, K] to int8 in groups of 32, as Q8_0 does: the largest of a group becomes 127."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(dim=2) / 127).half()
    steps = groups / scale.float().clamp(min=1e-8)[..., None]
    return Int8Groups(steps.round().clamp(-127, 127).to(torch.int8).flatten(1), scale)


def write_block(
    path: Path,
    weights: Mapping[str, Tensor],
    draft_ids: Tensor | None,
    *,
    layer: int,
    metadata: dict[str, str],
) -> None:
    """Write a block as layer number `layer` of its model: matrices in int8, vectors in f32."""
    tensors: dict[str, Tensor] = {}
    for name in WEIGHTS:
        stored = folder_name(f"layers.{layer}.{name}")
        if weights[name].ndim == 1:
            tensors[stored] = weights[name].detach().float().contiguous()
        else:
            matrix = quantize(weights[name].detach())
            tensors |= {stored: matrix.q, stored + SCALE: matrix.scale}
    if draft_ids is not None:
        tensors[DRAFT_IDS] = draft_ids.int()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)


def read_block(path: Path, *, layer: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the weights of a block, f32, and its draft ids if it has any.

    Reads what `write_block` wrote, and what training keeps: the bare weights.
    """
    tensors = load_file(path)
    if set(WEIGHTS) <= set(tensors):
        return {name: tensors[name] for name in WEIGHTS}, None
    weights = {}
    for name in WEIGHTS:
        stored = folder_name(f"layers.{layer}.{name}")
        scale = tensors.get(stored + SCALE)
        weight = tensors[stored]
        weights[name] = weight if scale is None else Int8Groups(weight, scale).dequantize()
    ids = tensors.get(DRAFT_IDS)
    return weights, None if ids is None else ids.long()
