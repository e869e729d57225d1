"""The compiled runner: programs of AOTInductor stages, executed by the linked C++ runner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trnc.compiler.manifest import LinkedUpdate, Manifest
from trnc.core import VariantKey
from trnc.runtime.inputs import Inputs
from trnc.runtime.link import link


class NativeRunner:
    """Runs the variants of a manifest. The native library must have been loaded before."""

    def __init__(
        self, *, manifest: Manifest, stage_paths: Mapping[str, str], tensors: Mapping[str, Tensor]
    ) -> None:
        """Load every stage, link every program, bind the weights and the state.

        `stage_paths` maps artifact ids to shared libraries; `tensors` holds `weight.*` and
        `state.*`.
        """
        steps = (step for variant in manifest.variants for step in variant.steps)
        ops = dict.fromkeys(step.op for step in steps if isinstance(step, LinkedUpdate))
        stages = {artifact: index for index, artifact in enumerate(manifest.stages)}
        updates = {op: index for index, op in enumerate(ops)}
        linked = link(manifest.variants, stages=stages, updates=updates)
        self._native = torch.classes.trnc_runtime.Runner(linked.table_size)
        for artifact in stages:
            self._native.load_stage(stage_paths[artifact])
        for op in updates:
            self._native.load_update(f"trnc::{op}")
        for name, slot in linked.bound.items():
            self._native.bind(slot, tensors[name])
        self._programs = linked.programs
        self._indexes = {
            key: self._native.add_program(p.code, p.input_slots, p.output_slots)
            for key, p in linked.programs.items()
        }

    def run(self, key: VariantKey, inputs: Inputs) -> list[Tensor]:
        """Run one step; holds no lock of Python while it runs."""
        arguments = [inputs[name] for name in self._programs[key].input_names]
        outputs: list[Tensor] = self._native.run(self._indexes[key], arguments)
        return outputs
