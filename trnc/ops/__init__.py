"""Our own operators: each has a plain-torch reference and its CPU kernels.

Importing this package declares every operator, so that a native library can register kernels.
"""

from trnc.ops.attention import kv_row_size, kv_write, paged_attention, quantize_kv
from trnc.ops.latent import latent_attention, latent_write
from trnc.ops.linear import embedding, linear
from trnc.ops.moe import experts, head_linear, route
from trnc.ops.norm import rms_norm, silu_mul
from trnc.ops.packing import pack, packed_shape, unpack
from trnc.ops.sampling import (
    apply_mask,
    logit_bias,
    logprobs,
    penalize,
    sample,
    sample_greedy,
)
from trnc.ops.state import accept_drafts, store_states, store_tokens

__all__ = [
    "accept_drafts",
    "apply_mask",
    "embedding",
    "experts",
    "head_linear",
    "kv_row_size",
    "kv_write",
    "latent_attention",
    "latent_write",
    "linear",
    "logit_bias",
    "logprobs",
    "pack",
    "packed_shape",
    "paged_attention",
    "penalize",
    "quantize_kv",
    "rms_norm",
    "route",
    "sample",
    "sample_greedy",
    "silu_mul",
    "store_states",
    "store_tokens",
    "unpack",
]
