"""Routing and experts: the kernels against their references and against the linear layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.weights import error_bound, packed_weight, random_rows
from trnc.ops import native
from trnc.ops.library import reference_mode
from trnc.ops.linear import linear
from trnc.ops.moe import experts, head_linear, route
from trnc.ops.norm import silu_mul
from trnc.ops.packing import FORMATS, unpack

pytestmark = pytest.mark.usefixtures("native_library")

HIDDEN, INNER, EXPERTS, TOP = 64, 32, 7, 3


def stacked(format: str, count: int, n: int, k: int) -> Tensor:
    return torch.stack([packed_weight(format, n, k, seed) for seed in range(count)])


def choices(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Distinct experts for every row, and weights."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP] for _ in range(rows)])
    return ids.int(), torch.rand(rows, TOP, generator=rng)


# route


def test_a_route_by_hand() -> None:
    """The correction moves the choice and not the weights; a closed group is never chosen."""
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.7, 0.2]])
    correction = torch.tensor([0.0, 0.0, 0.0, 0.3, 0.0, 0.0])
    # Groups (0.9, 0.1), (0.6, 0.8), (0.7, 0.2) add up to 1.0, 1.4 and 0.9: the last is closed.
    ids, weights = route(scores.logit(), correction, 3, 2, 3, True, 2.0)
    assert ids.tolist() == [[0, 3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.9, 0.5, 0.6]]) / 2.0 * 2.0)
    _, plain = route(scores.logit(), correction, 3, 2, 3, False, 2.0)
    torch.testing.assert_close(plain, torch.tensor([[1.8, 1.0, 1.2]]))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(2, 37), st.integers(0, 99), st.booleans())
def test_route_is_the_reference(
    rows: int, groups: int, size: int, seed: int, normalize: bool
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, groups * size, generator=rng)
    correction = torch.randn(groups * size, generator=rng)
    top_groups = 1 + seed % groups
    top_k = 1 + seed % min(8, top_groups * size)
    arguments = (correction, groups, top_groups, top_k, normalize, 2.5)
    ids, weights = route(logits, *arguments)
    with reference_mode():
        wanted_ids, wanted = route(logits, *arguments)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


def test_lower_indexes_win_ties() -> None:
    for context in (torch.no_grad(), reference_mode()):
        with context:
            ids, _ = route(torch.zeros(1, 12), torch.zeros(12), 3, 2, 5, True, 1.0)
        assert ids.tolist() == [[0, 1, 2, 3, 4]]


def test_garbage_still_picks_experts_that_exist() -> None:
    logits = torch.full((3, 6), float("nan"))
    logits[1, ::2] = 0.0
    logits[2] = float("inf")
    ids, _ = route(logits, torch.zeros(6), 3, 2, 4, True, 1.0)
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(6))


def test_a_route_does_not_depend_on_other_rows() -> None:
    logits, correction = random_rows(40, 33), random_rows(1, 33)[0]
    arguments = (correction, 3, 2, 8, True, 2.5)
    alone = [route(row[None], *arguments) for row in logits]
    ids, weights = route(logits, *arguments)
    assert torch.equal(ids, torch.cat([i for i, _ in alone]))
    assert torch.equal(weights, torch.cat([w for _, w in alone]))


# experts


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_linear_layers(format: str) -> None:
    """One expert of weight 1 has the very bits of the linear layers."""
    gate_up = stacked(format, EXPERTS, 2 * INNER, HIDDEN)
    down = stacked(format, EXPERTS, HIDDEN, INNER)
    x = random_rows(5, HIDDEN)
    ids = torch.tensor([[3], [0], [3], [6], [3]], dtype=torch.int32)
    out = experts(x, ids, torch.ones(5, 1), gate_up, down, format, format, INNER)
    for row, expert in zip(range(5), ids.flatten().tolist(), strict=True):
        wide = linear(x[row : row + 1], gate_up[expert], None, format, 2 * INNER)
        wanted = linear(silu_mul(wide), down[expert], None, format, HIDDEN)
        assert torch.equal(out[row : row + 1], wanted)


@pytest.mark.parametrize("formats", [("f32", "f32"), ("bf16", "f32"), ("f32", "bf16")])
def test_experts_are_close_to_the_reference(formats: tuple[str, str]) -> None:
    gate_up = stacked(formats[0], EXPERTS, 2 * INNER, HIDDEN)
    down = stacked(formats[1], EXPERTS, HIDDEN, INNER)
    x, (ids, weights) = random_rows(11, HIDDEN), choices(11)
    arguments = (gate_up, down, *formats, INNER)
    out = experts(x, ids, weights, *arguments)
    with reference_mode():
        wanted = experts(x.double(), ids, weights.double(), *arguments)
    step = 2.0**-17 if "bf16" in formats else 2.0**-23  # of the activations of either layer
    assert ((out - wanted).abs() <= 16 * step * wanted.abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("format", ["f32", "i4g32", "i8g32"])
def test_a_row_s_experts_do_not_depend_on_other_rows_or_threads(format: str) -> None:
    gate_up = stacked(format, EXPERTS, 2 * INNER, HIDDEN)
    down = stacked(format, EXPERTS, HIDDEN, INNER)
    x, (ids, weights) = random_rows(60, HIDDEN), choices(60)

    def run(rows: slice) -> Tensor:
        return experts(x[rows], ids[rows], weights[rows], gate_up, down, format, format, INNER)

    native.set_num_threads(1)
    alone = torch.cat([run(slice(row, row + 1)) for row in range(60)])
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for rows in (slice(0, 60), slice(7, 20), slice(31, 35)):
            assert torch.equal(run(rows), alone[rows])
    native.set_num_threads(native.default_threads())


def test_no_rows_give_none() -> None:
    gate_up, down = stacked("f32", 2, 2 * INNER, HIDDEN), stacked("f32", 2, HIDDEN, INNER)
    ids = torch.empty(0, 1, dtype=torch.int32)
    out = experts(
        torch.empty(0, HIDDEN), ids, torch.empty(0, 1), gate_up, down, "f32", "f32", INNER
    )
    assert out.shape == (0, HIDDEN)


# head_linear


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_each_head_has_a_linear_layer_of_its_own(format: str, rows: int) -> None:
    weight = stacked(format, 5, 24, 64)
    x = random_rows(rows * 5, 64).view(rows, 5, 64)
    out = head_linear(x, weight, format, 24)
    for head in range(5):
        wanted = linear(x[:, head].contiguous(), weight[head], None, format, 24)
        assert torch.equal(out[:, head], wanted)
    with reference_mode():
        reference = head_linear(x.double(), weight, format, 24)
    for head in range(5):
        bound = error_bound(x[:, head], unpack(weight[head], format, 24, 64), format) + 1e-6
        assert ((out[:, head] - reference[:, head]).abs() <= bound).all()


def test_wrong_arguments_are_named() -> None:
    gate_up, down = stacked("f32", 2, 2 * INNER, HIDDEN), stacked("f32", 2, HIDDEN, INNER)
    x, one = torch.zeros(1, HIDDEN), torch.ones(1, 1)
    with pytest.raises(RuntimeError, match="experts: id 2 is not one of 2"):
        experts(x, torch.tensor([[2]]).int(), one, gate_up, down, "f32", "f32", INNER)
    with pytest.raises(RuntimeError, match="experts: down has shape"):
        experts(x, torch.tensor([[1]]).int(), one, gate_up, gate_up, "f32", "f32", INNER)
    with pytest.raises(RuntimeError, match="cannot pick 5 experts out of 1 of 3 groups of 12"):
        route(torch.zeros(1, 12), torch.zeros(12), 3, 1, 5, True, 1.0)


def test_ops_trace_with_fake_tensors() -> None:
    gate_up, down = stacked("f32", EXPERTS, 2 * INNER, HIDDEN), stacked("f32", 7, HIDDEN, INNER)
    x, (ids, weights) = random_rows(3, HIDDEN), choices(3)
    arguments = (x, ids, weights, gate_up, down, "f32", "f32", INNER)
    torch.library.opcheck(torch.ops.trnc.experts.default, arguments)
    logits = (random_rows(3, 12), torch.zeros(12), 3, 2, 4, True, 1.5)
    torch.library.opcheck(torch.ops.trnc.route.default, logits)
    heads = (x.view(3, 2, 32), stacked("f32", 2, 5, 32), "f32", 5)
    torch.library.opcheck(torch.ops.trnc.head_linear.default, heads)
