"""Every weight of a model under its canonical name, with its shape.

- `embed`, `norm`, `head`: no `head` where it is tied.
- `layers.{i}.attn_norm|q|k|v|o|mlp_norm|gate|up|down`; `q_bias` and so on beside a matrix that has
  one, `q_norm` and `k_norm` where the config says so.
- latent attention, instead of q, k and v: `q_a`, `q_a_norm`, `q_b` (or `q`), `kv_a`, `kv_a_norm`,
  `kv_b`.
- routed experts, instead of gate, up and down: `router`, `router_correction`,
  `experts.{e}.gate|up|down`, `shared_gate|shared_up|shared_down`.
- a layer of multi-token prediction, which comes after the others, has beside these `enorm`,
  `hnorm`, `eh_proj` and `shared_norm`, and `draft_ids` where it drafts only some tokens.
"""

from __future__ import annotations

from typing import Protocol

Shapes = dict[str, tuple[int, ...]]


class ExpertShapes(Protocol):
    """What this module needs of a `MoeConfig`."""

    @property
    def num_experts(self) -> int: ...  # noqa: D102
    @property
    def inner(self) -> int: ...  # noqa: D102
    @property
    def shared_inner(self) -> int: ...  # noqa: D102


class LatentShapes(Protocol):
    """What this module needs of an `MlaConfig`."""

    @property
    def q_rank(self) -> int | None: ...  # noqa: D102
    @property
    def kv_rank(self) -> int: ...  # noqa: D102
    @property
    def nope_dim(self) -> int: ...  # noqa: D102
    @property
    def rope_dim(self) -> int: ...  # noqa: D102
    @property
    def value_dim(self) -> int: ...  # noqa: D102


class WeightShapes(Protocol):
    """What this module needs of a `ModelConfig` (which lives above it)."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def qk_norm(self) -> bool: ...  # noqa: D102
    @property
    def qkv_bias(self) -> bool: ...  # noqa: D102
    @property
    def output_bias(self) -> bool: ...  # noqa: D102
    @property
    def mlp_bias(self) -> bool: ...  # noqa: D102
    @property
    def tie_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def moe(self) -> ExpertShapes | None: ...  # noqa: D102
    @property
    def mla(self) -> LatentShapes | None: ...  # noqa: D102
    @property
    def mtp_layers(self) -> int: ...  # noqa: D102
    @property
    def mtp_vocab(self) -> int: ...  # noqa: D102
    def is_moe(self, index: int) -> bool: ...  # noqa: D102


def weight_shapes(config: WeightShapes) -> Shapes:
    """Return canonical name -> shape of every weight, in the order of the computation."""
    shapes: Shapes = {"embed": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers + config.mtp_layers):
        layer = _attention(config) | _mlp(config, index)
        if index in mtp_layers(config):
            layer = _mtp(config.hidden_size, config.mtp_vocab) | layer
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def mtp_layers(config: WeightShapes) -> range:
    """Return the indexes of the layers of multi-token prediction."""
    return range(config.num_layers, config.num_layers + config.mtp_layers)


def _attention(config: WeightShapes) -> Shapes:
    hidden = config.hidden_size
    if config.mla is not None:
        return _latent_attention(config, config.mla)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: Shapes = {"attn_norm": (hidden,)}
    layer |= {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden)}
    if config.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    layer["o"] = (hidden, q)
    if config.output_bias:
        layer["o_bias"] = (hidden,)
    return layer


def _latent_attention(config: WeightShapes, mla: LatentShapes) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    q = heads * (mla.nope_dim + mla.rope_dim)
    layer: Shapes = {"attn_norm": (hidden,)}
    if mla.q_rank is None:
        layer["q"] = (q, hidden)
    else:
        layer |= {"q_a": (mla.q_rank, hidden), "q_a_norm": (mla.q_rank,), "q_b": (q, mla.q_rank)}
    layer |= {"kv_a": (mla.kv_rank + mla.rope_dim, hidden), "kv_a_norm": (mla.kv_rank,)}
    layer["kv_b"] = (heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    layer["o"] = (hidden, heads * mla.value_dim)
    return layer


def _mlp(config: WeightShapes, index: int) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.moe is not None and config.is_moe(index):
        return _experts(hidden, config.moe)
    layer: Shapes = {"mlp_norm": (hidden,), "gate": (inner, hidden), "up": (inner, hidden)}
    layer["down"] = (hidden, inner)
    if config.mlp_bias:
        layer |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    return layer


def _experts(hidden: int, moe: ExpertShapes) -> Shapes:
    layer: Shapes = {"mlp_norm": (hidden,), "router": (moe.num_experts, hidden)}
    layer["router_correction"] = (moe.num_experts,)
    for expert in range(moe.num_experts):
        layer |= {f"experts.{expert}.{name}": (moe.inner, hidden) for name in ("gate", "up")}
        layer[f"experts.{expert}.down"] = (hidden, moe.inner)
    layer |= {f"shared_{name}": (moe.shared_inner, hidden) for name in ("gate", "up")}
    layer["shared_down"] = (hidden, moe.shared_inner)
    return layer


def _mtp(hidden: int, vocab: int) -> Shapes:
    shapes: Shapes = dict.fromkeys(("enorm", "hnorm", "shared_norm"), (hidden,))
    shapes["eh_proj"] = (hidden, 2 * hidden)
    return shapes | ({"draft_ids": (vocab,)} if vocab else {})
