"""What is known of the Neuron cores that a module can be compiled for. Imports no jax.

Sizes are those of AWS's documentation (Neuron SDK 2.32): a trn2 chip has 96 GiB for 8 physical
cores, a trn1 chip 32 GiB for 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from trnc.errors import ConfigError, nearest

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class NeuronTarget:
    """`core_bytes` is the memory of one physical core; `lnc` how many can be one logical core.

    `fp8_e4m3fn` says whether the usual fp8 is computed as it is.
    """

    name: str
    core_bytes: int
    lnc: tuple[int, ...]
    fp8_e4m3fn: bool = False

    def memory(self, lnc: int) -> int:
        """Bytes that one logical core may use."""
        return self.core_bytes * lnc


TARGETS = (
    NeuronTarget("trn1", 16 * _GIB, (1,)),
    NeuronTarget("trn2", 12 * _GIB, (1, 2)),
)
DEFAULT_TARGET = "trn2"


def neuron_target(name: str) -> NeuronTarget:
    """Return a target by name; raises ConfigError with the nearest one."""
    for target in TARGETS:
        if target.name == name:
            return target
    names = [target.name for target in TARGETS]
    known = ", ".join(names)
    raise ConfigError(f"--target {name}: not one of {known}.{nearest(name, names)}")
