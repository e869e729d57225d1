"""The table's rows compute what the plain-torch references of the same ops compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.pages import (
    NO_PAGE,
    Cache,
    Heads,
    key_place,
    make_step,
    random_text,
    value_place,
)
from tests.ops.weights import GROUPED, packed_weight, random_rows
from trnc import ops
from trnc.compiler.backends.stablehlo import sampling, words
from trnc.compiler.backends.stablehlo.attention import ATTENTION, UPDATES
from trnc.compiler.backends.stablehlo.site import Site
from trnc.compiler.backends.stablehlo.table import TABLE
from trnc.compiler.backends.stablehlo.weights import (
    DeviceWeight,
    abstract_weight,
    device_arrays,
)
from trnc.ops.library import reference_mode
from trnc.ops.sampling import uniform

CPU = Site(1)


def array(tensor: Tensor) -> Any:
    """A tensor as the device has it: int8 caches are bytes of q + 128, 64 bits are 32."""
    if tensor.dtype == torch.int64:
        tensor = tensor.int()
    return jnp.asarray(tensor.numpy())


def row(name: str, *arguments: Any, site: Site = CPU, static: tuple[Any, ...] = ()) -> Any:
    """Run a row compiled, as a step does."""
    return jax.jit(lambda *arrays: TABLE[f"trnc.{name}.default"](site, *arrays, *static))(
        *arguments
    )


def close(got: Any, wanted: Tensor, tolerance: float = 2e-6) -> None:
    got = np.asarray(got)
    assert got.shape == tuple(wanted.shape)
    scale = max(1.0, float(wanted.abs().max()))
    np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=tolerance * scale)


def device_weight(packed: Tensor, format: str) -> DeviceWeight:
    arrays = device_arrays(packed, format)
    shapes = abstract_weight(tuple(packed.shape), format).parts
    assert {n: (a.shape, a.dtype) for n, a in arrays.items()} == {
        n: (s.shape, s.dtype) for n, s in shapes.items()
    }
    return DeviceWeight({name: jnp.asarray(a) for name, a in arrays.items()}, format)


# Weights


@pytest.mark.parametrize(
    ("format", "width"), [("f32", 64), ("bf16", 33), *((g, 64) for g in GROUPED)]
)
def test_linear_and_embedding_on_every_format(format, width):
    packed, bias = packed_weight(format, 40, width), torch.randn(40)
    weight, x = device_weight(packed, format), random_rows(5, width)
    with reference_mode():
        wanted = ops.linear(x, packed, bias, format, 40)
        rows = ops.embedding(torch.tensor([3, -1, 39]), packed, format, width)
    close(row("linear", array(x), weight, array(bias), static=(format, 40)), wanted)
    ids = jnp.array([3, -1, 39], jnp.int32)
    assert (np.asarray(row("embedding", ids, weight, static=(format, width))) == rows.numpy()).all()


def test_norms_and_gates():
    x, weight = random_rows(5, 24), torch.randn(24)
    with reference_mode():
        wanted, gated = ops.rms_norm(x, weight, 0.1), ops.silu_mul(x)
    close(row("rms_norm", array(x), array(weight), static=(0.1,)), wanted)
    close(row("silu_mul", array(x)), gated)


def test_a_matrix_for_each_head():
    packed = torch.stack([packed_weight("bf16", 24, 33, seed) for seed in range(3)])
    x = torch.randn(4, 3, 33)
    with reference_mode():
        wanted = ops.head_linear(x, packed, "bf16", 24)
    close(row("head_linear", array(x), device_weight(packed, "bf16"), static=("bf16", 24)), wanted)


@pytest.mark.parametrize(
    ("groups", "top_groups", "normalize"), [(1, 1, True), (4, 2, True), (4, 1, False)]
)
def test_routing_and_experts(groups, top_groups, normalize):
    torch.manual_seed(groups)
    logits, correction = torch.randn(6, 16), torch.randn(16)
    logits[0, 4:8], correction[4:8] = 3.0, 0.5  # ties go to the lower index
    static = (groups, top_groups, 3, normalize, 2.5)
    with reference_mode():
        ids, weights = ops.route(logits, correction, *static)
        x = torch.randn(6, 32)
        stacks = [
            packed_weight("f32", n, k, seed) for n, k in ((48, 32), (32, 24)) for seed in range(16)
        ]
        gate_up, down = torch.stack(stacks[:16]), torch.stack(stacks[16:])
        wanted = ops.experts(x, ids, weights, gate_up, down, "f32", "f32", 24)
    got_ids, got_weights = row("route", array(logits), array(correction), static=static)
    assert np.asarray(got_ids).tolist() == ids.tolist()
    close(got_weights, weights)
    held = (device_weight(gate_up, "f32"), device_weight(down, "f32"))
    got = row("experts", array(x), array(ids), array(weights), *held, static=("f32", "f32", 24))
    close(got, wanted, 1e-5)


def test_an_expert_that_nobody_chose_may_overflow():
    x, ids = torch.ones(1, 32), torch.zeros(1, 1, dtype=torch.int32)
    gate_up = torch.stack([packed_weight("f32", 48, 32), packed_weight("f32", 48, 32)])
    gate_up.view(torch.float32)[1] = 3e38
    down = torch.stack([packed_weight("f32", 32, 24)] * 2)
    held = (device_weight(gate_up, "f32"), device_weight(down, "f32"))
    got = row("experts", array(x), array(ids), jnp.ones((1, 1)), *held, static=("f32", "f32", 24))
    assert np.isfinite(np.asarray(got)).all()


# Attention. Pages are full of NaN wherever nothing may be read.

HEADS = [
    Heads(kv=2, group=3, dim=16, page_size=16, dtype=dtype)
    for dtype in (torch.float32, torch.float16, torch.int8)
]


def cache_array(rows: Tensor, *, keys: bool = False) -> Any:
    """Stored rows, or with `keys` pages of keys, as bytes of q + 128 where the cache is int8."""
    if rows.dtype != torch.int8:
        return jnp.asarray(rows.numpy())
    bytes_ = rows.numpy().view(np.uint8).copy()
    values = bytes_[:, :, :-4] if keys else bytes_[..., :-4]
    values += np.uint8(128)
    return jnp.asarray(bytes_)


def device_pages(heads: Heads, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
    """Pages of the CPU as the device has them: in an int8 cache its bytes are in plain order."""
    if heads.dtype != torch.int8:
        return cache_array(keys), cache_array(values)
    k, v = torch.empty_like(keys), torch.empty_like(values)
    for slot in range(heads.page_size):
        key = keys.flatten(2)[:, :, key_place(heads, slot)]
        k[:, :, : heads.dim, slot] = key[..., : heads.dim]
        scales = k[:, :, heads.dim :].view(*k.shape[:2], heads.page_size, 4)
        scales[:, :, slot] = key[..., heads.dim :]
        v[:, :, slot] = values.flatten(2)[:, :, value_place(heads, slot)]
    return cache_array(k, keys=True), cache_array(v)


@pytest.mark.parametrize("heads", HEADS, ids=lambda h: str(h.dtype).split(".")[1])
@pytest.mark.parametrize("decode", [True, False])
def test_paged_attention_and_its_write(heads, decode):
    lengths = (33, 16, 1)
    texts = [random_text(heads, n, seed) for seed, n in enumerate(lengths)]
    cache = Cache(heads, texts)
    parts = []
    for index, text in enumerate(texts):
        start = lengths[index] - 1 if decode else min(lengths[index] // 2, 17)
        cache.write(index, text, start)
        parts.append((index, text, start, lengths[index] - start))
    step = make_step(cache, parts, readable=True)
    tables = torch.where(step.tables == NO_PAGE, 0, step.tables)
    site = Site(1 if decode else len(step.q))
    with reference_mode():
        wanted = ops.paged_attention(
            step.q, step.k_new, step.v_new, cache.k, cache.v, step.tables, step.sequences, 0.25
        )
    new = (cache_array(step.k_new), cache_array(step.v_new))
    pages = device_pages(heads, cache.k, cache.v)
    where = (array(tables), array(step.sequences))
    got = row("paged_attention", array(step.q), *new, *pages, *where, site=site, static=(0.25,))
    close(got, wanted)
    with reference_mode():
        ops.kv_write(cache.k, cache.v, step.k_new, step.v_new, step.tables, step.sequences)
    written = jax.jit(lambda *a: UPDATES["kv_write"](site, *a))(*pages, *new, *where)
    for got, wanted in zip(written, device_pages(heads, cache.k, cache.v), strict=True):
        # Page 0 is nobody's here, too: padding is written there.
        np.testing.assert_array_equal(np.asarray(got)[1:], np.asarray(wanted)[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_latent_attention_and_its_write(dtype):
    torch.manual_seed(0)
    latents, size = torch.randn(40, 1, 24), 16
    stored = ops.quantize_kv(latents) if dtype == torch.int8 else latents
    rows, start = stored[:, 0], 20
    pages = torch.full(
        (5, size, rows.shape[1]), -1 if dtype == torch.int8 else float("nan"), dtype=dtype
    )
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    for position in range(start):
        pages[table[0, position // size], position % size] = rows[position]
    q, new = torch.randn(8, 3, 24), rows[start : start + 8]
    sequences = torch.tensor([[0, 6, start]], dtype=torch.int32)  # two rows of padding
    with reference_mode():
        wanted = ops.latent_attention(q, new, pages, table, sequences, 0.2, 16)
    given = (cache_array(new), cache_array(pages), array(table), array(sequences))
    close(row("latent_attention", array(q), *given, site=Site(8), static=(0.2, 16)), wanted)
    with reference_mode():
        ops.latent_write(pages, new, table, sequences)
    (got,) = UPDATES["latent_write"](Site(8), given[1], given[0], *given[2:])
    np.testing.assert_array_equal(np.asarray(got)[1:], np.asarray(cache_array(pages))[1:])


def test_the_bytes_of_an_int8_cache():
    x = torch.randn(7, 2, 16) * torch.tensor([1e-35, 1, 100, 1, 0, 3, 1])[:, None, None]
    x[1, 0, :3] = torch.tensor([127.0, 0.5, 1.5])  # a scale of 1: ties go to the even
    with reference_mode():
        wanted = cache_array(ops.quantize_kv(x))
    got = jax.jit(lambda a: ATTENTION["trnc.quantize_kv.default"](CPU, a))(array(x))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


# Sampling

VOCAB = 203


def logits_of(seed: int, rows: int = 4) -> Tensor:
    torch.manual_seed(seed)
    logits = torch.randn(rows, VOCAB) * 3
    logits[:, 50:60] = logits[:, :1]  # ties
    logits[1, [30, 90]] = 12.0  # at the top, too
    return logits


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            st.sampled_from([0, 1, 2, 30, VOCAB, 10**6]),
            # Not 1/2: two logits of row 1 tie at the top, and the last bit of a sum would decide.
            st.sampled_from([0.0, 0.1, 0.45, 0.9, 0.999, 1.0]),
            st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            st.integers(-(2**63), 2**63 - 1),
            st.integers(0, 2**31 - 1),
        ),
        min_size=4,
        max_size=4,
    ),
    seed=st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_sampling_picks_the_same_tokens(rows, seed):
    logits = logits_of(seed)
    temperature, top_k, top_p, min_p, seeds, index = zip(*rows, strict=True)
    floats = [torch.tensor(values, dtype=torch.float32) for values in (temperature, top_p, min_p)]
    ks = torch.tensor(top_k, dtype=torch.int32)
    wide, outputs = torch.tensor(seeds), torch.tensor(index)
    with reference_mode():
        wanted = ops.sample(logits, floats[0], ks, floats[1], floats[2], wide, outputs)
    halves = wide.numpy().view(np.uint32).reshape(-1, 2)[:, ::-1].copy()
    got = SAMPLE(
        array(logits), array(floats[0]), array(ks), *map(array, floats[1:]), halves, array(outputs)
    )
    assert np.asarray(got).tolist() == wanted.tolist()


SAMPLE = jax.jit(lambda *arrays: TABLE["trnc.sample.default"](CPU, *arrays))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1))
@settings(max_examples=30, deadline=None)
def test_the_noise_has_the_same_bits(seed, index):
    wanted = uniform(torch.tensor([seed]), torch.tensor([index]), VOCAB)
    halves = np.array([[(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF]], np.uint32)
    u = np.exp(-np.exp(-np.asarray(GUMBEL(halves, np.array([index], np.int32)), np.float64)))
    np.testing.assert_allclose(u, wanted.numpy(), rtol=0, atol=2.0**-24 * 1.9)


GUMBEL = jax.jit(lambda seed, index: sampling.gumbel(seed, index, VOCAB))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.sampled_from([27, 30, 31]))
@settings(max_examples=50, deadline=None)
def test_wide_integers(x, y, bits):
    def wide(value: int) -> words.Wide:
        return np.uint32(value >> 32), np.uint32(value & 0xFFFFFFFF)  # type: ignore[return-value]

    total, product, mixed = (
        (int(high) << 32) | int(low) for high, low in WORDS[bits](wide(x), wide(y))
    )
    assert total == (x + y) % 2**64
    assert product == x * y % 2**64
    assert mixed == x ^ (x >> bits)


WORDS = {
    bits: jax.jit(
        lambda x, y, bits=bits: (words.add(x, y), words.multiply(x, y), words.xor_shifted(x, bits))
    )
    for bits in (27, 30, 31)
}


def test_what_is_no_number_is_never_picked():
    logits = logits_of(1, 5)
    logits[0, 7], logits[1], logits[2, 9] = float("nan"), float("-inf"), float("inf")
    logits[3, 20:] = float("-inf")
    chosen = torch.tensor([1, 2, 9, 4, 5])
    with reference_mode():
        greedy = ops.sample_greedy(logits)
        logprob, ids, values = ops.logprobs(logits, chosen, 20)
    assert np.asarray(row("sample_greedy", array(logits))).tolist() == greedy.tolist()
    got = row("logprobs", array(logits), array(chosen), static=(20,))
    assert np.asarray(got[1]).tolist() == ids.tolist()
    for have, want in zip((got[0], got[2]), (logprob, values), strict=True):
        np.testing.assert_allclose(np.asarray(have), want.numpy(), rtol=1e-5, atol=1e-5)


def test_biases_add_up():
    logits = logits_of(2)
    ids = torch.full((4, 8), -1, dtype=torch.int32)
    values = torch.randn(4, 8)
    ids[0, :3], ids[2, 0] = torch.tensor([5, 5, 202]), 0
    with reference_mode():
        wanted = ops.logit_bias(logits, ids, values)
    close(row("logit_bias", array(logits), array(ids), array(values)), wanted)


def test_masks_and_penalties():
    logits = logits_of(3)
    torch.manual_seed(3)
    mask = torch.randint(-(2**31), 2**31 - 1, (4, 7), dtype=torch.int32)
    mask[0] = -1
    ids = torch.full((4, 6), -1, dtype=torch.int32)
    ids[0, :3], ids[2, :6] = torch.tensor([0, 5, 202]), torch.tensor([9, 8, -1, 7, 6, 5])
    counts = torch.randint(0, 3, (4, 6), dtype=torch.int32)
    params = (torch.tensor([1.5, 1, 0.5, 1]), torch.rand(4), torch.rand(4))
    with reference_mode():
        masked = ops.apply_mask(logits, mask)
        penalized = ops.penalize(logits, ids, counts, *params)
    assert np.asarray(row("apply_mask", array(logits), array(mask))).tolist() == masked.tolist()
    got = row("penalize", *map(array, (logits, ids, counts, *params)))
    close(got, penalized)


# Speculation


def test_drafts_are_accepted_up_to_the_first_wrong_one():
    # Wrong and then right; right, also in a row behind the last; all right; nothing drafted.
    sampled = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 5, 5, 5, 5, 3, 3])
    drafted = torch.tensor([0, 9, 2, 3, 0, 5, 6, 7, 0, 5, 5, 5, 0, 3])
    sequences = torch.tensor([[0, 4, 7], [4, 3, 0], [8, 4, 3], [12, 1, 9]])
    with reference_mode():
        wanted = ops.accept_drafts(sampled, drafted, sequences.int())
    got = row("accept_drafts", *map(array, (sampled, drafted, sequences)), site=Site(4))
    assert [np.asarray(part).tolist() for part in got] == [part.tolist() for part in wanted]
    assert wanted[0].tolist() == [0, 2, 3, 0]


def test_what_a_slot_keeps():
    tokens, states = torch.arange(6), torch.randn(6, 4)
    slots, rows, picked = torch.tensor([4, 1]), torch.tensor([2, 0]), torch.tensor([90, 91])
    hidden = torch.randn(3, 4)
    written = UPDATES["store_tokens"](CPU, *map(array, (tokens, slots, picked)))
    kept = UPDATES["store_states"](CPU, *map(array, (states, slots, hidden, rows)))
    with reference_mode():
        ops.store_tokens(tokens, slots, picked)
        ops.store_states(states, slots, hidden, rows)
    assert np.asarray(written[0]).tolist() == tokens.tolist()
    np.testing.assert_array_equal(np.asarray(kept[0]), states.numpy())
