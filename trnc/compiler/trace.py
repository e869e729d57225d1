"""Tracing: from a stage to an exported ATen graph over plain tensors, weights among the inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trnc.errors import CompileError
from trnc.models.registry import build_stage
from trnc.models.stage import Stage, StageSpec, TensorSpec

# Any size above 1 will do for a symbolic dimension while tracing: export specialises 0 and 1. The
# sizes differ so that two dimensions cannot be taken for one.
_EXAMPLE_SIZES = {
    "tokens": 3,
    "rows": 2,
    "pages": 5,
    "slots": 7,
    "positions": 11,
    "blocks": 13,
    "entries": 17,
}
_SMALLEST = {"tokens": 1, "rows": 1, "blocks": 1, "entries": 1}


class _Positional(nn.Module):
    """A stage's function with its tensors by position, as the graph knows them."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._stage.function(**dict(zip(self._stage.inputs, tensors, strict=True)))


def trace_stage(spec: StageSpec) -> ExportedProgram:
    """Return the stage's graph in functional core-ATen form.

    Raises:
        CompileError: the stage cannot be exported; the message names it and torch's reason.
    """
    try:
        with without_warnings():
            return _export(spec)
    except Exception as error:
        raise CompileError(f"stage '{spec.label}' cannot be traced: {error}") from error


def _export(spec: StageSpec) -> ExportedProgram:
    stage = build_stage(spec)
    dims = {name: Dim(name, min=_SMALLEST.get(name, 2)) for name in _EXAMPLE_SIZES}
    # Fake inputs would do for export, but AOTInductor wants real ones; they are small.
    program = torch.export.export(
        _Positional(stage),
        example_inputs(stage),
        dynamic_shapes={"tensors": tuple(_dynamic(s, dims) for s in stage.inputs.values())},
        strict=False,
    )
    functional: ExportedProgram = program.run_decompositions({})
    return functional


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep quiet about torch's own use of its deprecated functions; nobody here can mend it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def example_inputs(stage: Stage) -> tuple[Tensor, ...]:
    """Return one zero tensor for each input of the stage."""
    return tuple(_zeros(spec) for spec in stage.inputs.values())


def _zeros(spec: TensorSpec) -> Tensor:
    sizes = [_EXAMPLE_SIZES[d] if isinstance(d, str) else d for d in spec.shape]
    return torch.zeros(sizes, dtype=spec.torch_dtype)


def _dynamic(spec: TensorSpec, dims: dict[str, Dim]) -> dict[int, Dim] | None:
    return {i: dims[d] for i, d in enumerate(spec.shape) if isinstance(d, str)} or None
