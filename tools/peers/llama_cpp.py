"""llama.cpp, through the C API of llama-cpp-python; a batch of its own for each step.

`Q4_1` is the model's file as it is; `Q4_0` is requantised from it, the 4-bit format that llama.cpp
is fastest with. Its own defaults otherwise (flash attention where it can, f16 keys and values).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.protocol import Peer, Settings, main

BATCH = 512


class LlamaCpp:
    """One model; a context for each task, as its size is fixed when it is made."""

    def __init__(self, settings: Settings) -> None:
        """Load the model."""
        import llama_cpp as ll

        self._ll = ll
        self._threads = settings.threads
        ll.llama_backend_init()
        self._silent = ll.llama_log_callback(lambda *_: None)  # must outlive the library's logging
        ll.llama_log_set(self._silent, None)
        path = _path(settings)
        self._model = ll.llama_model_load_from_file(
            str(path).encode(), ll.llama_model_default_params()
        )
        self.vocab: int = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))
        self._batch = ll.llama_batch_init(BATCH, 0, 1)
        self._context: Any = None

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Make a context that holds all sequences."""
        params = self._ll.llama_context_default_params()
        params.n_ctx = len(prompts) * (len(prompts[0]) + limit)
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = len(prompts)
        params.n_threads = params.n_threads_batch = self._threads
        self._context = self._ll.llama_init_from_model(self._model, params)
        self._prompts = prompts
        self._position = 0
        self._tokens: list[int] = []

    def step(self) -> Sequence[int]:
        """Run the prompts one after the other, or one token of each sequence."""
        rows = range(len(self._prompts))
        if self._position == 0:
            self._tokens = [self._prefill(row, prompt) for row, prompt in enumerate(self._prompts)]
            self._position = len(self._prompts[0])
        else:
            self._decode([(self._tokens[row], self._position, row, True) for row in rows])
            self._tokens = [self._greedy(row) for row in rows]
            self._position += 1
        return rows

    def end(self) -> None:
        """Free the context."""
        self._ll.llama_free(self._context)

    def _prefill(self, row: int, prompt: Sequence[int]) -> int:
        last = len(prompt) - 1
        tokens = [(token, i, row, i == last) for i, token in enumerate(prompt)]
        for first in range(0, len(tokens), BATCH):
            self._decode(tokens[first : first + BATCH])
        return self._greedy(-1)

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run tokens, each with its position, its sequence and whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._ll.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _greedy(self, index: int) -> int:
        import numpy as np

        logits = self._ll.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


def prepare(settings: Settings) -> None:
    """Requantise the model to Q4_0."""
    import llama_cpp as ll

    path = _path(settings)
    if path.exists():
        return
    params = ll.llama_model_quantize_default_params()
    params.ftype = ll.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    partial = path.with_suffix(".part")
    if ll.llama_model_quantize(str(settings.model).encode(), str(partial).encode(), params):
        raise RuntimeError("llama.cpp could not requantise the model to Q4_0")
    partial.rename(path)


def logits(settings: Settings, windows: list[list[int]]) -> Any:
    """Return the logits of every position."""
    import llama_cpp
    import numpy as np

    model: Any = llama_cpp.Llama(
        str(_path(settings)),
        n_ctx=settings.context,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        logits_all=True,
        verbose=False,
    )
    rows = []
    for ids in windows:
        model.reset()
        model.eval(ids)
        rows.append(np.array(model.scores[: len(ids)], dtype=np.float32))
    return np.concatenate(rows)


def _path(settings: Settings) -> Path:
    return settings.model if settings.variant == "Q4_1" else settings.folder / "q4_0.gguf"


def _version() -> str:
    import llama_cpp

    return f"llama-cpp-python {llama_cpp.__version__}"


if __name__ == "__main__":
    main(Peer(_version, prepare, LlamaCpp, logits))
