"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2): what is around the MTP layer.

With h_i the target's hidden state at position i after the final norm, and t the tokens,

    x_i = eh_proj([enorm(E(t_{i+1})), hnorm(h_i)])
    z_i = shared_norm(layer(x_i))        logits of t_{i+2} = head(z_i)

The layer is a stage of `trnc.models.layer` with pages of its own. A further step of a draft takes
z_i for h, after the norm, and the drafted token. Row i stands at position i, as in the target, so
both use one block table; rope sees differences of positions only. E and the head are the model's.

So a round of a draft is mtp_embed -> layer -> mtp_head. The keys and values of the MTP layer depend
on its input alone. So a step of the target, which knows h_i and t_{i+1} at all of its positions,
adds them by `mtp_cache`, and keeps the h that a draft starts from: there is never a gap.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trnc import ops
from trnc.models import llama, mla
from trnc.models.cache import cache_layout
from trnc.models.layer import layer_weights
from trnc.models.llama import embed_stage
from trnc.models.stage import Stage, StageSpec, TensorSpec, WeightFormats, packed_spec


def mtp_embed_stage(spec: StageSpec) -> Stage:
    """Next tokens [T] and the states before them [T, H] to the input of the MTP layer [T, H].

    Tokens are given as to `embed`; the rotary factors are returned, too. `spec.formats` are those
    of the model; the last layer's has `eh_proj`.
    """
    model, formats = spec.model, spec.formats
    assert isinstance(formats, WeightFormats)
    embed = embed_stage(spec)
    format = formats.layers[-1].eh_proj

    def mtp_embed(
        previous: Tensor, enorm: Tensor, hnorm: Tensor, eh_proj: Tensor, **embedding: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        embedded, cos, sin = embed.function(**embedding)
        both = (
            ops.rms_norm(embedded, enorm, model.rms_eps),
            ops.rms_norm(previous, hnorm, model.rms_eps),
        )
        hidden = ops.linear(torch.cat(both, dim=1), eh_proj, None, format, model.hidden_size)
        return hidden, cos, sin

    norm = TensorSpec((model.hidden_size,))
    inputs = {
        "previous": TensorSpec((spec.tokens, model.hidden_size)),
        "enorm": norm,
        "hnorm": norm,
        "eh_proj": packed_spec(format, model.hidden_size, 2 * model.hidden_size),
    }
    return Stage(function=mtp_embed, inputs=embed.inputs | inputs, outputs=("hidden", "cos", "sin"))


def mtp_cache_stage(spec: StageSpec) -> Stage:
    """What a step of the target adds for drafts: its states [T, H] after the model's last norm, and
    the MTP layer's rows in the cache, without attending.

    Tokens are those after the rows, as in `mtp_embed`. `spec.formats` are those of the model.
    """
    model, formats = spec.model, spec.formats
    assert isinstance(formats, WeightFormats)
    module = llama if model.mla is None else mla
    layer = replace(spec, formats=formats.layers[-1])
    embed = mtp_embed_stage(spec)

    def mtp_cache(hidden: Tensor, norm: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
        states = ops.rms_norm(hidden, norm, model.rms_eps)
        own = {port: tensors[port] for port in embed.inputs if port in tensors}
        fused, cos, sin = embed.function(previous=states, **own)
        _, *new = module.project(layer, tensors | {"hidden": fused, "cos": cos, "sin": sin})
        return states, *new

    inputs = {"hidden": embed.inputs["previous"], "norm": TensorSpec((model.hidden_size,))}
    inputs |= {port: tensor for port, tensor in embed.inputs.items() if port != "previous"}
    weights = layer_weights(layer)
    inputs |= {port: weights[port] for port in module.PROJECTED if port in weights}
    outputs = ("states", *cache_layout(model, spec.kv_dtype, spec.page_size).new)
    return Stage(function=mtp_cache, inputs=inputs, outputs=outputs)


def mtp_head_stage(spec: StageSpec) -> Stage:
    """What the MTP layer gave, to the states [R, H] of a next draft's start, and logits [R, V].

    With `mtp_vocab`, `head` has the rows of the tokens `draft_ids` alone, and the logits of all
    others are -inf: what samples knows tokens by their ids, and need not know of this.
    """
    model, formats = spec.model, spec.formats
    assert isinstance(formats, WeightFormats)
    drafted = model.mtp_vocab or model.vocab_size

    def mtp_head(
        hidden: Tensor,
        sample_rows: Tensor,
        shared_norm: Tensor,
        head: Tensor,
        draft_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        states = ops.rms_norm(hidden[sample_rows], shared_norm, model.rms_eps)
        logits = ops.linear(states, head, None, formats.head, drafted)
        if draft_ids is None:
            return states, logits
        others = logits.new_full((logits.shape[0], model.vocab_size), -torch.inf)
        return states, others.index_copy(1, draft_ids, logits)

    inputs = {
        "hidden": TensorSpec((spec.tokens, model.hidden_size)),
        "sample_rows": TensorSpec((spec.rows,), "int64"),
        "shared_norm": TensorSpec((model.hidden_size,)),
        "head": packed_spec(formats.head, drafted, model.hidden_size),
    }
    if model.mtp_vocab:
        inputs["draft_ids"] = TensorSpec((drafted,), "int64")
    return Stage(function=mtp_head, inputs=inputs, outputs=("states", "logits"))
