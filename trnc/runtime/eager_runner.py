"""The eager runner: the same programs, stage by stage in plain torch. The oracle for all others.

Nothing is traced or compiled, and every operator is its reference, also where native kernels are
loaded. With fp64 tensors it computes in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from trnc.compiler.program import Program, ProgramConfig, Update, build_program
from trnc.core import VariantKey
from trnc.models.registry import build_stage
from trnc.ops.library import reference_mode
from trnc.runtime.inputs import Inputs


class EagerRunner:
    """Runs any variant over `tensors`, which holds `weight.*` and `state.*` (written in place).

    `dtype` is what activations are computed in, float32 or float64; for float64 the cache should be
    float64 too (`kv_dtype` of the preset in `config`). `operators` is a context in which the
    operators run: their references, or with `contextlib.nullcontext` whatever kernels are loaded.
    """

    def __init__(
        self,
        *,
        config: ProgramConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        operators: Callable[[], AbstractContextManager[object]] = reference_mode,
    ) -> None:
        self._config = config
        self._tensors = dict(tensors)
        self._dtype = dtype
        self._operators = operators

    def run(self, key: VariantKey, inputs: Inputs) -> list[Tensor]:
        """Run one step and return what the host reads back."""
        program = build_program(self._config, key)
        values = self.evaluate(program, inputs)
        return [values[name] for name in program.outputs]

    def evaluate(self, program: Program, inputs: Inputs) -> dict[str, Tensor]:
        """Run a program and return all its values by name, `value.logits` among them."""
        values = self._tensors | {f"input.{name}": tensor for name, tensor in inputs.items()}
        with torch.inference_mode(), self._operators():
            for step in program.steps:
                arguments = [values[name] for name in step.inputs]
                if isinstance(step, Update):
                    getattr(torch.ops.trnc, step.op)(*arguments)
                    continue
                stage = build_stage(step.stage)
                outputs = stage.function(**dict(zip(stage.inputs, arguments, strict=True)))
                values |= zip(step.outputs, map(self._widen, outputs), strict=True)
        return values

    def _widen(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.dtype == torch.float32 else tensor
