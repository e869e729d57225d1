"""vLLM's CPU build, its engine in this process and stepped by hand.

`bf16` is compiled, as vLLM does by default; `int8` has int8 weights by channel and int8 activations
by token (W8A8, in the compressed-tensors format), compiled too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from peers.protocol import Peer, Settings, Task, main


class Vllm:
    """One engine; a request for each sequence."""

    def __init__(self, settings: Settings) -> None:
        """Load and compile the model."""
        cores = sorted(os.sched_getaffinity(0))[: settings.threads]
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import EngineArgs, LLMEngine

        longest = Task(settings.rows, settings.context, 0)
        folder = settings.folder / ("hf-w8a8" if settings.variant == "int8" else "hf")
        arguments = EngineArgs(
            model=str(folder),
            dtype="bfloat16",
            max_model_len=settings.context + longest.limit,
            max_num_seqs=settings.rows,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self.vocab: int = self._engine.model_config.get_vocab_size()
        self._counts: dict[str, int] = {}

    def begin(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Add a request for each prompt."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False)
        self._counts = {str(row): 0 for row in range(len(prompts))}
        for row, prompt in enumerate(prompts):
            self._engine.add_request(str(row), TokensPrompt(prompt_token_ids=list(prompt)), params)

    def step(self) -> Sequence[int]:
        """Run a step of the engine's own choice."""
        rows = []
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            rows += [int(output.request_id)] * (count - self._counts[output.request_id])
            self._counts[output.request_id] = count
        return rows

    def end(self) -> None:
        """Let the requests run out."""
        while self._engine.has_unfinished_requests():
            self.step()


def _version() -> str:
    import vllm

    return f"vllm {vllm.__version__}"


if __name__ == "__main__":
    main(Peer(_version, lambda _: None, Vllm))
