"""`trnc compile`: show the variant matrix, then compile what the store lacks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trnc.cli.options import Backend
from trnc.compiler.compile import BuildPlan, build, plan_build
from trnc.compiler.manifest import manifest_key
from trnc.compiler.store import Store
from trnc.core import VariantKey
from trnc.ops import native
from trnc.presets import Preset
from trnc.runtime.start import open_model, program_config


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What `trnc compile` was asked for."""

    model: str
    preset: Preset
    backend: Backend
    store: Path
    jobs: int
    dry_run: bool


def run_compile(options: CompileOptions, console: Console) -> None:
    """Trace, print the matrix, and unless it is a dry run compile with a progress bar."""
    if options.backend == "eager":
        console.print("The eager backend compiles nothing.")
        return
    start = time.perf_counter()
    store = Store(root=options.store, log=console.print)
    with _progress(console) as progress:
        task = progress.add_task("tracing", total=None)

        def tracing(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done + 1, total=total, description=f"tracing {label}")

        model = open_model(options.model, report=console.print)
        config = program_config(model, options.preset, options.backend)
        plan = plan_build(config, target=native.detect_target(), store=store, report=tracing)
    print_matrix(plan, console)
    if options.dry_run:
        return
    _build(plan, store, options.jobs, console)
    key = manifest_key(config, plan.target)
    console.print(
        f"[bold green]ready[/] in {time.perf_counter() - start:.1f} s: preset "
        f"'{options.preset.name}', manifest {key.id[:12]} in {store.root}"
    )


def print_matrix(plan: BuildPlan, console: Console) -> None:
    """Print the variants by step and bucket, then the stages and what of them is cached."""
    preset = plan.config.preset
    table = Table(title=f"Variants of preset '{preset.name}' ({len(plan.programs)})")
    for column in ("step", "tokens", "sequences", "sampling", "features", "stage calls"):
        table.add_column(column)
    for group in _groups(plan.programs):
        key = group[0]
        sampling = dict.fromkeys(k.sampling for k in group)
        features = dict.fromkeys(f for k in group for f in _features(k))
        calls = len(plan.programs[key].calls)
        table.add_row(
            key.step,
            str(key.tokens),
            str(key.rows),
            ", ".join(sampling),
            ", ".join(("none", *features)),
            f"{calls}+",
        )
    console.print(table)
    missing = {job.key.id for job in plan.missing}
    kinds = Counter(job.label.split()[0] for job in plan.jobs)
    stages = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    console.print(
        f"Distinct artifacts for target '{plan.target.name}': {len(plan.jobs)} ({stages}); "
        f"{len(plan.jobs) - len(missing)} in the store, {len(missing)} to compile."
    )


def _groups(programs: Iterable[VariantKey]) -> list[list[VariantKey]]:
    groups: dict[tuple[str, int, int], list[VariantKey]] = {}
    for key in programs:
        groups.setdefault((key.step, key.tokens, key.rows), []).append(key)
    return list(groups.values())


def _features(key: VariantKey) -> list[str]:
    return [name for name in ("logprobs", "logit_bias") if getattr(key, name)]


def _build(plan: BuildPlan, store: Store, jobs: int, console: Console) -> None:
    with _progress(console) as progress:
        task = progress.add_task("compiling", total=len(plan.missing))

        def compiled(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=f"compiled {label}")

        build(plan, store=store, workers=jobs, report=compiled)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
