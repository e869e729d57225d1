"""`trnc compile`: show the variant matrix, then compile what the store lacks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from trnc.cli.arguments import EngineArguments
from trnc.cli.console import say
from trnc.compiler.compile import BuildPlan, build, build_possible, obstacles, plan_build
from trnc.compiler.explain import explain_miss
from trnc.compiler.manifest import Manifest
from trnc.compiler.matrix import variant_matrix
from trnc.compiler.program import ProgramConfig, build_program, distinct_specs
from trnc.compiler.store import Store
from trnc.compiler.tier import open_store
from trnc.compiler.unfinished import Unfinished, read_unfinished
from trnc.core import VariantKey
from trnc.errors import CompileError
from trnc.ops.native import Target, detect_target, find_target
from trnc.presets import FEATURES, Preset, with_features
from trnc.runtime.start import open_model, program_config


def compile_missing(
    config: ProgramConfig, target: Target, store: Store, *, jobs: int, console: Console
) -> Manifest:
    """Trace, print the matrix, compile what is missing with a progress bar."""
    start = time.perf_counter()
    plan = trace_and_show(config, target, store, console)
    if obstacles(plan):
        raise CompileError(_cannot_finish(plan, build_possible_with(plan, store, jobs, console)))
    manifest = _build(plan, store, jobs, console)
    if plan.missing:
        say(console)(f"Compiled in {time.perf_counter() - start:.1f} s, into {store.root}")
    return manifest


def trace_and_show(
    config: ProgramConfig, target: Target, store: Store, console: Console
) -> BuildPlan:
    """Trace every stage with a progress bar, then print what there is and what is missing."""
    with progress_bar(console) as progress:
        task = progress.add_task("tracing", total=None)

        def tracing(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done + 1, total=total, description=f"tracing {label}")

        plan = plan_build(config, target=target, store=store, report=tracing)
    print_matrix(plan, console)
    return plan


def print_matrix(plan: BuildPlan, console: Console) -> None:
    """Print the variants by step and bucket, then the artifacts and what of them is cached."""
    title = f"Preset {plan.config.preset.name}: {len(plan.programs)} variants"
    table = Table(title=escape(f"{title} (features on or off)"))
    for column in ("step", "tokens", "sequences", "sampling", "features", "calls"):
        table.add_column(column)
    for group in _by_bucket(plan.programs):
        calls = [len(plan.programs[key].calls) for key in group]
        features = dict.fromkeys(f for key in group for f in str(key).split("+")[1:])
        table.add_row(
            group[0].step,
            str(group[0].tokens),
            str(group[0].rows),
            ", ".join(dict.fromkeys(key.sampling for key in group)),
            ", ".join(features) or "-",
            f"{min(calls)}-{max(calls)}",
        )
    console.print(table)
    kinds = Counter(job.label.split()[0] for job in plan.jobs)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    report = say(console)
    report(f"{len(plan.jobs)} distinct artifacts for target {plan.target.name}: {listed}.")
    report(f"In the store: {len(plan.jobs) - len(plan.missing)}. To compile: {len(plan.missing)}.")


def print_features(config: ProgramConfig, console: Console) -> None:
    """Print what each feature adds, or would add, to the configuration as it is."""
    table = Table(title="Features", caption="Without a feature, nothing of it is in any graph.")
    for column in ("flag", "", "variants", "stages", "for"):
        table.add_column(column)
    for name, purpose in FEATURES.items():
        without, with_it = (
            _matrix_of(replace(config, preset=with_features(config.preset, {name: on})))
            for on in (False, True)
        )
        added = [kind for kind in with_it[1] if kind not in without[1]]
        table.add_row(
            f"--{name.replace('_', '-')}",
            "on" if name in config.preset.features else "off",
            f"+{with_it[0] - without[0]}",
            ", ".join(added) or "none",
            purpose,
        )
    console.print(table)


def _matrix_of(config: ProgramConfig) -> tuple[int, list[str]]:
    """Return the number of variants and the kinds of stages of a configuration."""
    keys = variant_matrix(config.preset)
    # The stages of a variant depend on its features, not on its bucket.
    plain = {replace(key, tokens=0, rows=0): key for key in keys}
    specs = distinct_specs(build_program(config, key) for key in plain.values())
    return len(keys), list(dict.fromkeys(spec.kind for spec in specs))


def _by_bucket(keys: Iterable[VariantKey]) -> list[list[VariantKey]]:
    groups: dict[tuple[str, int, int], list[VariantKey]] = {}
    for key in keys:
        groups.setdefault((key.step, key.tokens, key.rows), []).append(key)
    return list(groups.values())


def _build(plan: BuildPlan, store: Store, jobs: int, console: Console) -> Manifest:
    with _compiling(plan, console) as report:
        return build(plan, store=store, workers=jobs, report=report)


def build_possible_with(
    plan: BuildPlan, store: Store, jobs: int, console: Console
) -> tuple[Unfinished, ...]:
    """Compile what can be compiled here for another target; return what is left."""
    with _compiling(plan, console) as report:
        return build_possible(plan, store=store, workers=jobs, report=report)


def _cannot_finish(plan: BuildPlan, left: tuple[Unfinished, ...]) -> str:
    labels = ", ".join(item.label for item in left)
    return (
        f"{len(left)} of {len(plan.jobs)} artifacts for target {plan.target.name} cannot be"
        f" compiled here ({labels}): {left[0].reason}. The others are in the store; run the same"
        f" `trnc compile` on a machine of that target to finish"
    )


@contextmanager
def _compiling(plan: BuildPlan, console: Console) -> Iterator[Callable[[int, int, str], None]]:
    with progress_bar(console) as progress:
        task = progress.add_task("compiling", total=len(plan.missing), visible=bool(plan.missing))

        def compiled(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=f"compiled {label}")
            if not console.is_terminal:  # a bar shows nothing in a log
                say(console)(f"compiled {done}/{total}: {label}")

        yield compiled


def progress_bar(console: Console) -> Progress:
    """A progress bar that says what is done now, how much, and for how long."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def run_compile(
    arguments: EngineArguments, *, target: str | None, dry_run: bool, console: Console
) -> None:
    """Compile a preset; with `dry_run` only print what there is and what is missing.

    `target` names another instruction set than this machine's.
    """
    if arguments.backend == "eager":
        console.print("The eager backend compiles nothing.")
        return
    model = open_model(arguments.model, report=say(console), mtp=arguments.mtp)
    config = program_config(model, arguments.load_preset(), arguments.backend)
    store = open_store(Path(arguments.store), say(console))
    wanted = find_target(target, "--target ") if target else detect_target()
    if dry_run:
        trace_and_show(config, wanted, store, console)
        print_features(config, console)
    else:
        compile_missing(config, wanted, store, jobs=arguments.jobs, console=console)


def run_explain(
    model: str, preset: Preset, root: Path, console: Console, *, mtp: str | None
) -> None:
    """Say of every missing artifact what differs from the nearest one in the store."""
    store = open_store(root, say(console))
    opened = open_model(model, report=say(console), mtp=mtp)
    config = program_config(opened, preset, "inductor")
    target = detect_target()
    with console.status("tracing"):
        plan = plan_build(config, target=target, store=store, report=lambda *_: None)
    left = read_unfinished(store.root)
    for job in plan.missing:
        label = f"{job.label}: " if job.key.kind == "stage" else ""
        if job.key.id in left:
            say(console)(f"{label}a build host left it: {left[job.key.id].reason}")
        text = plan.traced[job.spec].text if job.spec is not None else None
        say(console)(f"{label}{explain_miss(store, job.key, text)}")
    if not plan.missing:
        say(console)(f"Nothing is missing: all {len(plan.jobs)} artifacts are in {store.root}.")
