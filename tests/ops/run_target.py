"""Run ops with one library on fixed inputs and save the results: `run_target.py LIBRARY OUT`.

A process can load kernels of one target only, so comparing targets takes one process for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.ops.weights import packed_weight, random_rows
from trnc.ops import native
from trnc.ops.linear import embedding, linear
from trnc.ops.norm import rms_norm, silu_mul
from trnc.ops.packing import FORMATS


def results() -> dict[str, Tensor]:
    out = {}
    for format in FORMATS:
        x, weight = random_rows(19, 256), packed_weight(format, 50, 256)
        whole = linear(x, weight, random_rows(1, 50)[0], format, 50)
        single = [linear(row[None], weight, random_rows(1, 50)[0], format, 50) for row in x]
        assert torch.equal(whole, torch.cat(single)), f"{format}: a row's bits depend on its batch"
        out[f"linear {format}"] = whole
        out[f"embedding {format}"] = embedding(torch.arange(-1, 50), weight, format, 256)
    x = random_rows(19, 214) * 9
    out["rms_norm"] = rms_norm(x, random_rows(1, 214)[0], 1e-5)
    out["silu_mul"] = silu_mul(x)
    return out


if __name__ == "__main__":
    native.load_kernels(Path(sys.argv[1]))
    torch.save(results(), sys.argv[2])
