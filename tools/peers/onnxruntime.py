"""ONNX Runtime GenAI, on models of its own builder: `int4` and `int8` weights in groups of 32.

The head computes the last position alone (`prune_lm_head`), which makes prefill faster. Its own
defaults otherwise: symmetric groups, and activations rounded to int8.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.protocol import Peer, Settings, main


class OnnxRuntime:
    """One model; a generator for each task, which is a batch of sequences of one length."""

    def __init__(self, settings: Settings) -> None:
        """Load the model."""
        import onnxruntime_genai as og

        self._og = og
        folder = _folder(settings)
        self._model = _open(og, settings)
        config = json.loads((folder / "genai_config.json").read_text())
        self.vocab: int = config["model"]["vocab_size"]

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Make a generator; the end token is held back until `limit`."""
        length = len(prompts[0]) + limit
        self._generator = _generator(self._og, self._model, len(prompts), length)
        self._prompts: Sequence[Sequence[int]] | None = prompts
        self._rows = range(len(prompts))

    def step(self) -> Sequence[int]:
        """Run all prompts as one batch, or one token of each sequence."""
        import numpy as np

        if self._prompts is not None:
            self._generator.append_tokens(np.array(self._prompts, dtype=np.int32))
            self._prompts = None
        self._generator.generate_next_token()
        return self._rows

    def end(self) -> None:
        """Drop the generator with its keys and values."""
        del self._generator


def _open(og: Any, settings: Settings) -> Any:
    config = og.Config(str(_folder(settings)))
    options = {"intra_op_num_threads": settings.threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    return og.Model(config)


def _generator(og: Any, model: Any, rows: int, length: int) -> Any:
    params = og.GeneratorParams(model)
    params.set_search_options(
        batch_size=rows, max_length=length, min_length=length, do_sample=False
    )
    return og.Generator(model, params)


def prepare(settings: Settings) -> None:
    """Run the model builder of ONNX Runtime GenAI on the Hugging Face folder."""
    folder = _folder(settings)
    if folder.exists():
        return
    partial = folder.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(settings.folder / "hf"), "-o", str(partial), "-p", settings.variant]
    command += ["-e", "cpu", "-c", str(settings.folder / "hub")]
    command += ["--extra_options", "prune_lm_head=true"]
    subprocess.run(command, check=True)
    partial.rename(folder)


def logits(settings: Settings, windows: list[list[int]]) -> Any:
    """Return the logits of every position, token by token: the head has only the last one's."""
    import numpy as np
    import onnxruntime_genai as og

    model = _open(og, settings)
    rows = []
    for ids in windows:
        generator = _generator(og, model, 1, len(ids) + 1)
        for token in ids:
            generator.append_tokens(np.array([[token]], dtype=np.int32))
            rows.append(np.array(generator.get_logits(), dtype=np.float32).reshape(1, -1))
    return np.concatenate(rows)


def _folder(settings: Settings) -> Path:
    return settings.folder / f"onnx-{settings.variant}"


def _version() -> str:
    import onnxruntime_genai

    return f"onnxruntime-genai {onnxruntime_genai.__version__}"


if __name__ == "__main__":
    main(Peer(_version, prepare, OnnxRuntime, logits))
