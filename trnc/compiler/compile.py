"""Ahead-of-time compilation: from a configuration to a complete store and its manifest.

`plan_build` traces and decides; `build` compiles what is missing in parallel processes. Between the
two, everything that will happen is known and can be printed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.export import ExportedProgram

from trnc.compiler import canonical
from trnc.compiler.backends import inductor
from trnc.compiler.backends.runner import build_runner, runner_factors
from trnc.compiler.manifest import (
    LinkedCall,
    LinkedUpdate,
    Manifest,
    Variant,
    manifest_key,
    read_manifest,
    write_manifest,
)
from trnc.compiler.program import Call, Program, ProgramConfig, build_programs, distinct_specs
from trnc.compiler.store import ArtifactKey, Store
from trnc.compiler.trace import trace_stage
from trnc.compiler.unfinished import Unfinished, read_unfinished, write_unfinished
from trnc.core import VariantKey
from trnc.errors import CompileError
from trnc.models.stage import StageSpec
from trnc.ops import native

Report = Callable[[str], None]

_building = threading.Lock()  # held by a worker process while it makes an artifact


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage's graph and its canonical text."""

    program: ExportedProgram
    text: str
    digest: str


@dataclass(frozen=True, slots=True)
class Job:
    """One artifact to build; `spec` is the stage's, where it is one."""

    key: ArtifactKey
    label: str
    spec: StageSpec | None = None


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """All that a configuration needs, and which of it is missing from the store."""

    config: ProgramConfig
    target: native.Target
    programs: Mapping[VariantKey, Program]
    traced: Mapping[StageSpec, TracedStage]
    jobs: tuple[Job, ...]
    missing: tuple[Job, ...]


def trace_all(
    config: ProgramConfig,
    *,
    report: Callable[[int, int, str], None],
    known: Mapping[StageSpec, TracedStage] | None = None,
) -> tuple[Mapping[VariantKey, Program], Mapping[StageSpec, TracedStage]]:
    """Build every program of the preset and trace every distinct stage that is not `known`.

    `report(done, total, label)` is called before each stage.
    """
    programs = build_programs(config)
    specs = distinct_specs(iter(programs.values()))
    traced = {}
    for index, spec in enumerate(specs):
        report(index, len(specs), spec.label)
        traced[spec] = (known or {}).get(spec) or _trace(spec)
    return programs, traced


def _trace(spec: StageSpec) -> TracedStage:
    program = trace_stage(spec)
    text = canonical.canonical_text(program)
    return TracedStage(program, text, canonical.digest(text))


def plan_build(
    config: ProgramConfig,
    *,
    target: native.Target,
    store: Store,
    report: Callable[[int, int, str], None],
) -> BuildPlan:
    """Trace everything and look up each distinct artifact in the store."""
    programs, traced = trace_all(config, report=report)
    jobs = {job.key.id: job for job in _jobs(traced, target)}
    missing = tuple(job for job in jobs.values() if store.get(job.key) is None)
    return BuildPlan(config, target, programs, traced, tuple(jobs.values()), missing)


def build(
    plan: BuildPlan, *, store: Store, workers: int, report: Callable[[int, int, str], None]
) -> Manifest:
    """Compile what is missing in `workers` processes, then write the manifest.

    Two builds of the same artifact, in any two processes, compile it once.

    Raises:
        CompileError, StoreError: the first failure; what was finished stays in the store.
    """
    total = len(plan.missing)
    for done, label in enumerate(_run_jobs(plan, store, workers)):
        report(done + 1, total, label)
    manifest = _manifest(plan)
    _keep_manifest(manifest, manifest_key(plan.config, plan.target), store)
    if read_unfinished(store.root):
        write_unfinished(store.root, plan.target.name, plan.config.preset.name, ())
    return manifest


def obstacles(plan: BuildPlan) -> tuple[Unfinished, ...]:
    """Return what is missing and cannot be compiled on this machine for the plan's target."""
    reason = inductor.obstacle(plan.target)
    stages = (job for job in plan.missing if job.spec is not None)
    return tuple(Unfinished(job.key.id, job.label, reason) for job in stages if reason)


def build_possible(
    plan: BuildPlan, *, store: Store, workers: int, report: Callable[[int, int, str], None]
) -> tuple[Unfinished, ...]:
    """Compile what this machine can for another target, and record and return what is left.

    Without what is left there is no manifest: a machine of the target compiles the rest.
    """
    left = obstacles(plan)
    names = {item.id for item in left}
    jobs = tuple(job for job in plan.missing if job.key.id not in names)
    for done, label in enumerate(_run_jobs(replace(plan, missing=jobs), store, workers)):
        report(done + 1, len(jobs), label)
    write_unfinished(store.root, plan.target.name, plan.config.preset.name, left)
    return left


def _keep_manifest(manifest: Manifest, key: ArtifactKey, store: Store) -> None:
    """Write the manifest; one that another compiler or a `gc` has left behind gives way."""
    kept = store.get_or_build(key, lambda out: write_manifest(manifest, out))
    if read_manifest(kept) != manifest:
        store.rebuild(key, lambda out: write_manifest(manifest, out))


def stage_key(digest: str, target: native.Target) -> ArtifactKey:
    """The key of a compiled stage."""
    return ArtifactKey.of("stage", inductor.stage_factors(digest, target))


def kernels_key(target: native.Target) -> ArtifactKey:
    """The key of the library of our operators."""
    return ArtifactKey.of("kernels", native.kernel_factors(target))


def runner_key() -> ArtifactKey:
    """The key of the program runner."""
    return ArtifactKey.of("runner", runner_factors())


def _jobs(traced: Mapping[StageSpec, TracedStage], target: native.Target) -> Iterator[Job]:
    # The kernels take longest, so they go first.
    yield Job(key=kernels_key(target), label="kernels")
    yield Job(key=runner_key(), label="runner")
    for spec, stage in traced.items():
        yield Job(key=stage_key(stage.digest, target), label=spec.label, spec=spec)


def _run_jobs(plan: BuildPlan, store: Store, workers: int) -> Iterator[str]:
    """Yield the label of each job as it ends."""
    if not plan.missing:
        return
    pool = ProcessPoolExecutor(
        max_workers=min(workers, len(plan.missing)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare_worker,
        initargs=(store.root,),
    )
    with pool:
        futures: dict[Future[None], Job] = {
            pool.submit(_build_one, job, plan.target, store.root): job for job in plan.missing
        }
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future].label
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _prepare_worker(root: Path) -> None:
    """Keep Inductor's own cache below the store, and threads to one."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent was killed; of itself it would wait for work forever.

    It finishes its artifact first: a compiler that outlived it would write into the next build.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are spawned"
    parent.join()
    with _building:
        os._exit(1)


def _build_one(job: Job, target: native.Target, root: Path) -> None:
    store = Store(root=root, log=lambda line: print(line, file=sys.stderr))
    with _building:
        store.get_or_build(job.key, lambda out: write_artifact(job, target, out))


def write_artifact(job: Job, target: native.Target, out: Path) -> None:
    """Compile one artifact into the folder `out`, in this process.

    Raises:
        CompileError: a compiler failed, or the stage traces to another graph than the job's.
    """
    if job.key.kind == "kernels":
        native.build_kernels(target, out)
    elif job.key.kind == "runner":
        build_runner(out)
    elif job.spec is not None:
        _compile_stage(job.spec, job.key, target, out)


def _compile_stage(spec: StageSpec, key: ArtifactKey, target: native.Target, out: Path) -> None:
    program = trace_stage(spec)
    digest = canonical.digest(canonical.canonical_text(program))
    if stage_key(digest, target) != key:
        raise CompileError(
            f"stage '{spec.label}' traced to another graph in a second process; its trace depends "
            "on something that is not in its spec, so it cannot be cached"
        )
    inductor.compile_stage(program, target, out)


def _manifest(plan: BuildPlan) -> Manifest:
    artifact = {
        spec: stage_key(stage.digest, plan.target).id for spec, stage in plan.traced.items()
    }
    variants = tuple(
        Variant(
            key=key,
            steps=tuple(
                LinkedCall(artifact[step.stage], step.inputs, step.outputs)
                if isinstance(step, Call)
                else LinkedUpdate(step.op, step.inputs)
                for step in program.steps
            ),
            outputs=program.outputs,
        )
        for key, program in plan.programs.items()
    )
    return Manifest(
        preset=plan.config.preset.name,
        backend="inductor",
        kernels=kernels_key(plan.target).id,
        runner=runner_key().id,
        stages={artifact[spec]: stage.digest for spec, stage in plan.traced.items()},
        variants=variants,
    )
