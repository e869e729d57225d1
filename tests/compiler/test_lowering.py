"""What the CPU backend fuses: by the ops that are left in a graph, and by the values they give."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.ops.weights import packed_weight, random_rows
from trnc import ops
from trnc.compiler.backends.lowering import fuse
from trnc.ops.library import reference_mode

FORMAT, K = "i4g32", 64


class Block(nn.Module):
    """A norm, a gate and a residual, each beside a linear."""

    def forward(self, x: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        wide = ops.linear(ops.rms_norm(x, norm, 1e-5), up, None, FORMAT, 2 * K)
        return (x + ops.linear(ops.silu_mul(wide), down, None, FORMAT, K),)


class Shared(nn.Module):
    """A norm and a linear that others read, too, and a sum that broadcasts."""

    def forward(self, x: Tensor, norm: Tensor, up: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        normed = ops.rms_norm(x, norm, 1e-5)
        wide = ops.linear(normed, up, None, FORMAT, 2 * K)
        return normed, wide + wide, wide * 2, ops.linear(x, up, None, FORMAT, 2 * K) + one


def lowered(module: nn.Module, *inputs: Tensor) -> GraphModule:
    program = torch.export.export(module, inputs).run_decompositions({})
    graph = program.module()
    assert isinstance(graph, GraphModule)
    fuse(graph)
    return graph


def called(graph: GraphModule) -> Counter[str]:
    return Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_function")


def test_a_block_is_two_calls() -> None:
    inputs = (
        random_rows(3, K),
        random_rows(1, K)[0],
        packed_weight(FORMAT, 2 * K, K),
        packed_weight(FORMAT, K, K),
    )
    graph = lowered(Block(), *inputs)
    assert called(graph) == {"trnc.fused_linear.default": 2}
    with reference_mode():
        assert torch.equal(graph(*inputs)[0], Block()(*inputs)[0])


def test_what_others_read_or_what_broadcasts_is_left_alone() -> None:
    inputs = (
        random_rows(3, K),
        random_rows(1, K)[0],
        packed_weight(FORMAT, 2 * K, K),
        random_rows(1, 2 * K),
    )
    graph = lowered(Shared(), *inputs)
    calls = called(graph)
    assert calls["trnc.fused_linear.default"] == 2
    assert calls["trnc.rms_norm.default"] == 1
    assert calls["aten.add.Tensor"] == 2
    with reference_mode():
        for got, wanted in zip(graph(*inputs), Shared()(*inputs), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_residual_may_stand_on_either_side(swapped: bool) -> None:
    class Residual(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            out = ops.linear(x, weight, None, FORMAT, K)
            return out + x if swapped else x + out

    graph = lowered(Residual(), random_rows(3, K), packed_weight(FORMAT, K, K))
    assert called(graph) == {"trnc.fused_linear.default": 1}
