"""What a stage is: a pure function over named tensors, cut out of a step so that it compiles alone.

A `StageSpec` is plain, hashable, picklable data: a worker process can rebuild the stage from it and
trace the same graph. It says nothing of weights' values or of the checkpoint's name. A stage's
inputs are bound by port name when a program is built; its graph knows them by position only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trnc import ops
from trnc.models.config import ModelConfig

StageKind = Literal[
    "embed",
    "layer",
    "moe_layer",
    "head",
    "mtp_embed",
    "mtp_cache",
    "mtp_head",
    "accept",
    "draft_begin",
    "draft_next",
    "mask",
    "logit_bias",
    "penalties",
    "greedy",
    "sample",
    "logprobs",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor.

    A dimension given by name (`pages`, `slots`, ...) is symbolic: its size is a matter of memory or
    limits and must not shape the graph. `dtype` is torch's name without the prefix.
    """

    shape: tuple[int | str, ...]
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype object."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """The packed format of each matrix of a decoder layer; "" where the layer has no such matrix.

    `gate_up` and `down` are those of the routed experts where the layer has them. `qkv` is what the
    layer's input is multiplied with first: in latent attention, the way down to the latents.
    """

    qkv: str
    o: str
    gate_up: str
    down: str
    shared_gate_up: str = ""
    shared_down: str = ""
    q_up: str = ""
    k_up: str = ""
    v_up: str = ""
    eh_proj: str = ""


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The packed format of every matrix of a model. A tied head has the embedding's.

    The layers of multi-token prediction come last.
    """

    embed: str
    head: str
    layers: tuple[LayerFormats, ...]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Everything that shapes one stage's graph.

    `tokens` (T) and `rows` (R) are the bucket: its sizes where the backend wants them static, else
    the names of symbolic dimensions, so that one graph serves every bucket; 0 where the stage has
    no such dimension; `entries` is the width of the penalties' inputs. `formats` is what the
    stage's own matrices are packed as; `kv_dtype` and `page_size` are the cache's.
    """

    kind: StageKind
    model: ModelConfig
    tokens: int | str
    rows: int | str
    formats: WeightFormats | LayerFormats | None = None
    kv_dtype: str = "float32"
    page_size: int = 0
    entries: int | str = 0

    @property
    def layer_formats(self) -> LayerFormats:
        """The formats of a stage that is a layer."""
        assert isinstance(self.formats, LayerFormats)
        return self.formats

    @property
    def label(self) -> str:
        """A short name for people: `layer`, or `layer 256 4` where the bucket is static."""
        sizes = (self.tokens, self.rows, self.entries)
        return self.kind + "".join(f" {size}" for size in sizes if isinstance(size, int) and size)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage ready to trace.

    `function` takes the tensors of `inputs` by port name and returns one for each of `outputs`.
    """

    function: Callable[..., tuple[Tensor, ...]]
    inputs: dict[str, TensorSpec]
    outputs: tuple[str, ...]


def packed_spec(format: str, out_features: int, in_features: int) -> TensorSpec:
    """The spec of a packed [out_features, in_features] matrix."""
    return TensorSpec(ops.packed_shape(format, out_features, in_features), "uint8")


def stacked_spec(format: str, count: int, out_features: int, in_features: int) -> TensorSpec:
    """The spec of `count` packed matrices of one shape."""
    return TensorSpec((count, *ops.packed_shape(format, out_features, in_features)), "uint8")
