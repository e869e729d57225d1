"""How far an engine's next-token distributions are from the weights' own: KL and top-1 agreement.

    python tools/bench_quality.py --python llama.cpp=PYTHON --python onnxruntime=PYTHON

The oracle is the eager fp32 backend on the dequantised Q4_1 weights. The text never changes: the
Apache license and `tools/peers/sample.txt`, 4,096 tokens in windows of 512. Every engine runs the
form of the weights that tools/bench_peers.py measures; vLLM is left out, as it gives no logits.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from bench_peers import Pythons, parse_pythons
from peers import process
from peers.process import Contestant, PeerError
from peers.protocol import Settings
from peers.registry import OURS, PeerInfo, chosen_peers

WINDOW = 512
TOKENS = 4096
TEXTS = ("LICENSE", "tools/peers/sample.txt")
WITHOUT_LOGITS = ("vllm",)


def run(
    python: Pythons = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Only this engine beside trnc, as NAME or NAME:WEIGHTS; repeatable."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1)] = len(os.sched_getaffinity(0)),
) -> None:
    """Print the mean KL(oracle || engine) in nats and the top-1 agreement of each engine."""
    from trnc.checkpoint.source import DEFAULT_MODEL, resolve

    pythons = parse_pythons(python)
    model = resolve(DEFAULT_MODEL).path
    settings = Settings(model, model.parent / "peers", "", threads, rows=1, context=WINDOW)
    process.convert(model, settings.folder)
    windows = read_windows(model)
    oracle = _logits(Contestant(OURS, "fp32", sys.executable), settings, windows)
    print("| engine | mean KL to fp32, nats | same top token |\n|---|---|---|")
    for contestant in _contestants(pythons, peer):
        try:
            logits = _logits(contestant, settings, windows)
        except PeerError as error:
            print(f"{contestant.label}: {error}", file=sys.stderr)
            continue
        print(row(contestant.label, oracle, logits), flush=True)


def _contestants(pythons: dict[str, str], wanted: Sequence[str] | None) -> Iterator[Contestant]:
    for peer, variants in chosen_peers(wanted).items():
        python = pythons.get(peer.key, sys.executable)
        if peer.key not in WITHOUT_LOGITS and _is_installed(python, peer):
            yield from (Contestant(peer, variant, python) for variant in variants)


def _is_installed(python: str, peer: PeerInfo) -> bool:
    try:
        process.probe(python, peer)
    except PeerError as error:
        print(f"{peer.title}: not installed ({error}); {peer.install}", file=sys.stderr)
        return False
    return True


def read_windows(model: Path) -> list[list[int]]:
    """Return the token ids of the text, in windows."""
    from trnc.checkpoint.source import resolve
    from trnc.checkpoint.tokenizer import load_tokenizer

    root = Path(__file__).resolve().parent.parent
    text = "\n".join((root / name).read_text() for name in TEXTS)
    ids = load_tokenizer(resolve(str(model))).encode(text, add_special_tokens=False)
    if len(ids) < TOKENS:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than {TOKENS}")
    return [ids[i : i + WINDOW] for i in range(0, TOKENS, WINDOW)]


def _logits(contestant: Contestant, settings: Settings, windows: list[list[int]]) -> np.ndarray:
    """Return the logits of every position, [tokens, vocabulary] f32; raises PeerError."""
    mine = replace(settings, variant=contestant.variant)
    if contestant.peer is not OURS:  # ours runs without the compiled stages
        process.prepare(contestant, mine)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        process.logits(contestant, mine, windows, out)
        result: np.ndarray = np.load(out)
    return result


def row(name: str, oracle: np.ndarray, logits: np.ndarray) -> str:
    """Return an engine's line of the table, from logits [tokens, vocabulary]."""
    wanted, got = _log_softmax(oracle), _log_softmax(logits)
    kl = (np.exp(wanted) * (wanted - got)).sum(axis=1).mean()
    same = (wanted.argmax(axis=1) == got.argmax(axis=1)).mean()
    return f"| {name} | {kl:.6f} | {100 * same:.2f} % of {len(oracle)} |"


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


if __name__ == "__main__":
    typer.run(run)
