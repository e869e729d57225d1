"""The two sides of tools/run_variants.py: modules on XLA's CPU, and the eager reference.

Both run one step from a state that is put back before each one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from torch import Tensor

from trnc.compiler.backends.stablehlo.build import Plan
from trnc.compiler.backends.stablehlo.mlir import split_functions
from trnc.compiler.backends.stablehlo.module import Module
from trnc.core import ExecutorInfo, StepPlan, StepResult, VariantKey
from trnc.runtime.catalog import Catalog
from trnc.runtime.eager_runner import EagerRunner
from trnc.runtime.executor import ProgramExecutor, ProgramRunner
from trnc.runtime.state import allocate_state
from trnc.runtime.xla_client import Devices, first_share
from trnc.runtime.xla_runner import XlaRunner

_CALL = re.compile(r"^    (%\d+)(?::\d+)? = call @(\w+)\((.*?)\) : .*? -> (\(?)", re.MULTILINE)
_RETURN = re.compile(r"^    return (.*?) : ", re.MULTILINE)


@dataclass(frozen=True)
class Calls:
    """A module as the calls of its step: (result, function, arguments, is it many)."""

    calls: tuple[tuple[str, Any, tuple[str, ...], bool], ...]
    returned: tuple[str, ...]


class Stepwise(Devices):
    """Compiles each distinct function of all modules once, and runs the calls of a step in turn.

    Compiling takes nearly all of the time that running a module once does; in this way every
    variant can be run. What is compiled is the text that the module has, function by function.
    """

    def __init__(self) -> None:
        super().__init__("cpu", 1)
        self._functions: dict[str, Any] = {}

    def compile(self, text: str, *, optimise: bool) -> Calls:
        """Compile the functions that are new."""
        main, *functions = split_functions(text)
        compiled: dict[str, Any] = {}
        for function in functions:
            _, name, body = re.split(r"  func\.func private @(\w+)", function, maxsplit=1)
            if body not in self._functions:
                alone = f"module @jit_function {{\n  func.func public @main{body}\n}}\n"
                self._functions[body] = super().compile(alone, optimise=optimise)
            compiled[name] = self._functions[body]
        calls = tuple(
            (result, compiled[name], tuple(arguments.split(", ")), bool(several))
            for result, name, arguments, several in _CALL.findall(main)
        )
        return Calls(calls, tuple(_RETURN.findall(main)[0].split(", ")))

    def run(self, executable: Calls, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Run the step; nothing is donated."""
        values = {f"%arg{place}": array for place, array in enumerate(arguments)}
        for result, function, names, several in executable.calls:
            given = super().run(function, [values[name] for name in names])
            numbered = {f"{result}#{place}": array for place, array in enumerate(given)}
            values |= numbered if several else {result: given[0]}
        return [values[name] for name in executable.returned]


class XlaSide(XlaRunner):
    """The modules of a plan on XLA's CPU."""

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[VariantKey, Module],
        tensors: Mapping[str, Tensor],
        devices: Devices,
    ) -> None:
        super().__init__(
            modules=modules,
            tensors=tensors,
            formats=plan.formats,
            model=plan.whole,
            devices=devices,
            compile=lambda _, module: devices.compile(module.text, optimise=False),
        )

    def saved(self) -> dict[str, Any]:
        """Copy the state."""
        return {name: np.array(first_share(array)) for name, array in self._state.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put a copy of the state back."""
        self._state = {name: self._devices.copy(array) for name, array in state.items()}


class EagerSide(EagerRunner):
    """The same programs stage by stage in plain torch, on the same packed weights."""

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
        state = allocate_state(plan.config.model, plan.config.preset, num_pages=plan.pages)
        for tensor in state.values():
            tensor.zero_()  # as the devices' state is: pages are read where nothing was written
        self._names = tuple(state)
        super().__init__(config=plan.config, tensors={**tensors, **state})

    def saved(self) -> dict[str, Tensor]:
        """Copy the state."""
        return {name: self._tensors[name].clone() for name in self._names}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put a copy of the state back."""
        self._tensors |= {name: tensor.clone() for name, tensor in state.items()}


def run_step(plan: Plan, runner: ProgramRunner, key: VariantKey, step: StepPlan) -> StepResult:
    """Run one step in the variant that is asked for; what it raises is raised here."""
    preset = plan.config.preset
    info = ExecutorInfo(
        max_rows=preset.max_rows,
        max_prefill_tokens=preset.max_prefill_tokens,
        max_context=preset.max_context,
        page_size=preset.page_size,
        num_pages=plan.pages,
        vocab_size=plan.config.model.vocab_size,
        mtp_depths=preset.mtp_depths,
        mtp_always=preset.mtp_always,
    )
    executor = ProgramExecutor(
        info=info,
        catalog=Catalog.of((key,)),
        runner=runner,
        max_pages=preset.max_pages,
        spare_slot=preset.max_rows,
        speculates=plan.config.speculates,
        count_compiles=lambda: 0,
    )
    try:
        return executor.submit(step).result()
    finally:
        executor.close()
