"""Run ops with one library on fixed inputs and save the results: `run_target.py LIBRARY OUT`.

A process can load kernels of one target only, so comparing targets takes one process for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.ops.pages import Cache, Heads, make_step, random_text
from tests.ops.weights import packed_weight, random_rows
from trnc.ops import native
from trnc.ops.attention import paged_attention
from trnc.ops.linear import embedding, linear
from trnc.ops.norm import rms_norm, silu_mul
from trnc.ops.packing import FORMATS
from trnc.ops.sampling import logprobs, sample, sample_greedy


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
    return out | attention_results() | sampling_results()


def attention_results() -> dict[str, Tensor]:
    out = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
        for dim in (64, 52):
            heads = Heads(kv=2, group=3, dim=dim, page_size=32, dtype=dtype)
            text = random_text(heads, 600, 1)
            cache = Cache(heads, [text])
            cache.write(0, text, 450)
            part = (0, text, 450, 150)
            for parts in ([part], [part] * 20):  # segments apart, and in one go
                step = make_step(cache, parts)
                new, layout = (step.k_new, step.v_new), (step.tables, step.sequences)
                result = paged_attention(step.q, *new, cache.k, cache.v, *layout, dim**-0.5)
                out[f"attention {dtype} {dim} x{len(parts)}"] = result.flatten(1)
    return out


def sampling_results() -> dict[str, Tensor]:
    x, one = random_rows(40, 5000) * 3, torch.ones(40)
    seeds = torch.arange(40)
    picks = {
        "greedy": sample_greedy(x),
        "sample": sample(x, one, one.int() * 0, one, one * 0, seeds, seeds),
        "filtered": sample(x, one, one.int() * 50, one * 0.9, one * 0.01, seeds, seeds),
        "nucleus": sample(x, one, one.int() * 0, one * 0.9, one * 0, seeds, seeds),
    }
    chosen, ids, values = logprobs(x, picks["sample"], 20)
    lists = {"ids": ids, "values": values, "chosen": chosen[:, None]}
    return {name: pick[:, None] for name, pick in picks.items()} | lists


if __name__ == "__main__":
    native.load_kernels(Path(sys.argv[1]))
    torch.save(results(), sys.argv[2])
