"""A lowered step as bytes: canonical StableHLO text, and the HLO proto that `neuronx-cc` takes.

The text holds no locations, no file names and nothing that depends on what was lowered before, so
one variant gives one text in any process; all keys are made of it. The proto is made of the text,
with the number that XLA gives each module of a process set to zero.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from trnc.compiler.backends.stablehlo.step import Parameter

_HLO_ID_FIELD = 5  # HloModuleProto.id


@dataclass(frozen=True, slots=True)
class Interface:
    """What a module takes and gives. `aliases` are (result, parameter) pairs that share memory."""

    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...]
    ranks: int


@dataclass(frozen=True, slots=True)
class Module:
    """One variant, lowered."""

    text: str
    interface: Interface

    @property
    def digest(self) -> str:
        """The sha-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def hlo_proto(text: str) -> bytes:
    """Return the serialized HloModuleProto of a canonical text."""
    from jax._src.lib import xla_client

    computation = xla_client._xla.mlir.mlir_module_to_xla_computation(
        text, use_tuple_args=False, return_tuple=False
    )
    return _without_id(computation.as_serialized_hlo_module_proto())


def _without_id(proto: bytes) -> bytes:
    """Drop the module's number, which reads as 0 then: XLA counts modules in each process."""
    kept, place = [], 0
    while place < len(proto):
        start = place
        tag, place = _varint(proto, place)
        match tag & 7:
            case 0:
                _, place = _varint(proto, place)
            case 1:
                place += 8
            case 2:
                size, place = _varint(proto, place)
                place += size
            case 5:
                place += 4
            case kind:
                raise ValueError(f"an HLO proto has no field of wire type {kind}")
        if tag >> 3 != _HLO_ID_FIELD:
            kept.append(proto[start:place])
    return b"".join(kept)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        shift, place = shift + 7, place + 1
        if byte < 0x80:
            return value, place
