"""How far an engine's next-token distributions are from the weights' own: KL and top-1 agreement.

    python tools/bench_quality.py run --llama-python path/to/python

The oracle is the eager fp32 backend on the dequantised Q4_1 weights. The text is the Apache license
of this repository, in windows of 512 tokens. trnc is measured with its native kernels and the
preset's KV dtype, which give the bits of the compiled stages; llama.cpp with the same Q4_1 file and
with Q4_0, the format that tools/bench_peers.py measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench_peers import q4_0

WINDOW = 512

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def run(
    llama_python: Annotated[
        str, typer.Option(help="A Python that has llama-cpp-python.")
    ] = sys.executable,
) -> None:
    """Print the mean KL(oracle || engine) in nats and the top-1 agreement of each engine."""
    windows = _windows()
    oracle = _trnc(windows, eager=True)
    print("| engine | mean KL to fp32, nats | same top token |")
    print("|---|---|---|")
    _report("trnc, Q4_1", oracle, _trnc(windows, eager=False))
    for name in ("Q4_1", "Q4_0"):
        _report(f"llama.cpp, {name}", oracle, _llama(llama_python, windows, name))


def _windows() -> list[list[int]]:
    from trnc.checkpoint.source import resolve
    from trnc.checkpoint.tokenizer import load_tokenizer

    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text()
    ids = load_tokenizer(resolve("smollm2-135m")).encode(text, add_special_tokens=False)
    return [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]


def _report(name: str, oracle: np.ndarray, logits: np.ndarray) -> None:
    wanted, got = _log_softmax(oracle), _log_softmax(logits)
    kl = (np.exp(wanted) * (wanted - got)).sum(axis=1).mean()
    same = (wanted.argmax(axis=1) == got.argmax(axis=1)).mean()
    print(f"| {name} | {kl:.6f} | {100 * same:.2f} % of {len(oracle)} |")


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _trnc(windows: Sequence[list[int]], *, eager: bool) -> np.ndarray:
    """Return the logits of every position, [tokens, vocabulary] f32."""
    import torch

    from trnc.compiler.program import build_program
    from trnc.core import SamplingParams, SequencePlan, StepPlan, VariantKey
    from trnc.models.weights import bind_weights
    from trnc.ops import native
    from trnc.presets import load_preset
    from trnc.runtime.eager_runner import EagerRunner
    from trnc.runtime.inputs import build_inputs
    from trnc.runtime.start import open_model, program_config
    from trnc.runtime.state import allocate_state

    model = open_model("smollm2-135m", report=print)
    config = program_config(model, load_preset("default"), "eager" if eager else "inductor")
    pages = -(-WINDOW // config.preset.page_size)
    with torch.inference_mode():
        weights = bind_weights(model.weights, config.model, config.formats, max_context=WINDOW)
        tensors = dict(weights) | allocate_state(config.model, config.preset, num_pages=pages + 1)
    if eager:
        runner = EagerRunner(config=config, tensors=tensors)
    else:
        with tempfile.TemporaryDirectory() as folder:
            native.load_kernels(native.build_kernels(native.detect_target(), Path(folder)))
        runner = EagerRunner(config=config, tensors=tensors, operators=nullcontext)
    logits = []
    for ids in windows:
        # One row a token: every position samples, so every position has logits.
        key = VariantKey("prefill", len(ids), len(ids))
        whole = SequencePlan(
            0, 0, len(ids), tuple(ids), tuple(range(1, pages + 1)), True, 0, SamplingParams()
        )
        inputs = build_inputs(
            StepPlan("prefill", (whole,)), key, max_pages=pages, spare_slot=config.preset.max_rows
        )
        inputs["sample_rows"] = torch.arange(len(ids))
        values = runner.evaluate(build_program(config, key), inputs)
        logits.append(values["value.logits"].numpy())
    return np.concatenate(logits)


def _llama(python: str, windows: Sequence[list[int]], format: str) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        command = [python, __file__, "llama-worker", format, str(out)]
        subprocess.run(command, input=json.dumps(windows), text=True, check=True)
        result: np.ndarray = np.load(out)
        return result


@app.command(hidden=True)
def llama_worker(format: str, out: Path) -> None:
    """Write llama.cpp's logits for the windows on stdin."""
    import llama_cpp

    from trnc.checkpoint.source import resolve

    path = q4_0(llama_cpp) if format == "Q4_0" else resolve("smollm2-135m").path
    model: Any = llama_cpp.Llama(str(path), n_ctx=WINDOW, logits_all=True, verbose=False)
    logits = []
    for ids in json.load(sys.stdin):
        model.reset()
        model.eval(ids)
        logits.append(np.array(model.scores[: len(ids)], dtype=np.float32))
    np.save(out, np.concatenate(logits))


if __name__ == "__main__":
    app()
