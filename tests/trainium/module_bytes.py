"""`python -m tests.trainium.module_bytes` prints digests of two modules: of text and HLO."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tests.trainium.test_matrix import small
from tests.trainium.tiny_plans import config_of, plan_of
from trnc.compiler.backends.stablehlo.module import hlo_proto
from trnc.presets import load_preset

STEPS = ("verify", "prefill")


def digests(steps: Sequence[str]) -> list[str]:
    """Lower the widest variants of these steps for a tiny GLM, in this order; a line for each."""
    plan = plan_of(config_of("glm4_moe", small(load_preset("mtp-throughput"))))
    keys = [max(key for key in plan.programs if key.step == step) for step in steps]
    modules = [plan.lower(key) for key in keys]
    return [f"{m.digest} {hashlib.sha256(hlo_proto(m.text)).hexdigest()}" for m in modules]


if __name__ == "__main__":
    print("\n".join(digests(STEPS)))
