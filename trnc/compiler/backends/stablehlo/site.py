"""What the lowering of an op may know of the step that it is in, beside its own arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

Matmul = Literal["float32", "bfloat16"]

# One row of the table of ops: the op's arguments by position and name, as the canonical text has
# them, after the site. Tensors are jax arrays, packed weights are `DeviceWeight`s.
Row = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Site:
    """`max_rows` is the most token rows that one sequence has in this step: 1 in a decode.

    The step runs on `ranks` cores at once; `rank` [1] int32 is this one's number, None where there
    is one core. `matmul` is what products of a bf16 weight are computed in; they are added up in
    f32 in both.
    """

    max_rows: int
    ranks: int = 1
    rank: jax.Array | None = None
    matmul: Matmul = "float32"
