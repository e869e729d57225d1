"""What the cache holds of one layer: its tensors, what a step adds to them, and which op writes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from trnc import ops
from trnc.errors import ConfigError
from trnc.models.config import ModelConfig
from trnc.models.stage import TensorSpec


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`pages` are ports of the layer's stage, `new` its outputs that `write` puts into them."""

    pages: dict[str, TensorSpec]
    new: tuple[str, ...]
    write: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        specs = self.pages.values()
        return sum(prod(map(int, s.shape[1:])) * s.torch_dtype.itemsize for s in specs)


def cache_layout(model: ModelConfig, kv_dtype: str, page_size: int) -> CacheLayout:
    """Return the layout of every layer of a model; the first dimension of each tensor is pages.

    Raises ConfigError where pages of `kv_dtype` cannot hold the model's heads.
    """
    dtype = TensorSpec((), kv_dtype).torch_dtype
    if model.mla is not None:
        row = ops.kv_row_size(model.mla.latent_width, dtype)
        latent = TensorSpec(("pages", page_size, row), kv_dtype)
        return CacheLayout({"latent_pages": latent}, ("latent_new",), "latent_write")
    if kv_dtype == "int8" and model.head_dim % 4:
        raise ConfigError(
            "kv_dtype int8 needs heads of a multiple of 4 elements, and the model's have "
            f'{model.head_dim}; set kv_dtype = "float16"'
        )
    kv, row = model.num_kv_heads, ops.kv_row_size(model.head_dim, dtype)
    pages = {
        "k_pages": TensorSpec(("pages", kv, row, page_size), kv_dtype),
        "v_pages": TensorSpec(("pages", kv, page_size, row), kv_dtype),
    }
    return CacheLayout(pages, ("k_new", "v_new"), "kv_write")
