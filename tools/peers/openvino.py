"""OpenVINO GenAI: its pipeline for continuous batching, stepped by hand.

The model is exported by optimum-intel with weights compressed to int8 (by channel) or int4 (groups
of 64). Its own defaults otherwise: activations rounded to int8 as it sees fit, u8 keys and values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.protocol import Peer, Settings, main

STEP_TOKENS = 2048  # the most tokens that a step computes


class OpenVino:
    """One pipeline; a request for each sequence."""

    def __init__(self, settings: Settings) -> None:
        """Load and compile the model."""
        import openvino_genai as genai

        folder = _folder(settings)
        self.vocab: int = json.loads((folder / "config.json").read_text())["vocab_size"]
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = settings.rows
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GiB, taken as it fills
        self._genai = genai
        self._next_id = 0
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", _properties(settings)
        )

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Add a request for each prompt."""
        import numpy as np
        import openvino as ov

        config = self._genai.GenerationConfig()
        config.max_new_tokens = limit
        config.ignore_eos = True
        config.do_sample = False
        self._handles = []
        for prompt in prompts:
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            self._handles.append(self._pipeline.add_request(self._next_id, ids, config))
            self._next_id += 1

    def step(self) -> Sequence[int]:
        """Run a step of the pipeline's own choice."""
        self._pipeline.step()
        rows = []
        for row, handle in enumerate(self._handles):
            while handle.can_read():
                (output,) = handle.read().values()
                rows += [row] * len(output.generated_ids)
        return rows

    def end(self) -> None:
        """Let the requests run out."""
        while self._pipeline.has_non_finished_requests():
            self.step()


def prepare(settings: Settings) -> None:
    """Export the Hugging Face folder with compressed weights, and the tokenizer beside it."""
    folder = _folder(settings)
    if folder.exists():
        return
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    source = settings.folder / "hf"
    quantization = (
        OVWeightQuantizationConfig(bits=8)
        if settings.variant == "int8"
        else OVWeightQuantizationConfig(bits=4, sym=True, group_size=64, ratio=1.0)
    )
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, quantization_config=quantization
    )
    model.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(source)
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    save_model(encoder, partial / "openvino_tokenizer.xml")
    save_model(decoder, partial / "openvino_detokenizer.xml")
    partial.rename(folder)


def logits(settings: Settings, windows: list[list[int]]) -> Any:
    """Return the logits of every position, from the model without the pipeline around it."""
    import numpy as np
    import openvino as ov

    path = _folder(settings) / "openvino_model.xml"
    request = ov.compile_model(path, "CPU", _properties(settings)).create_infer_request()
    rows = []
    for ids in windows:
        request.reset_state()
        positions = np.arange(len(ids), dtype=np.int64)[None]
        inputs = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones_like(positions),
            "position_ids": positions,
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        rows.append(np.array(request.infer(inputs)["logits"][0], dtype=np.float32))
    return np.concatenate(rows)


def _properties(settings: Settings) -> dict[str, object]:
    cache = settings.folder / "openvino-cache"  # of compiled models
    return {"INFERENCE_NUM_THREADS": settings.threads, "CACHE_DIR": str(cache)}


def _folder(settings: Settings) -> Path:
    return settings.folder / f"openvino-{settings.variant}"


def _version() -> str:
    import openvino_genai

    return f"openvino-genai {openvino_genai.__version__}"


if __name__ == "__main__":
    main(Peer(_version, prepare, OpenVino, logits))
