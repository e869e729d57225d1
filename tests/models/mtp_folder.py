"""Folders of tiny models with an MTP layer, under the names of the released checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.models.tiny import randomize, tiny_model

LAYERS = 3
PREFIX = f"model.layers.{LAYERS}."


def write_checkpoint(family: str, folder: Path) -> tuple[PreTrainedModel, MtpModel]:
    """Save a model with one MTP layer as the released checkpoints have it, copies included."""
    model = tiny_model(family, num_nextn_predict_layers=1)
    model.save_pretrained(folder)
    mtp = MtpModel(model, 1).eval()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        randomize(mtp.layers)
    extra = mtp_tensors(mtp)
    extra |= {f"{PREFIX}embed_tokens.weight": model.get_input_embeddings().weight.detach()}
    extra |= {f"{PREFIX}shared_head.head.weight": model.lm_head.weight.detach()}
    rewrite(folder, lambda tensors: tensors | extra)
    return model, mtp


def mtp_tensors(mtp: MtpModel) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        short = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if short == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"{PREFIX}mlp.experts.{expert}.gate_proj.weight"] = gate
                tensors[f"{PREFIX}mlp.experts.{expert}.up_proj.weight"] = up
        elif short == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                tensors[f"{PREFIX}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            tensors[PREFIX + short] = tensor
    return tensors


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, path)
