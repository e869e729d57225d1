"""`python -m tests.trainium.module_bytes` prints digests of two modules: of text and HLO."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trnc.compiler.backends.stablehlo.build import plan_modules
from trnc.compiler.backends.stablehlo.module import hlo_proto
from trnc.compiler.backends.stablehlo.targets import neuron_target
from trnc.compiler.graphs import config_of, read_model
from trnc.core import VariantKey
from trnc.presets import load_preset

GRAPHS = Path(__file__).parents[2] / "graphs"
SIZES = {"decode_rows": (2,), "prefill_tokens": (16,), "max_context": 64}
KEYS = (
    VariantKey("decode", 2, 2, "sample", True, True, context=64),
    VariantKey("prefill", 16, 2, context=64),
)


def digests(keys: Iterable[VariantKey]) -> list[str]:
    """Lower some variants of the locked tiny GLM, in this order; a line for each."""
    preset = replace(load_preset("default"), **SIZES)  # type: ignore[arg-type]
    config = config_of(read_model(GRAPHS, "tiny-glm"), preset)
    plan = plan_modules(config, neuron_target("trn2"), report=lambda *_: None)
    modules = [plan.lower(key) for key in keys]
    return [f"{m.digest} {hashlib.sha256(hlo_proto(m.text)).hexdigest()}" for m in modules]


if __name__ == "__main__":
    print("\n".join(digests(KEYS)))
