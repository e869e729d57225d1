"""The MTP block in plain torch: one decoder layer around which `trnc.models.mtp` says what is.

Row i has the token at position i + 1 and the target's state at position i. In the first round of
a draft the states are the target's; in a later round r, row i has the block's own state of row
i - 1 in round r - 1. There it attends to what a draft finds in the cache: keys of the first round
up to row i - r + 1, then one key of each later round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp.target import MATRICES, NORMS, Target, finish, norm, project
from trnc.models.config import ModelConfig
from trnc.models.rope import rope_tables

KeyValue = tuple[Tensor, Tensor]

OWN_NORMS = ("enorm", "hnorm", "shared_norm")
STREAM = 32.0  # about the size (RMS) of the last layer's input in models of this family
WEIGHTS = (*OWN_NORMS, "eh_proj", *NORMS, *MATRICES)


class MtpBlock(nn.Module):
    """The weights, named as `trnc.checkpoint` names those of an MTP layer."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        for name in WEIGHTS:
            self.register_parameter(name, nn.Parameter(weights[name].detach().float().clone()))

    def forward(
        self, embedded: Tensor, previous: Tensor, earlier: list[KeyValue]
    ) -> tuple[Tensor, KeyValue]:
        """Run one round over rows [B, T, H]; return the states after the norm, and its keys.

        `earlier` are the keys and values of the rounds before this one.
        """
        layer = {name: getattr(self, name) for name in (*NORMS, *MATRICES)}
        both = (norm(embedded, self.enorm, self.config), norm(previous, self.hnorm, self.config))
        hidden = functional.linear(torch.cat(both, dim=-1), self.eh_proj).float()
        tables = rope_tables(self.config.rope, hidden.shape[1])
        q, k, v = project(hidden, layer, self.config, tables)
        attended = attend(q, [*earlier, (k, v)])
        hidden = finish(hidden, attended, layer, self.config)
        return norm(hidden, self.shared_norm, self.config), (k, v)


def attend(q: Tensor, rounds: list[KeyValue]) -> Tensor:
    """Return what q [B, Hq, T, D] of the last round attends to in the keys of all rounds."""
    k, v = rounds[0]
    if len(rounds) == 1:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    group = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group))  # [B, Hkv, group, T, D]
    rows = torch.arange(q.shape[-2])
    hidden = rows[:, None] - (len(rounds) - 1) < rows
    scores = (q @ k[:, :, None].transpose(-1, -2)).float()
    scores = scores.masked_fill(hidden, -torch.inf)
    later = [
        (shift(k, len(rounds) - r), shift(v, len(rounds) - r))
        for r, (k, v) in enumerate(rounds[1:], start=2)
    ]
    single = [(q * k[:, :, None]).sum(-1, keepdim=True).float() for k, _ in later]
    weights = torch.cat([scores, *single], dim=-1).mul(q.shape[-1] ** -0.5).softmax(dim=-1)
    weights = weights.to(v.dtype)
    out = weights[..., : len(rows)] @ v[:, :, None]
    for index, (_, value) in enumerate(later):
        out = out + weights[..., len(rows) + index, None] * value[:, :, None]
    return out.flatten(1, 2)


def shift(x: Tensor, rows: int) -> Tensor:
    """Move [..., T, D] by so many rows towards the end; the first rows become 0."""
    return functional.pad(x, (0, 0, rows, 0))[..., : x.shape[-2], :] if rows else x


def unroll(block: MtpBlock, embedded: Tensor, states: Tensor, rounds: int) -> list[Tensor]:
    """Return the states [B, T, H] of each round of drafts, all from the true tokens.

    The first r - 1 rows of round r have no meaning: a draft cannot have got there.
    """
    given: list[Tensor] = []
    earlier: list[KeyValue] = []
    for _ in range(rounds):
        previous = shift(given[-1], 1) if given else states
        state, key_value = block(embedded, previous, earlier)
        earlier.append(key_value)
        given.append(state)
    return given


def initial_weights(target: Target) -> dict[str, Tensor]:
    """Return the weights to start from: the target's last layer, given the sum of both inputs.

    hnorm takes the weight of the last norm out of the states again, so that the layer gets the
    stream that it knows, but with a size of 1. So what it adds to the stream is made as much
    smaller: a step of the optimizer then changes all matrices alike.
    """
    hidden, last = target.config.hidden_size, target.layers[-1]
    identity = torch.eye(hidden)
    weights = {name: last[name].clone() for name in (*NORMS, *MATRICES)}
    weights["o"] /= STREAM
    weights["down"] /= STREAM
    weights |= {"enorm": torch.ones(hidden), "shared_norm": target.norm}
    weights["hnorm"] = (target.norm.square().mean().sqrt() / target.norm).clamp(-4, 4)
    weights["eh_proj"] = torch.cat([identity, identity], dim=1)
    return weights
