"""`trnc compile --backend trainium`: lower, check, estimate, then compile or bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trnc.cli.arguments import FeatureArguments, check_mtp
from trnc.cli.compile_command import progress_bar
from trnc.cli.console import say
from trnc.compiler.backends.stablehlo import bundle as bundles
from trnc.compiler.backends.stablehlo import neuron, require_jax
from trnc.compiler.backends.stablehlo.targets import DEFAULT_TARGET, NeuronTarget, neuron_target
from trnc.compiler.store import Store
from trnc.compiler.tier import open_store
from trnc.core import VariantKey
from trnc.errors import CompileError, ConfigError
from trnc.presets import load_preset, with_features

if TYPE_CHECKING:
    from trnc.compiler.backends.stablehlo.build import Plan
    from trnc.compiler.backends.stablehlo.check import Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainiumArguments:
    """What is compiled, and where to."""

    model: str
    preset: str
    target: str | None
    store: Path
    jobs: int
    dry_run: bool
    bundle: Path | None
    mtp: str | None = None
    features: FeatureArguments = field(default_factory=FeatureArguments)


def run_trainium(arguments: TrainiumArguments, *, finish: Path | None, console: Console) -> None:
    """Compile a preset for Trainium, or finish a bundle.

    Raises:
        CompileError: a variant breaks a rule, or the compiler failed; nothing of it is kept.
    """
    store = open_store(arguments.store, say(console))
    if finish is not None:
        if arguments.bundle is not None or arguments.dry_run:
            raise ConfigError("--finish compiles a bundle as it is: give no --bundle or --dry-run")
        _finish(finish, store, arguments.jobs, console)
        return
    require_jax("--backend trainium")
    target = neuron_target(arguments.target or DEFAULT_TARGET)
    plan = _plan(arguments, target, console)
    _print_matrix(plan, store, console)
    if arguments.dry_run:
        return
    modules = _lower(plan, store, console)
    _check(plan, modules, console)
    version = neuron.compiler_version()
    if version is not None and arguments.bundle is None:
        jobs = [_job(plan, key, folder) for key, folder in modules.items()]
        _compile(jobs, version, store, arguments.jobs, console)
    else:
        _bundle(arguments, plan, modules, console)


def _plan(arguments: TrainiumArguments, target: NeuronTarget, console: Console) -> Plan:
    from trnc.compiler.backends.stablehlo.build import plan_modules
    from trnc.runtime.start import open_model, program_config

    features = arguments.features
    loaded = load_preset(arguments.preset)
    preset = with_features(loaded, features.switched, features.penalty_buckets)
    check_mtp(arguments.mtp, preset)
    model = open_model(arguments.model, report=say(console), mtp=arguments.mtp)
    config = program_config(model, preset, "neuron")
    with progress_bar(console) as progress:
        task = progress.add_task("tracing", total=None)

        def tracing(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done + 1, total=total, description=f"tracing {label}")

        return plan_modules(config, target, report=tracing)


def _print_matrix(plan: Plan, store: Store, console: Console) -> None:
    report, preset = say(console), plan.config.preset
    contexts = ", ".join(map(str, plan.config.contexts))
    report(
        f"Preset {preset.name} for {plan.target.name}: {len(plan.programs)} variants, "
        f"{plan.ranks} rank(s), contexts {contexts}, {plan.pages} KV pages."
    )
    there = sum(store.get(plan.key(key)) is not None for key in plan.programs)
    report(f"In the store: {there} modules. To lower: {len(plan.programs) - there}.")


def _lower(plan: Plan, store: Store, console: Console) -> dict[VariantKey, Path]:
    from trnc.compiler.backends.stablehlo.build import build_modules

    with progress_bar(console) as progress:
        task = progress.add_task("lowering", total=len(plan.programs))

        def lowering(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done + 1, total=total, description=f"lowering {label}")

        manifest = build_modules(plan, store, report=lowering)
    folders = {}
    for key, artifact in manifest.modules:
        folder = store.find(artifact)
        if folder is None:
            raise CompileError(f"module {key} vanished from {store.root}; run it again")
        folders[key] = folder
    return folders


def _check(plan: Plan, modules: dict[VariantKey, Path], console: Console) -> None:
    """Print what is found and what memory is needed; raises CompileError on an error."""
    from trnc.compiler.backends.stablehlo.build import read_module
    from trnc.compiler.backends.stablehlo.check import check_modules

    lnc = plan.config.preset.trainium.lnc
    read = ((key, read_module(folder)) for key, folder in modules.items())
    checked = check_modules(read, plan.target, lnc)
    print_checked(checked, console)
    if checked.errors:
        raise CompileError(
            f"{len(checked.errors)} rule(s) of {plan.target.name} are broken, the first by "
            f"{checked.errors[0].where}: {checked.errors[0].message}"
        )


def print_checked(checked: Checked, console: Console) -> None:
    """Print the tables of the lint and of the memory."""
    if checked.found:
        table = Table(title="Rules of the Neuron compiler")
        for column in ("level", "rule", "code", "variants", "first at", "what"):
            table.add_column(column)
        for row in checked.found:
            table.add_row(
                row.level, row.rule, row.code or "-", str(row.variants), row.where, row.message
            )
        console.print(table)
    else:
        say(console)("The Neuron rules find nothing.")
    table = Table(title="Memory of one core, GiB (estimated)")
    for column in ("step", "weights", "KV and state", "largest buffers", "sum", "of"):
        table.add_column(column)
    for step, need in checked.needs.items():
        parts = (need.weights, need.state, need.buffers, need.total, need.limit)
        table.add_row(step, *(f"{part / 2**30:.2f}" for part in parts))
    console.print(table)


def _job(plan: Plan, key: VariantKey, folder: Path) -> neuron.Job:
    from trnc.compiler.backends.stablehlo.build import HLO_FILE

    flags = neuron.flags(plan.config.preset.trainium, key.step, plan.target.name)
    return neuron.Job(str(key), folder / HLO_FILE, flags, plan.target.name, plan.ranks)


def _compile(
    jobs: list[neuron.Job], version: str, store: Store, workers: int, console: Console
) -> None:
    workers, report = _workers(workers, console), _reporter(console)
    neuron.compile_all(jobs, version=version, store=store, workers=workers, report=report)
    say(console)(f"All {len(jobs)} modules are compiled, in {store.root}")


def _reporter(console: Console) -> Callable[[int, int, str], None]:
    return lambda done, total, label: say(console)(f"compiled {done}/{total}: {label}")


def _workers(wanted: int, console: Console) -> int:
    from trnc.runtime.state import free_memory_bytes

    workers = neuron.job_limit(wanted, free_memory_bytes())
    say(console)(f"{workers} compiler(s) at once, {neuron.JOB_GIB} GiB each")
    return workers


def _bundle(
    arguments: TrainiumArguments, plan: Plan, modules: dict[VariantKey, Path], console: Console
) -> None:
    preset, target = plan.config.preset, plan.target.name
    folder = arguments.bundle or Path(f"trnc-{preset.name}-{target}")
    bundles.write_bundle(
        folder, modules, preset=preset.name, target=target, options=preset.trainium
    )
    say(console)(
        f"To be compiled: {len(modules)} modules in {folder}. Take it to a machine with "
        f"{neuron.COMPILER} and run `trnc compile --finish {folder}` there."
    )


def _finish(folder: Path, store: Store, workers: int, console: Console) -> None:
    bundles.read_bundle(folder)  # what is no bundle is told before anything else
    workers, report = _workers(workers, console), _reporter(console)
    count = bundles.finish(folder, store=store, workers=workers, report=report)
    say(console)(f"Finished: {count} modules of {folder} have their {neuron.NEFF_FILE}.")
