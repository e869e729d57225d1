from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trnc.ops import native, sampling
from trnc.ops.library import reference_mode
from trnc.ops.sampling import (
    apply_mask,
    logit_bias,
    logprobs,
    penalize,
    sample,
    sample_greedy,
)

pytestmark = pytest.mark.usefixtures("native_library")

INF, NAN = float("inf"), float("nan")
VOCABULARIES = (1, 2, 15, 16, 17, 255, 256, 257, 1000, 4096, 4099, 9000)


@pytest.fixture(autouse=True)
def _restore_threads(native_library: Path) -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


@dataclass(frozen=True)
class Params:
    """One row's parameters; `seed` and `output_index` of row r go up by 1 and 3 a row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    output_index: int = 0


def draw(logits: Tensor, rows: list[Params]) -> Tensor:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    return sample(
        logits,
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        column("seed", torch.int64),
        column("output_index", torch.int64),
    )


def draw_many(logits: Tensor, params: Params, rows: int) -> Tensor:
    """Draw `rows` times from the one row `logits` [V], with seeds from params.seed on."""
    each = [replace(params, seed=params.seed + r, output_index=3 * r) for r in range(rows)]
    return draw(logits.expand(rows, -1).contiguous(), each)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# Few distinct values, so that ties fall on every cut.
coarse_logits = st.lists(st.sampled_from([-INF, -2.0, -0.5, 0.0, 0.5, 1.0, 3.0]), min_size=1)
params = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 7, 400]),
    top_p=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    output_index=st.integers(0, 2**40),
)


def kept_tokens(logits: Tensor, p: Params) -> set[int]:
    """The tokens that pass the filters, one rule after another, in f64."""
    x = logits.double().numpy()
    order = [i for i in np.argsort(-x, kind="stable") if x[i] > -INF]
    weight = {i: math.exp((x[i] - x[order[0]]) / p.temperature) for i in order}
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1:
        need, mass, kept = p.top_p * sum(weight[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            mass += weight[i]
            if mass >= need * (1 - 1e-12):
                break
        order = kept
    return {i for i in order if weight[i] >= p.min_p}


def expected_pick(logits: Tensor, p: Params) -> int:
    if p.temperature == 0 or not (logits > -INF).any():
        return int(logits.argmax())
    u = sampling.uniform(torch.tensor([p.seed]), torch.tensor([p.output_index]), len(logits))[0]
    score = logits.double() / p.temperature - (-u.double().log()).log()
    return max(kept_tokens(logits, p), key=lambda i: (score[i].item(), -i))


@settings(max_examples=300, deadline=None)
@given(coarse_logits, params)
def test_picks_are_those_of_the_rules(logits: list[float], p: Params) -> None:
    row = torch.tensor(logits)
    wanted = expected_pick(row, p)
    assert draw(row[None], [p]).item() == wanted
    with reference_mode():
        assert draw(row[None], [p]).item() == wanted


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize(
    "p",
    [
        Params(),
        Params(temperature=0.3, min_p=0.02),
        Params(top_k=5),
        Params(top_k=300, top_p=0.8),
        Params(top_p=0.95),
        Params(top_p=0.5, temperature=3.0),
        Params(top_k=40, top_p=0.9, min_p=0.1),
        Params(top_k=200, top_p=0.99, temperature=1e-3),
        Params(top_p=0.99, temperature=1e-3),
    ],
)
def test_picks_in_large_vocabularies(vocab: int, p: Params) -> None:
    logits = random_logits(12, vocab, seed=vocab)
    rows = [replace(p, seed=r, output_index=r * r) for r in range(12)]
    wanted = [expected_pick(row, each) for row, each in zip(logits, rows, strict=True)]
    assert draw(logits, rows).tolist() == wanted
    with reference_mode():
        assert draw(logits, rows).tolist() == wanted


@pytest.mark.parametrize(
    ("p", "wanted"),
    [
        (Params(top_k=3), {4, 0, 2}),  # 2 and 3 tie: the lower id stays
        (Params(top_p=0.6), {4, 0}),  # weights 8, 4, 2, 2, 1 of 17: 12 / 17 reaches 0.6
        (Params(top_p=12 / 17 + 0.01), {4, 0, 2}),
        (Params(top_k=2, top_p=0.66), {4}),  # renormalised: 8 / 12 reaches it
        (Params(top_k=2, top_p=0.67), {4, 0}),
        (Params(top_p=0.0), {4}),
        (Params(min_p=0.26), {4, 0}),
        (Params(min_p=0.24), {4, 0, 2, 3}),
        (Params(min_p=7.0), {4}),
        (Params(top_k=1), {4}),
        (Params(), {0, 1, 2, 3, 4}),
    ],
)
def test_filters_keep_what_they_say(p: Params, wanted: set[int]) -> None:
    logits = torch.tensor([4.0, 1.0, 2.0, 2.0, 8.0]).log()
    assert set(draw_many(logits, p, 400).tolist()) == wanted
    with reference_mode():
        assert set(draw_many(logits, p, 400).tolist()) == wanted


@pytest.mark.parametrize(
    "p", [Params(), Params(temperature=2.0), Params(top_k=4), Params(top_p=0.85)]
)
def test_draws_follow_the_distribution(p: Params) -> None:
    """Chi-square over 20,000 seeds, at 5 sigma of its own mean; the seeds are fixed."""
    logits = torch.tensor([0.5, -1.0, 2.0, 1.0, -INF, 0.0, 1.5, -3.0])
    weight = (logits.double() / p.temperature).exp().numpy()
    expected = np.array([weight[i] if i in kept_tokens(logits, p) else 0.0 for i in range(8)])
    expected *= 20_000 / expected.sum()
    counts = np.bincount(draw_many(logits, p, 20_000).numpy(), minlength=8)
    assert (counts[expected == 0] == 0).all()
    used = expected > 0
    chi_square = ((counts - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_noise_is_the_documented_stream() -> None:
    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    for seed, index in [(0, 0), (1, 0), (0, 1), (-1, 5), (2**63 - 1, 2**62), (-(2**63), 3)]:
        key = mix((mix(seed % 2**64) + index * 0x9E3779B97F4A7C15) % 2**64)
        hashes = [mix((key + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(50)]
        u = sampling.uniform(torch.tensor([seed]), torch.tensor([index]), 50)[0]
        assert u.tolist() == [((h >> 41) + 0.5) / 2**23 for h in hashes]


def test_kernels_use_the_same_noise() -> None:
    """Equal logits make the pick the token of the largest u, whose bits must be the same."""
    logits = torch.zeros(300, 700)
    seeds = torch.randint(-(2**63), 2**63 - 1, (300,), generator=torch.Generator().manual_seed(1))
    rows = [Params(seed=int(s), output_index=i * 977) for i, s in enumerate(seeds.tolist())]
    u = sampling.uniform(seeds, torch.arange(300) * 977, 700)
    assert torch.equal(draw(logits, rows), u.argmax(dim=1))
    filtered = [replace(row, top_k=699) for row in rows]
    assert torch.equal(draw(logits, filtered), u[:, :699].argmax(dim=1))


@pytest.mark.parametrize(("seed", "tied"), [(1304, [7268, 7488]), (1480, [1455, 14287])])
def test_equal_scores_go_to_the_lower_id(seed: int, tied: list[int]) -> None:
    """Seeds whose largest u falls on two tokens, near each other and far apart."""
    u = sampling.uniform(torch.tensor([seed]), torch.tensor([0]), 20_000)[0]
    assert (u == u.max()).nonzero().flatten().tolist() == tied
    for threads in (1, 2):
        native.set_num_threads(threads)
        assert draw(torch.zeros(1, 20_000), [Params(seed=seed)]).item() == tied[0]


@pytest.mark.parametrize("vocab", [17, 300, 9000])
def test_a_row_s_tokens_are_the_same_in_every_batch(vocab: int) -> None:
    logits = random_logits(24, vocab)
    kinds = [Params(), Params(top_p=0.9), Params(top_k=9), Params(min_p=0.1), Params(0.0)]
    rows = [replace(kinds[r % 5], seed=r, output_index=2 * r) for r in range(24)]
    chosen = torch.arange(24) % vocab
    native.set_num_threads(1)
    alone = torch.cat([draw(logits[r : r + 1], rows[r : r + 1]) for r in range(24)])
    lp = [logprobs(logits[r : r + 1], chosen[r : r + 1], 9) for r in range(24)]
    wanted = [torch.cat(parts) for parts in zip(*lp, strict=True)]
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for first, last in [(0, 24), (3, 4), (5, 12), (23, 24), (0, 2)]:
            cut = slice(first, last)
            assert torch.equal(draw(logits[cut], rows[cut]), alone[cut])
            assert torch.equal(sample_greedy(logits[cut]), logits[cut].argmax(dim=1))
            for got, want in zip(logprobs(logits[cut], chosen[cut], 9), wanted, strict=True):
                assert torch.equal(got, want[cut])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(VOCABULARIES), st.integers(0, 99), st.integers(1, 3))
def test_greedy_takes_the_lowest_of_the_largest(vocab: int, seed: int, spread: int) -> None:
    logits = random_logits(5, vocab, seed, scale=spread).round()
    logits[1, seed % vocab] = NAN
    wanted = logits.nan_to_num(nan=-INF).numpy().argmax(axis=1)
    assert sample_greedy(logits).tolist() == wanted.tolist()
    assert draw(logits, [Params(temperature=0.0, top_k=2, seed=i) for i in range(5)]).tolist() == (
        wanted.tolist()
    )


@pytest.mark.parametrize("vocab", [1, 20, 300, 5000])
@pytest.mark.parametrize("p", [Params(), Params(top_k=3), Params(top_p=0.5), Params(0.0)])
def test_broken_rows_give_valid_ids(vocab: int, p: Params) -> None:
    logits = random_logits(7, vocab)
    logits[0], logits[1] = NAN, -INF
    logits[2, vocab // 2 :] = NAN
    logits[3, vocab - 1] = INF
    logits[4, vocab // 2 :] = -INF
    logits[4, 0] = NAN
    rows = [replace(p, seed=r) for r in range(7)]
    ids = draw(logits, rows)
    with reference_mode():
        assert torch.equal(draw(logits, rows), ids)
    assert ids[0] == ids[1] == 0
    assert ids[3] == vocab - 1
    got = logprobs(logits, ids, min(vocab, 20))
    with reference_mode():
        wanted = logprobs(logits, ids, min(vocab, 20))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(VOCABULARIES), st.integers(0, 20), st.integers(0, 99), st.booleans())
def test_logprobs_are_those_of_f64(vocab: int, top: int, seed: int, coarse: bool) -> None:
    top = min(top, vocab)
    logits = random_logits(3, vocab, seed, scale=5.0)
    logits = logits.round() if coarse else logits
    logits[2, seed % vocab] = 200.0
    chosen = torch.tensor([0, vocab - 1, seed % vocab])
    values = logits.double().log_softmax(dim=1)
    order = torch.from_numpy(np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :top].copy())
    wanted = (values.gather(1, chosen[:, None])[:, 0], order, values.gather(1, order))
    picked, ids, listed = logprobs(logits, chosen, top)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), order)
    torch.testing.assert_close(picked.double(), wanted[0], rtol=3e-7, atol=2e-6)
    torch.testing.assert_close(listed.double(), wanted[2], rtol=3e-7, atol=2e-6)


def test_a_nan_logit_has_no_probability() -> None:
    logits = torch.tensor([[1.0, NAN, 1.0]])
    picked, ids, values = logprobs(logits, torch.tensor([1]), 3)
    assert picked.item() == -INF
    assert ids.tolist() == [[0, 2, 1]]
    assert values[0].tolist() == pytest.approx([-math.log(2)] * 2 + [-INF])


def test_every_logit_equal() -> None:
    """All tokens tie at every cut: candidates are as many as the vocabulary."""
    logits = torch.full((2, 9000), 1.5)
    _, ids, values = logprobs(logits, torch.tensor([7, 8]), 20)
    assert ids.tolist() == [list(range(20))] * 2
    assert values.allclose(torch.tensor(-math.log(9000)))
    assert draw_many(logits[0], Params(top_k=50), 200).max() < 50
    assert draw_many(logits[0], Params(top_p=0.01), 200).max() < 90


def test_logit_bias_adds_where_it_says() -> None:
    logits = random_logits(3, 300)
    logits[2, 5] = -INF
    ids = torch.tensor([[3, 299, -1], [-1, -1, -1], [5, 0, 5]], dtype=torch.int32)
    values = torch.tensor([[1.0, -100.0, 9.0], [5.0, 5.0, NAN], [100.0, 0.5, 1.0]])
    before, wanted = logits.clone(), logits.clone()
    wanted[0, 3] += 1.0
    wanted[0, 299] += -100.0
    wanted[2, 0] += 0.5
    assert torch.equal(logit_bias(logits, ids, values), wanted)
    with reference_mode():
        assert torch.equal(logit_bias(logits, ids, values), wanted)
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    logits = torch.empty(0, 30)
    assert sample_greedy(logits).shape == draw(logits, []).shape == (0,)
    assert logprobs(logits, torch.empty(0, dtype=torch.int64), 3)[1].shape == (0, 3)


def test_references_keep_f64() -> None:
    logits, ids = random_logits(2, 30).double(), torch.zeros(2, 1, dtype=torch.int32)
    with reference_mode():
        assert logit_bias(logits, ids, torch.ones(2, 1)).dtype == torch.float64
        assert logprobs(logits, torch.tensor([0, 1]), 3)[2].dtype == torch.float64
        assert draw(logits, [Params(), Params()]).dtype == torch.int64


def test_wrong_arguments_are_named() -> None:
    logits, row = random_logits(2, 30), torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"logits: expected .* Float, got .* Double"):
        sample_greedy(logits.double())
    with pytest.raises(RuntimeError, match="logits: the vocabulary is empty"):
        sample_greedy(torch.zeros(2, 0))
    with pytest.raises(RuntimeError, match=r"top_k: expected .* Int, got .* Float"):
        sample(logits, row, row, row, row, row.long(), row.long())
    with pytest.raises(RuntimeError, match="seed: expected 2 elements, got 3"):
        sample(logits, row, row.int(), row, row, torch.zeros(3).long(), row.long())
    with pytest.raises(RuntimeError, match="chosen: 30 is not in a vocabulary of 30"):
        logprobs(logits, torch.tensor([0, 30]), 3)
    with pytest.raises(RuntimeError, match=r"top: 31 is not within 0\.\.30"):
        logprobs(logits, torch.tensor([0, 1]), 31)
    with pytest.raises(RuntimeError, match="ids: 30 is not in a vocabulary of 30"):
        logit_bias(logits, torch.full((2, 1), 30, dtype=torch.int32), torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="ids, values: expected one row for each of 2 rows"):
        logit_bias(logits, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))


def test_ops_trace_with_fake_tensors() -> None:
    logits, row = random_logits(2, 30), torch.ones(2)
    op = torch.ops.trnc
    torch.library.opcheck(
        op.logit_bias.default, (logits, torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 3))
    )
    torch.library.opcheck(op.sample_greedy.default, (logits,))
    torch.library.opcheck(
        op.sample.default, (logits, row, row.int(), row, row * 0, row.long(), row.long())
    )
    torch.library.opcheck(op.logprobs.default, (logits, row.long(), 5))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(VOCABULARIES), st.integers(0, 99), st.data())
def test_a_mask_leaves_what_its_bits_say(vocab: int, seed: int, data: st.DataObject) -> None:
    logits = random_logits(3, vocab, seed)
    logits[1, seed % vocab] = NAN
    allowed = data.draw(st.sets(st.integers(0, vocab - 1)))
    words = np.zeros((3, -(-vocab // 32)), np.uint32)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    words[1:] = 0xFFFFFFFF
    mask = torch.from_numpy(words.view(np.int32))
    got = apply_mask(logits, mask)
    kept = [t for t in range(vocab) if got[0, t] != -INF]
    assert kept == sorted(allowed)
    assert torch.equal(got[0, kept], logits[0, kept])
    assert torch.equal(got[1:].view(torch.int32), logits[1:].view(torch.int32))
    with reference_mode():
        assert apply_mask(logits, mask).equal(got) or got.isnan().any()


finite = st.floats(-2, 2, width=32)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(VOCABULARIES), st.integers(0, 99), finite, finite, st.floats(0.1, 2), st.data()
)
def test_penalties_are_their_formula(
    vocab: int, seed: int, f: float, p: float, r: float, data: st.DataObject
) -> None:
    logits = random_logits(2, vocab, seed)
    logits[0, seed % vocab] = -INF
    counts = data.draw(st.dictionaries(st.integers(0, vocab - 1), st.integers(0, 5), max_size=20))
    width = len(counts) + 3
    ids, numbers = torch.full((2, width), -1), torch.full((2, width), 9)
    for i, (token, count) in enumerate(counts.items()):
        ids[0, i], numbers[0, i] = token, count
    ids[0, len(counts) + 1 :] = 0  # after the first -1 nothing counts
    row = [torch.tensor([value, 1.5], dtype=torch.float32) for value in (r, f, p)]
    arguments = (logits, ids.int(), numbers.int(), *row)
    wanted = logits.clone()
    for token, count in counts.items():
        x = logits[0, token]
        x = x / row[0][0] if x > 0 else x * row[0][0]
        x = x - row[1][0] * count
        wanted[0, token] = x - row[2][0] if count else x
    assert torch.equal(penalize(*arguments), wanted)
    with reference_mode():
        assert torch.equal(penalize(*arguments), wanted)


def test_masks_and_penalties_name_wrong_arguments() -> None:
    logits, one = random_logits(2, 30), torch.ones(2)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="mask: expected 2 rows of 1 words"):
        apply_mask(logits, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="ids: 30 is not in a vocabulary of 30"):
        penalize(logits, ids + 30, ids, one, one, one)
    with pytest.raises(RuntimeError, match="frequency: expected 2 elements, got 3"):
        penalize(logits, ids, ids, one, torch.ones(3), one)


def test_masks_and_penalties_trace_with_fake_tensors() -> None:
    logits, one = random_logits(2, 30), torch.ones(2)
    ids = torch.zeros(2, 3, dtype=torch.int32)
    torch.library.opcheck(torch.ops.trnc.apply_mask.default, (logits, ids[:, :1].contiguous()))
    torch.library.opcheck(torch.ops.trnc.penalize.default, (logits, ids, ids, one, one, one))
