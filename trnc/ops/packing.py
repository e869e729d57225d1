"""Packed weights: the one layout that kernels of every instruction set read.

A packed weight is uint8 [tiles, tile bytes]. A tile holds 16 output features (N is padded with rows
of zeros), and within it the input features come in the order in which a kernel needs them, so that
multiplying one row of activations reads each tile as one stream:

- `f32`: for each k, 16 floats.
- `bf16`: for each pair of k, 16 pairs of bf16 (an odd K is padded with zero).
- the grouped formats: for each group of 32 k, one record:
  - `i8g32`: 8 blocks of 64 bytes, then 16 scales (f16). Block b holds k = 4b..4b+3 of the group:
    16 features of 4 bytes, each q + 128.
  - `i4g32`: 4 blocks of 64 bytes, 16 scales, 16 offsets (f16). Block b holds k = 4b..4b+3 in the
    low nibbles and k = 16+4b..16+4b+3 in the high ones.
  - `i4g32s`: the same without offsets; a nibble stands for q - 8.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from trnc.checkpoint.layouts import GROUP, Dense, Int4Groups, Int8Groups, Layout
from trnc.errors import CheckpointError, ConfigError, nearest

Format = Literal["f32", "bf16", "i8g32", "i4g32", "i4g32s"]
FORMATS: tuple[Format, ...] = get_args(Format)
TILE = 16

_BLOCK_BYTES = {"i8g32": 512, "i4g32": 256, "i4g32s": 256}
_RECORD_BYTES = {"i8g32": 544, "i4g32": 320, "i4g32s": 288}
_INT8_BIAS = 128


def packed_shape(format: str, out_features: int, in_features: int) -> tuple[int, int]:
    """Return (tiles, bytes of a tile) of a packed [N, K]; ConfigError for a bad format or K."""
    tiles = -(-out_features // TILE)
    if format == "f32":
        return tiles, in_features * TILE * 4
    if format == "bf16":
        return tiles, -(-in_features // 2) * TILE * 4
    if format not in _RECORD_BYTES:
        known = ", ".join(FORMATS)
        raise ConfigError(
            f"weight format {format!r} is not one of {known}.{nearest(format, FORMATS)}"
        )
    if in_features % GROUP:
        raise ConfigError(
            f"weight format {format} needs in features in multiples of {GROUP}, got {in_features}; "
            "use bf16 or f32"
        )
    return tiles, in_features // GROUP * _RECORD_BYTES[format]


def packed_constants(format: str) -> tuple[int, int]:
    """Return the bytes of a grouped format's record, and where its f16 constants begin."""
    return _RECORD_BYTES[format], _BLOCK_BYTES[format]


def natural_format(logical: Layout) -> Format:
    """Return the format that holds `logical` without rounding a weight (f16 becomes f32)."""
    if isinstance(logical, Int8Groups):
        return "i8g32"
    if isinstance(logical, Int4Groups):
        return "i4g32s" if logical.offset is None else "i4g32"
    return "bf16" if logical.weight.dtype == torch.bfloat16 else "f32"


def pack(logical: Layout, format: str) -> Tensor:
    """Return `logical` [N, K] as uint8 `packed_shape(format, N, K)`.

    Every form packs as f32 or bf16 (the latter rounds); a grouped form as its own format, where f32
    scales and offsets are rounded to f16. Raises CheckpointError for another pairing, and where a
    scale or an offset exceeds f16; ConfigError for an unknown format.
    """
    shape = packed_shape(format, *logical.shape)
    if format == "f32":
        return _pack_f32(logical.dequantize()).view(shape)
    if format == "bf16":
        return _pack_bf16(_bfloat16(logical)).view(shape)
    if isinstance(logical, Dense) or format != natural_format(logical):
        raise CheckpointError(
            f"a weight of form {type(logical).__name__} cannot be packed as {format}; use "
            f"{natural_format(logical)}, bf16 or f32"
        )
    if isinstance(logical, Int8Groups):
        blocks = _quads((logical.q.int() + _INT8_BIAS).to(torch.uint8))
        constants = [logical.scale]
    else:
        quads = _quads(logical.q)
        blocks = quads[:, :, :4] | quads[:, :, 4:] << 4
        constants = [c for c in (logical.scale, logical.offset) if c is not None]
    parts = [blocks.flatten(2), *(_constants(c) for c in constants)]
    return torch.cat(parts, dim=2).view(shape)


def unpack(packed: Tensor, format: str, out_features: int, in_features: int) -> Tensor:
    """Return the weight [N, K] f32 that `packed` stands for."""
    tiles, _ = packed_shape(format, out_features, in_features)
    if format == "f32":
        weight = packed.view(torch.float32).view(tiles, in_features, TILE).transpose(1, 2)
    elif format == "bf16":
        pairs = packed.view(torch.bfloat16).view(tiles, -1, TILE, 2).permute(0, 2, 1, 3)
        weight = pairs.flatten(2)[..., :in_features].float()
    else:
        weight = _dequantize(*unpack_groups(packed, format), format)
    return weight.reshape(tiles * TILE, in_features)[:out_features]


def unpack_groups(packed: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return the integers and the constants of matrices [..., tiles, tile bytes] in a grouped form.

    The integers are as they are stored, uint8 [..., tiles * 16, K]: q + 128 of `i8g32`, 0..15 of
    the others. The constants are f16 [1 or 2, ..., tiles * 16, K / 32]: scales, then offsets.
    """
    records = packed.unflatten(-1, (-1, _RECORD_BYTES[format]))
    end = _BLOCK_BYTES[format]
    blocks = records[..., :end].unflatten(-1, (-1, TILE, 4))
    if format != "i8g32":
        blocks = torch.cat([blocks & 15, blocks >> 4], dim=-3)
    # [..., tiles, groups, blocks, 16, 4] to [..., tiles, 16, groups, blocks, 4]
    q = blocks.movedim(-2, -4).flatten(-3).flatten(-3, -2)
    constants = records[..., end:].contiguous().view(torch.float16).unflatten(-1, (-1, TILE))
    # [..., tiles, groups, kinds, 16] to [kinds, ..., tiles, 16, groups]
    return q, constants.movedim(-2, 0).transpose(-1, -2).flatten(-3, -2)


def _dequantize(q: Tensor, constants: Tensor, format: str) -> Tensor:
    bias = {"i8g32": float(_INT8_BIAS), "i4g32": 0.0, "i4g32s": 8.0}[format]
    scale, *offset = constants.unsqueeze(-1).float()
    weight: Tensor = (q.unflatten(-1, (-1, GROUP)).float() - bias) * scale
    return (weight + offset[0] if offset else weight).flatten(-2)


def _pad_rows(matrix: Tensor) -> Tensor:
    """Return `matrix` [N, M] as [tiles, 16, M], zeros below its last row."""
    padding = -matrix.shape[0] % TILE
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, padding))
    return padded.view(-1, TILE, matrix.shape[1])


def _pack_f32(weight: Tensor) -> Tensor:
    return _pad_rows(weight).transpose(1, 2).contiguous().view(torch.uint8)


def _pack_bf16(weight: Tensor) -> Tensor:
    padded = _pad_rows(torch.nn.functional.pad(weight, (0, weight.shape[1] % 2)))
    pairs = padded.view(padded.shape[0], TILE, -1, 2).transpose(1, 2)
    return pairs.contiguous().view(torch.uint8)


def _bfloat16(logical: Layout) -> Tensor:
    weight = logical.weight if isinstance(logical, Dense) else logical.dequantize()
    return weight.bfloat16()


def _quads(q: Tensor) -> Tensor:
    """Order q uint8 [N, K] as [tiles, G, 8 blocks, 64 bytes]."""
    padded = _pad_rows(q)
    tiles = padded.view(padded.shape[0], TILE, -1, GROUP // 4, 4)
    return tiles.permute(0, 2, 3, 1, 4).flatten(3)


def _constants(per_group: Tensor) -> Tensor:
    """Order scales or offsets [N, G] as the bytes of f16 [tiles, G, 16]."""
    half = per_group.half()
    if not torch.isfinite(half).all():
        raise CheckpointError("a scale or an offset of a quantised weight does not fit f16")
    return _pad_rows(half).transpose(1, 2).contiguous().view(torch.uint8)
