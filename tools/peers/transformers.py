"""transformers in eager mode, bf16 weights, its sdpa attention and dynamic cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.protocol import Peer, Settings, main


class Transformers:
    """One model; all sequences of a task are one batch."""

    def __init__(self, settings: Settings) -> None:
        """Load the model."""
        import torch

        torch.set_num_threads(settings.threads)
        self._torch = torch
        self._model = _open(settings)
        self.vocab: int = self._model.config.vocab_size

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Keep the prompts as the first input."""
        del limit  # the cache grows as it must
        self._input = self._torch.tensor(prompts)
        self._cache: Any = None

    def step(self) -> Sequence[int]:
        """Run all prompts as one batch, or one token of each sequence."""
        with self._torch.inference_mode():
            output = self._model(
                self._input, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            self._cache = output.past_key_values
            self._input = output.logits.argmax(dim=-1)
        return range(len(self._input))

    def end(self) -> None:
        """Drop the keys and values."""
        del self._input, self._cache


def _open(settings: Settings) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    folder = settings.folder / "hf"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval()


def logits(settings: Settings, windows: list[list[int]]) -> Any:
    """Return the logits of every position."""
    import numpy as np
    import torch

    torch.set_num_threads(settings.threads)
    model = _open(settings)
    with torch.inference_mode():
        rows = [model(torch.tensor([ids])).logits[0].float().numpy() for ids in windows]
    return np.concatenate(rows)


def _version() -> str:
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    main(Peer(_version, lambda _: None, Transformers, logits))
