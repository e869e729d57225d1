"""Training the block: the target's own distribution is what each round of a draft is to give.

Only rows count whose token is of an answer. The loss is the cross-entropy between the target's
distribution and the draft's, both over the tokens that the draft's head has. A step is decided by
(seed, step) alone, so a run that went on from a checkpoint gives the block of one that was never
interrupted.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mtp.block import MtpBlock, unroll
from mtp.states import Example

_CHUNK = 256  # rows whose logits are held at once


@dataclass(frozen=True, slots=True)
class Plan:
    """How a block is trained. `batch_tokens` counts padding; `warmup` is a part of `steps`."""

    steps: int
    batch_tokens: int = 4096
    rounds: int = 3
    rate: float = 1e-3
    warmup: float = 0.05
    decay: float = 0.01
    bf16: bool = True
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """What a run has done; `best` is the lowest held-out loss, and when it was."""

    step: int = 0
    best: float = math.inf
    best_step: int = 0


def rate_at(plan: Plan, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(plan.steps * plan.warmup))
    if step < warmup:
        return plan.rate * (step + 1) / warmup
    done = (step - warmup) / max(1, plan.steps - warmup)
    return plan.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def batches(examples: Sequence[Example], plan: Plan) -> Iterator[list[Example]]:
    """Yield batches without end, each epoch in an order of its own: similar lengths together."""
    epoch = 0
    while True:
        pick = random.Random(f"{plan.seed} {epoch}")
        order = sorted(examples, key=lambda e: len(e.tokens) + pick.uniform(0, 16))
        groups = list(_grouped(order, plan.batch_tokens))
        pick.shuffle(groups)
        yield from groups
        epoch += 1


def _grouped(examples: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    for example in examples:  # ascending lengths: the last one is the longest
        if group and len(example.tokens) * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows [B, T] of padded sequences: row i has token i + 1 and state i, to foretell token i + 2.

    `counts` [B, T] are the rows where a draft may begin: from the last of the prompt on.
    """

    tokens: Tensor
    states: Tensor
    following: Tensor
    counts: Tensor

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Batch:
        """Stack sequences."""
        states = pad_sequence([e.states.float() for e in examples], batch_first=True)
        tokens = pad_sequence([e.tokens for e in examples], batch_first=True)
        rows = torch.arange(states.shape[1] - 2)
        first = torch.tensor([e.prompt - 1 for e in examples])
        last = torch.tensor([len(e.tokens) - 3 for e in examples])
        counts = (rows >= first[:, None]) & (rows <= last[:, None])
        return cls(tokens[:, 1:-1], states[:, :-2], states[:, 1:-1], counts)

    def counted(self, round: int) -> Tensor:
        """Return the rows [B, T] where round `round` (0 is the first) of a draft may be."""
        counts = self.counts.clone()
        for _ in range(round):
            counts[:, 1:] &= counts[:, :-1].clone()
            counts[:, 0] = False
        return counts


class _SoftLoss(torch.autograd.Function):
    """Sum of the cross-entropies of drafts [N, H] against target states [N, H], through one head.

    Its gradient is computed with it, some rows at a time: logits of all rows would not fit into
    any cache. Where no gradient is asked for, it tells how many rows have the same best token.
    """

    @staticmethod
    def forward(ctx: Any, drafts: Tensor, targets: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        loss = drafts.new_zeros(())
        hits = torch.zeros((), dtype=torch.int64)
        gradient = torch.empty_like(drafts)
        for start in range(0, len(drafts), _CHUNK):
            part = slice(start, start + _CHUNK)
            wanted = (targets[part].to(head.dtype) @ head.T).float()
            given = (drafts[part].to(head.dtype) @ head.T).float()
            if not ctx.needs_input_grad[0]:
                hits += (wanted.argmax(-1) == given.argmax(-1)).sum()
            wanted, given = wanted.softmax(-1), given.log_softmax(-1)
            loss -= (wanted * given).sum()
            if ctx.needs_input_grad[0]:
                gradient[part] = (given.exp_().sub_(wanted).to(head.dtype) @ head).float()
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, loss: Tensor, _hits: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * loss, None, None


@dataclass(frozen=True, slots=True)
class Loss:
    """The mean over rounds of a batch, and for each round how many rows agreed, of how many.

    Agreement is counted only where no gradient is asked for.
    """

    mean: Tensor
    hits: tuple[int, ...]
    rows: tuple[int, ...]


def batch_loss(
    block: MtpBlock, embed: Tensor, head: Tensor, batch: Batch, *, rounds: int, bf16: bool
) -> Loss:
    """Return the loss of a batch; `head` [n, H] has the rows of the tokens that can be drafted."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        drafts = unroll(block, embed[batch.tokens], batch.states, rounds)
    total, hits, rows = torch.zeros(()), [], []
    head = head.bfloat16() if bf16 else head
    for round, draft in enumerate(drafts):
        counted = batch.counted(round)
        loss, hit = _SoftLoss.apply(draft[counted], batch.following[counted], head)
        rows.append(int(counted.sum()))
        hits.append(int(hit))
        total = total + loss / max(1, rows[-1])
    return Loss(total / rounds, tuple(hits), tuple(rows))


class Trainer:
    """A block, its optimizers and where they stand; `save` and `load` keep all of it."""

    def __init__(self, *, block: MtpBlock, embed: Tensor, head: Tensor, plan: Plan) -> None:
        self.block = block
        self.plan = plan
        self.progress = Progress()
        self._embed = embed
        self._head = head
        vectors = [p for p in block.parameters() if p.ndim == 1]
        matrices = [p for p in block.parameters() if p.ndim == 2]
        # Muon (Jordan, 2024) with steps of the size of Adam's, which is for vectors alone.
        self._optimizers = (
            torch.optim.Muon(
                matrices,
                lr=plan.rate,
                weight_decay=plan.decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(vectors, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, batch: Batch) -> Loss:
        """Take one step."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(self.plan, self.progress.step)
        plan = self.plan
        loss = batch_loss(
            self.block, self._embed, self._head, batch, rounds=plan.rounds, bf16=plan.bf16
        )
        self.block.zero_grad(set_to_none=True)
        loss.mean.backward()
        torch.nn.utils.clip_grad_norm_(self.block.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self.progress.step += 1
        return loss

    @torch.no_grad()
    def validate(self, examples: Sequence[Example]) -> tuple[float, list[float]]:
        """Return the mean loss, and the part of rows that agree in each round."""
        loss, weight = 0.0, 0
        hits, rows = [0] * self.plan.rounds, [0] * self.plan.rounds
        for group in _grouped(sorted(examples, key=lambda e: len(e.tokens)), 4096):
            part = batch_loss(
                self.block,
                self._embed,
                self._head,
                Batch.of(group),
                rounds=self.plan.rounds,
                bf16=self.plan.bf16,
            )
            loss, weight = loss + float(part.mean) * part.rows[0], weight + part.rows[0]
            hits = [a + b for a, b in zip(hits, part.hits, strict=True)]
            rows = [a + b for a, b in zip(rows, part.rows, strict=True)]
        return loss / weight, [hit / max(1, row) for hit, row in zip(hits, rows, strict=True)]

    def save(self, path: Path, data: str) -> None:
        """Write everything; `data` says what is trained on."""
        kept = {
            "data": data,
            "plan": self.plan,
            "progress": self.progress,
            "block": self.block.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        temporary = path.with_suffix(".tmp")
        torch.save(kept, temporary)
        os.replace(temporary, path)

    def load(self, path: Path, data: str) -> None:
        """Go on from what `save` wrote. Raises SystemExit if data or plan are others."""
        kept = torch.load(path, weights_only=False)
        if kept["data"] != data or kept["plan"] != self.plan:
            raise SystemExit(
                f"{path} is of another run (its data: {kept['data']}, its plan: {kept['plan']});"
                " move it away, or give the options of that run"
            )
        self.progress = kept["progress"]
        self.block.load_state_dict(kept["block"])
        for optimizer, state in zip(self._optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def skip(stream: Iterator[list[Example]], steps: int) -> Iterator[list[Example]]:
    """Drop the batches of steps that were taken before."""
    for _ in range(steps):
        next(stream)
    return stream
