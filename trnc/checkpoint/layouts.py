"""Logical forms of a weight matrix, as a checkpoint stores it: plain arrays, no tiling.

Loaders produce these and `trnc.ops.packing` turns them into the layout that kernels read. A weight
is [N, K]: N out features by K in features. Quantised forms have groups of 32 along K, so every row
is independent and rows can be cut, joined and permuted without requantising.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trnc.errors import CheckpointError

GROUP = 32
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Dense:
    """`weight` [N, K] in f32, f16 or bf16."""

    weight: Tensor

    def __post_init__(self) -> None:
        """Check dtypes and shapes; raises CheckpointError."""
        _check("Dense.weight", self.weight, _FLOATS)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, start: int, stop: int) -> Dense:
        """Return output rows start..stop-1 (a view)."""
        return Dense(self.weight[start:stop])

    def permute_rows(self, index: Tensor) -> Dense:
        """Return rows in the order of `index` int64 [N']."""
        return Dense(self.weight[index])

    def dequantize(self) -> Tensor:
        """Return f32 [N, K]."""
        return self.weight.float()


@dataclass(frozen=True, slots=True)
class Int8Groups:
    """w = scale * q. `q` int8 [N, K] in -127..127; `scale` f16 or f32 [N, K/32] (GGUF Q8_0)."""

    q: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        """Check dtypes and shapes; raises CheckpointError."""
        _check("Int8Groups.q", self.q, (torch.int8,))
        _check_groups("Int8Groups.scale", self.scale, self.q)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return self.q.shape[0], self.q.shape[1]

    def rows(self, start: int, stop: int) -> Int8Groups:
        """Return output rows start..stop-1 (a view)."""
        return Int8Groups(self.q[start:stop], self.scale[start:stop])

    def permute_rows(self, index: Tensor) -> Int8Groups:
        """Return rows in the order of `index` int64 [N']."""
        return Int8Groups(self.q[index], self.scale[index])

    def dequantize(self) -> Tensor:
        """Return f32 [N, K]."""
        return self.q.float() * _spread(self.scale)


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """w = scale * q + offset, or w = scale * (q - 8) where `offset` is None (symmetric).

    `q` uint8 [N, K] in 0..15, one value a byte; `scale` and `offset` f16 or f32 [N, K/32]
    (GGUF Q4_1 and Q4_0).
    """

    q: Tensor
    scale: Tensor
    offset: Tensor | None

    def __post_init__(self) -> None:
        """Check dtypes and shapes; raises CheckpointError."""
        _check("Int4Groups.q", self.q, (torch.uint8,))
        _check_groups("Int4Groups.scale", self.scale, self.q)
        if self.offset is not None:
            _check_groups("Int4Groups.offset", self.offset, self.q)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return self.q.shape[0], self.q.shape[1]

    def rows(self, start: int, stop: int) -> Int4Groups:
        """Return output rows start..stop-1 (a view)."""
        offset = None if self.offset is None else self.offset[start:stop]
        return Int4Groups(self.q[start:stop], self.scale[start:stop], offset)

    def permute_rows(self, index: Tensor) -> Int4Groups:
        """Return rows in the order of `index` int64 [N']."""
        offset = None if self.offset is None else self.offset[index]
        return Int4Groups(self.q[index], self.scale[index], offset)

    def dequantize(self) -> Tensor:
        """Return f32 [N, K]."""
        q = self.q.float()
        if self.offset is None:
            return (q - 8.0) * _spread(self.scale)
        return q * _spread(self.scale) + _spread(self.offset)


Layout = Dense | Int8Groups | Int4Groups


def concatenate(parts: Sequence[Layout]) -> Layout:
    """Join weights of one form and one K along N (q, k, v or gate, up become one matrix).

    Dense parts keep their dtype and must share it. Raises CheckpointError where forms differ.
    """
    first = parts[0]
    if isinstance(first, Dense):
        dense = [p for p in parts if isinstance(p, Dense) and p.weight.dtype == first.weight.dtype]
        if len(dense) == len(parts):
            return Dense(torch.cat([p.weight for p in dense]))
    elif isinstance(first, Int8Groups):
        int8 = [p for p in parts if isinstance(p, Int8Groups)]
        if len(int8) == len(parts):
            return Int8Groups(torch.cat([p.q for p in int8]), torch.cat([p.scale for p in int8]))
    else:
        int4 = [p for p in parts if isinstance(p, Int4Groups)]
        offsets = [p.offset for p in int4 if p.offset is not None]
        if len(int4) == len(parts) and len(offsets) in (0, len(parts)):
            q = torch.cat([p.q for p in int4])
            scale = torch.cat([p.scale for p in int4])
            return Int4Groups(q, scale, torch.cat(offsets) if offsets else None)
    forms = ", ".join(_describe(p) for p in parts)
    raise CheckpointError(f"weights of different forms cannot be fused into one: {forms}")


def _describe(part: Layout) -> str:
    dtype = f" {part.weight.dtype}" if isinstance(part, Dense) else ""
    symmetric = " symmetric" if isinstance(part, Int4Groups) and part.offset is None else ""
    return f"{type(part).__name__}{dtype}{symmetric} {list(part.shape)}"


def _spread(per_group: Tensor) -> Tensor:
    return per_group.float().repeat_interleave(GROUP, dim=1)


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.ndim != 2 or tensor.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        got = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"{name} must be a matrix of {wanted}, got {got}")


def _check_groups(name: str, per_group: Tensor, q: Tensor) -> None:
    _check(name, per_group, (torch.float16, torch.float32))
    n, k = q.shape
    if k % GROUP or tuple(per_group.shape) != (n, k // GROUP):
        raise CheckpointError(
            f"{name} must be [N, K/{GROUP}] for q [{n}, {k}], got {list(per_group.shape)}"
        )
