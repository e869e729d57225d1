"""Our own operators: each has a plain-torch reference and its CPU kernels.

Importing this package declares every operator, so that a native library can register kernels.
"""

from trnc.ops.attention import kv_row_size, kv_write, paged_attention, quantize_kv
from trnc.ops.linear import embedding, linear
from trnc.ops.norm import rms_norm, silu_mul
from trnc.ops.packing import pack, packed_shape, unpack
from trnc.ops.sampling import logit_bias, logprobs, sample, sample_greedy
from trnc.ops.state import store_tokens

__all__ = [
    "embedding",
    "kv_row_size",
    "kv_write",
    "linear",
    "logit_bias",
    "logprobs",
    "pack",
    "packed_shape",
    "paged_attention",
    "quantize_kv",
    "rms_norm",
    "sample",
    "sample_greedy",
    "silu_mul",
    "store_tokens",
    "unpack",
]
