"""Lowering on the CPU: what is fused in a stage's graph, and called directly, when it is compiled.

The canonical graph of a stage stays in primitive operators. `rms_norm`,
`silu_mul` and the addition of a residual are small beside a linear layer, but each costs a call, a
pass over memory and, at few rows, a barrier of the thread pool. So the norm becomes a part of the
linear after it, the gate and the residual of the one before, `trnc::fused_linear`, which gives the
same bits.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

import trnc.ops  # noqa: F401  declares the operators that this module names

_OPS = torch.ops.trnc
_ADD = torch.ops.aten.add.Tensor


# Operators that a compiled stage calls as C functions of the kernels' library (bindings.h), which a
# process loads before any stage: a call through torch's dispatcher costs some microseconds.
DIRECT_CALLS = {
    _OPS.fused_linear.default: (
        "AOTITorchError aoti_torch_cpu_fused_linear(AtenTensorHandle x, AtenTensorHandle weight, "
        "AtenTensorHandle* bias, AtenTensorHandle* norm, AtenTensorHandle* residual, "
        "const char* format, int64_t out_features, double eps, int32_t gated, "
        "AtenTensorHandle* result)"
    ),
    _OPS.paged_attention.default: (
        "AOTITorchError aoti_torch_cpu_paged_attention(AtenTensorHandle q, AtenTensorHandle k_new, "
        "AtenTensorHandle v_new, AtenTensorHandle k_pages, AtenTensorHandle v_pages, "
        "AtenTensorHandle block_tables, AtenTensorHandle sequences, double scale, "
        "AtenTensorHandle* result)"
    ),
}


def lowering_digest() -> str:
    """Return a sha-256 of this module's code: a factor of every artifact that it shapes."""
    tree = ast.dump(ast.parse(Path(__file__).read_text()))
    return hashlib.sha256(tree.encode()).hexdigest()


def fuse(module: GraphModule) -> None:
    """Replace every linear of `module`, with what it can be fused with, in place."""
    for linear in module.graph.find_nodes(op="call_function", target=_OPS.linear.default):
        _fuse_one(linear)
    module.graph.eliminate_dead_code()
    module.recompile()


def _fuse_one(linear: Node) -> None:
    x, weight, bias, format, out_features = linear.args
    before, norm, eps = _prologue(x)
    residual, gated, last = _epilogue(linear)
    arguments = (before, weight, bias, norm, residual, format, out_features, eps, gated)
    with last.graph.inserting_before(last):
        fused = last.graph.call_function(_OPS.fused_linear.default, arguments)
    fused.meta = last.meta.copy()
    last.replace_all_uses_with(fused)


def _prologue(x: Any) -> tuple[Any, Any, float]:
    """Return the rows before the norm, and its weight and epsilon."""
    if isinstance(x, Node) and len(x.users) == 1 and x.target == _OPS.rms_norm.default:
        rows, norm, eps = x.args
        assert isinstance(eps, float)
        return rows, norm, eps
    return x, None, 0.0


def _epilogue(linear: Node) -> tuple[Node | None, bool, Node]:
    """Return the residual, whether gated, and the node whose value the fused linear has."""
    users = list(linear.users)
    if len(users) != 1:
        return None, False, linear
    (user,) = users
    if user.target == _OPS.silu_mul.default:
        return None, True, user
    if user.target == _ADD and not user.kwargs:
        left, right = user.args
        other = right if left is linear else left
        if isinstance(other, Node) and other is not linear and _same_type(other, user, linear):
            return other, False, user
    return None, False, linear


def _same_type(*nodes: Node) -> bool:
    """Whether all values have one shape and dtype: nothing is broadcast or converted."""
    first, *others = (node.meta["val"] for node in nodes)
    return all(o.shape == first.shape and o.dtype == first.dtype for o in others)
