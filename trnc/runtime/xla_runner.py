"""The XLA runner: the modules of the Trainium backend, on whatever device jax has for them.

On the CPU it is how their numbers are checked: what runs is the text that is handed to the Neuron
compiler. Weights are put on the devices once; a step's state goes in as donated arrays and comes
out as new ones, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from trnc.compiler.backends.stablehlo.module import Interface, Module
from trnc.compiler.backends.stablehlo.parallel import WHOLE, split_of
from trnc.compiler.backends.stablehlo.step import RANK, WIDE_INPUTS, Parameter
from trnc.compiler.backends.stablehlo.weights import device_arrays, share
from trnc.core import VariantKey
from trnc.errors import CompileError
from trnc.models.config import ModelConfig
from trnc.runtime.inputs import Inputs
from trnc.runtime.xla_client import Devices, first_share

Array = np.ndarray[Any, np.dtype[Any]]


class XlaRunner:
    """Runs the variants of `modules` on `devices`.

    `tensors` are the packed `weight.*` of the whole model, `formats` the formats of those that are
    packed. `compile` makes an executable of a variant; every one is made here, none later.
    """

    def __init__(
        self,
        *,
        modules: Mapping[VariantKey, Module],
        tensors: Mapping[str, Tensor],
        formats: Mapping[str, str],
        model: ModelConfig,
        devices: Devices,
        compile: Callable[[VariantKey, Module], Any],
    ) -> None:
        self._devices = devices
        self._interfaces = {key: module.interface for key, module in modules.items()}
        self._weights: dict[str, jax.Array] = {}
        self._state: dict[str, jax.Array] = {}
        for parameter in _parameters(self._interfaces.values(), "state."):
            self._state[parameter.name] = devices.zeros(parameter.shape, parameter.dtype)
        used = {p.name.split(":")[0] for p in _parameters(self._interfaces.values(), "weight.")}
        wanted = {name: tensor for name, tensor in tensors.items() if name in used}
        for name, arrays in _weight_arrays(wanted, formats, model, devices.ranks):
            self._weights[name] = devices.put(arrays)
        ranks = [np.array([rank], np.int32) for rank in range(devices.ranks)]
        self._weights[RANK] = devices.put(ranks)
        self._check_weights()
        self._executables = {key: compile(key, module) for key, module in modules.items()}

    def run(self, key: VariantKey, inputs: Inputs) -> list[Tensor]:
        """Run one step; waits for what the host reads."""
        interface = self._interfaces[key]
        arguments = [self._argument(p, inputs) for p in interface.parameters]
        results = self._devices.run(self._executables[key], arguments)
        outputs = []
        for name, result in zip(interface.results, results, strict=True):
            if name.startswith("state."):
                self._state[name] = result
            else:
                outputs.append(torch.from_numpy(np.array(first_share(result))))
        return outputs

    def _argument(self, parameter: Parameter, inputs: Inputs) -> jax.Array:
        name = parameter.name
        if name in self._weights:
            return self._weights[name]
        if name in self._state:
            return self._state[name]
        return self._devices.copy(_input(parameter, inputs[name.removeprefix("input.")]))

    def _check_weights(self) -> None:
        """Raise CompileError where cores or a weight are not what the modules were lowered for."""
        for interface in self._interfaces.values():
            if interface.ranks != self._devices.ranks:
                raise CompileError(
                    f"the modules are those of {interface.ranks} ranks, and here are "
                    f"{self._devices.ranks}; compile again with this preset"
                )
        for parameter in _parameters(self._interfaces.values(), "weight."):
            array = self._weights.get(parameter.name)
            found = None if array is None else (str(array.dtype), array.addressable_data(0).shape)
            if found != (parameter.dtype, parameter.shape):
                raise CompileError(
                    f"{parameter.name} is {found}, and the modules take {parameter.dtype} "
                    f"{parameter.shape}; compile again for this model and preset"
                )


def _parameters(interfaces: Iterable[Interface], prefix: str) -> Iterator[Parameter]:
    """Yield each distinct parameter of this kind once."""
    every = (p for interface in interfaces for p in interface.parameters)
    yield from dict.fromkeys(p for p in every if p.name.startswith(prefix))


def _weight_arrays(
    tensors: Mapping[str, Tensor], formats: Mapping[str, str], model: ModelConfig, ranks: int
) -> Iterator[tuple[str, list[Array]]]:
    """Yield the name of every array of every weight, and each core's share of it."""
    for name, tensor in tensors.items():
        split = split_of(name, model) if ranks > 1 else WHOLE
        format = formats.get(name)
        parts = {"": tensor.numpy()} if format is None else device_arrays(tensor, format)
        stacked = format is not None and tensor.ndim == 3
        for part, array in parts.items():
            shares = [share(array, split, rank, ranks, stacked=stacked) for rank in range(ranks)]
            yield f"{name}:{part}" if part else name, shares


def _input(parameter: Parameter, tensor: Tensor) -> Array:
    """Return an input as the module takes it: words for 64 bits, 32 bits otherwise."""
    array: Array = tensor.numpy()
    if parameter.name.removeprefix("input.") in WIDE_INPUTS:
        halves = array.view(np.uint32).reshape(*array.shape, 2)
        return halves[..., ::-1].copy()  # little-endian: the low word is first
    # A copy in any case: the host fills the buffer anew while a device may still read it.
    return array.astype(parameter.dtype)
