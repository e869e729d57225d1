"""The one module that speaks to XLA's runtime: compile a module's text, run it on some devices.

jax has no public way to compile StableHLO as it is, with donation and with replicas, so this uses
the client that is below it (jaxlib 0.7 to 0.10).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trnc.errors import CompileError, ConfigError

Array = np.ndarray[Any, np.dtype[Any]]


class Devices:
    """`ranks` devices of one platform, and arrays that have a share on each."""

    def __init__(self, platform: str, ranks: int) -> None:
        """Take the first `ranks` devices.

        Raises:
            ConfigError: there are fewer, or no such platform; says how to have them.
        """
        try:
            found = jax.devices(platform)
        except RuntimeError as error:
            raise ConfigError(
                f"jax finds no device of platform '{platform}': {error}{_advice(platform)}"
            ) from None
        if len(found) < ranks:
            advice = (
                f"set XLA_FLAGS=--xla_force_host_platform_device_count={ranks}"
                if platform == "cpu"
                else "set a smaller 'ranks' in the preset's [trainium] table"
            )
            raise ConfigError(f"ranks = {ranks}, but jax has {len(found)} devices: {advice}")
        self._devices = found[:ranks]
        self._client = found[0].client
        mesh = Mesh(np.array(self._devices), ("rank",))
        self._shared = NamedSharding(mesh, PartitionSpec("rank"))

    @property
    def ranks(self) -> int:
        """How many devices there are."""
        return len(self._devices)

    def put(self, shares: Sequence[Array]) -> jax.Array:
        """Return an array of which device i holds `shares[i]`; all have one shape."""
        if len(self._devices) == 1:
            return jnp.asarray(shares[0], device=self._devices[0])
        pairs = zip(shares, self._devices, strict=True)
        return self._join([jax.device_put(share, device) for share, device in pairs])

    def copy(self, array: Array) -> jax.Array:
        """Return an array that every device holds whole."""
        return self.put([array] * len(self._devices))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        """Return zeros of this shape on every device."""
        return self.copy(np.zeros(shape, jnp.dtype(dtype)))

    def compile(self, text: str, *, optimise: bool) -> Any:
        """Compile a module; without `optimise` in less time, to slower code."""
        from jax._src.lib import _jax, xla_client

        ranks = len(self._devices)
        options = xla_client.CompileOptions()
        options.num_replicas = options.executable_build_options.num_replicas = ranks
        numbers = np.array([d.id for d in self._devices]).reshape(ranks, 1)
        options.device_assignment = xla_client.DeviceAssignment.create(numbers)
        if not optimise:
            debug = options.executable_build_options.debug_options
            debug.xla_backend_optimization_level = 0
        try:
            devices = _jax.DeviceList(tuple(self._devices))
            return self._client.compile_and_load(text, devices, options)
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"XLA cannot compile the module: {error}") from error

    def run(self, executable: Any, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Run what `compile` returned. Donated arguments are gone afterwards, and the results may
        still be on their way.
        """
        results = executable.execute_sharded(list(arguments))
        shares: list[list[jax.Array]] = results.disassemble_into_single_device_arrays()
        return [self._join(pieces) for pieces in shares]

    def _join(self, pieces: list[jax.Array]) -> jax.Array:
        """One array of what each device has."""
        if len(pieces) == 1:
            return pieces[0]
        first, *rest = pieces[0].shape
        shape = (first * len(pieces), *rest)
        return jax.make_array_from_single_device_arrays(shape, self._shared, pieces)


def _advice(platform: str) -> str:
    """Say what to install for Neuron cores."""
    if platform != "neuron" or find_spec("libneuronxla") is not None:
        return ""
    alone = (
        "; torch-neuronx, which is installed, compiles PyTorch graphs and takes no module"
        if find_spec("torch_neuronx") is not None
        else ""
    )
    return (
        f". Install 'jax-neuronx', which brings Neuron's plugin for jax, 'libneuronxla'{alone} "
        "(docs/TRAINIUM.md)"
    )


def first_share(array: jax.Array) -> Array:
    """Return what the first device holds."""
    return np.asarray(array.addressable_data(0))


def host_devices(environment: Mapping[str, str], ranks: int) -> str:
    """Return the XLA_FLAGS under which the CPU counts as `ranks` devices."""
    return (
        f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={ranks}".strip()
    )


def prepare_host(ranks: int) -> None:
    """Make the CPU count as `ranks` devices; does nothing once jax has looked for devices."""
    if ranks > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = host_devices(os.environ, ranks)
