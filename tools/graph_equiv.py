"""Keep served graphs from changing by accident: compare them with the lock in `graphs/`.

    python tools/graph_equiv.py check          trace the working tree; exit 1 if it differs
    python tools/graph_equiv.py accept         trace the working tree; rewrite the lock
    python tools/graph_equiv.py diff REV [REV] compare two git revisions of the lock
    python tools/graph_equiv.py prove A [B]    show that changed graphs compute what they computed
    python tools/graph_equiv.py prove --promises    prove what is promised of every locked preset
    python tools/graph_equiv.py replay BASE    compare the graphs that the test suite traces
    python tools/graph_equiv.py try-prover     the prover on random rewrites and mutations

docs/GRAPHS.md says how to read the output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trnc.equiv.corpus import UNCHANGED, Replay, compare_corpora, format_replay
from trnc.equiv.egraph import Limits
from trnc.equiv.lock import (
    LockDiff,
    PresetGraphs,
    StageChange,
    compare,
    read_lock,
    read_revision,
    read_stage,
    write_lock,
)
from trnc.equiv.page import html_page
from trnc.equiv.report import format_diff
from trnc.errors import TrncError
from trnc.presets import preset_names

LOCKED = (
    *(("smollm2-135m", preset) for preset in preset_names()),
    *(("tiny-glm", preset) for preset in ("default", "batch8")),
    *(("tiny-glm", f"mtp-{kind}") for kind in ("dynamic", "always", "latency", "throughput")),
)
REPOSITORY = Path(__file__).resolve().parent.parent

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Graphs = Annotated[Path, typer.Option("--graphs", help="The folder of the lock.")]


Html = Annotated[
    Path | None, typer.Option("--html", help="Also write the difference as one page for a browser.")
]


@app.command()
def check(graphs: Graphs = REPOSITORY / "graphs", html: Html = None) -> None:
    """Trace the working tree and compare with the lock; exit 1 and show the diff if they differ."""
    current = _traced()
    change = compare(read_lock(graphs), current)
    _write_page(html, change, "the lock → working tree")
    if change:
        typer.echo(format_diff(change))
        typer.echo(
            "\nThe graphs differ from the lock. If that is meant, run"
            " `python tools/graph_equiv.py accept` and commit graphs/."
        )
        raise typer.Exit(1)
    variants = sum(len(p.variants) for p in current)
    stages = {digest for p in current for digest in p.stages}
    typer.echo(f"graphs unchanged: {variants} variants, {len(stages)} distinct stages")


@app.command()
def accept(graphs: Graphs = REPOSITORY / "graphs") -> None:
    """Trace the working tree, rewrite the lock, and show what changed in it."""
    current = _traced()
    report = format_diff(compare(_read_old(graphs), current))
    write_lock(graphs, current)
    typer.echo(report or "graphs unchanged")


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="A git revision.")],
    after: Annotated[
        str | None, typer.Argument(help="Another; the working tree's lock if absent.")
    ] = None,
    html: Html = None,
) -> None:
    """Compare the locks of two git revisions, or of one and the working tree; traces nothing."""
    change = _change(before, after)
    typer.echo(format_diff(change) or "graphs unchanged")
    _write_page(html, change, f"{before} → {after or 'working tree'}")


@app.command()
def prove(
    before: Annotated[
        str | None,
        typer.Argument(help="A git revision, a stage in graphs/stages, or a file of a graph."),
    ] = None,
    after: Annotated[
        str | None,
        typer.Argument(help="The other one; the working tree's lock if absent."),
    ] = None,
    promises: Annotated[
        bool, typer.Option("--promises", help="Prove the promises of every locked preset.")
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="Prove them of static buckets, one by one.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Give up at so many e-graph nodes.")] = 30_000,
    seconds: Annotated[float, typer.Option(min=0, help="Give up after so long.")] = 10.0,
) -> None:
    """Show that graphs whose texts differ compute the same function, over the reals.

    Exit status: 0 all proved, 1 something refuted, 3 something unknown.
    """
    limits = Limits(nodes, seconds)
    if promises == (before is not None):
        raise TrncError("give two graphs or revisions to compare, or --promises, not both")
    if before is None:
        verdicts = list(_prove_promises(limits, static=static))
    else:
        verdicts = [_prove_change(change, limits) for change in _stage_changes(before, after)]
        typer.echo("nothing differs" if not verdicts else "")
    raise typer.Exit(1 if "refuted" in verdicts else 3 if "unknown" in verdicts else 0)


def _stage_changes(before: str, after: str | None) -> tuple[StageChange, ...]:
    stages = [read_stage(REPOSITORY / "graphs", name) for name in (before, after) if name]
    if len(stages) == 2 and stages[0] and stages[1]:
        return (StageChange(stages[0], stages[1], ()),)
    change = _change(before, after)
    for variant in (v for preset in change.presets for v in preset.changed):
        if variant.has_new_wiring:
            typer.echo(f"{variant.name}: its values are bound otherwise, which is not compared")
    return change.stages


def _change(before: str, after: str | None) -> LockDiff:
    old = read_revision(REPOSITORY, before)
    new = read_revision(REPOSITORY, after) if after else read_lock(REPOSITORY / "graphs")
    return compare(old, new)


def _prove_change(change: StageChange, limits: Limits) -> str:
    from trnc.equiv.prove import format_proof, prove

    old, new = change.before, change.after
    if old is None or new is None:
        stage = old or new
        assert stage is not None
        typer.echo(f"{stage.label}: {'new' if old is None else 'gone'}, nothing to compare with")
        return "unknown"
    proof = prove(old.text, new.text, limits=limits)
    typer.echo(format_proof(f"{old.label} -> {new.label}", proof))
    return proof.verdict


def _prove_promises(limits: Limits, *, static: bool) -> Iterator[str]:
    from trnc.compiler.graphs import locked_config
    from trnc.compiler.promises import Prover, claims
    from trnc.compiler.texts import stage_texts

    start = time.perf_counter()
    configs = {pair: locked_config(REPOSITORY / "graphs", *pair) for pair in LOCKED}
    made = {
        pair: list(claims(replace(config, static_buckets=static)))
        for pair, config in configs.items()
    }
    stages = (spec for each in made.values() for claim in each for spec in claim.stages)
    traced = stage_texts(stages, workers=_workers())
    prover = Prover(texts={spec: stage.text for spec, stage in traced.items()}, limits=limits)
    for pair, each in made.items():
        proofs = [prover.prove(claim) for claim in each]
        kept = sum(proof.verdict == "proved" for proof in proofs)
        elapsed = time.perf_counter() - start
        typer.echo(f"{'/'.join(pair)}: {kept} of {len(each)} promises proved ({elapsed:.0f} s)")
        for claim, proof in zip(each, proofs, strict=True):
            if proof.verdict != "proved":
                typer.echo(f"  {proof.verdict}: {claim.statement}: {proof.reason}")
            yield proof.verdict


@app.command()
def replay(
    base: Annotated[str, typer.Argument(help="A git revision to compare with.")],
    tests: Annotated[
        list[str] | None, typer.Argument(help="What pytest runs. Default: tests/compiler.")
    ] = None,
) -> None:
    """Run tests here and in a checkout of BASE, and compare every graph that both trace.

    Exit status 1 if a graph differs and a commit since BASE has [graphs-unchanged] in its message;
    without it, differences are only shown.
    """
    with tempfile.TemporaryDirectory() as scratch:
        other, folders = Path(scratch) / "base", [Path(scratch) / name for name in ("a", "b")]
        _git("worktree", "add", "--detach", "--quiet", str(other), base)
        try:
            for tree, folder in zip((other, REPOSITORY), folders, strict=True):
                _capture(tree, folder, tests or ["tests/compiler"])
            result = compare_corpora(*folders)
        finally:
            _git("worktree", "remove", "--force", str(other))
    typer.echo(format_replay(result))
    messages = _git("log", "--format=%B", f"{base}..HEAD")
    if status := replay_status(result, messages):
        typer.echo(f"\nA commit since {base} says {UNCHANGED}, and these graphs changed.")
    raise typer.Exit(status)


def replay_status(result: Replay, messages: str) -> int:
    """Return the exit status: a changed graph is an error of a refactor."""
    return 1 if result.changed and UNCHANGED in messages else 0


def _capture(tree: Path, folder: Path, tests: list[str]) -> None:
    """Run tests of a tree; some may fail there, the graphs that were traced still count."""
    environment = {"PYTHONPATH": str(tree), "TRNC_CAPTURE_GRAPHS": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    typer.echo(f"{tree.name}: {''.join(last)}", err=True)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise TrncError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


@app.command("try-prover")
def try_prover(
    count: Annotated[int, typer.Option(min=1, help="How many of each.")] = 500,
    first: Annotated[int, typer.Option(min=0, help="Where to begin: a trial in parts.")] = 0,
    seed: Annotated[int, typer.Option(help="Another seed, other variations.")] = 0,
) -> None:
    """Try the prover on random rewrites and mutations of the tiny model's stages.

    Exit status 1 if a mutation is proved or a rewrite refuted.
    """
    import torch

    from trnc.equiv.trial import Trial, format_trial, run_trial

    def report(number: int, trial: Trial) -> None:
        if (done := number + 1 - first) % 25 == 0 and done < count:
            typer.echo(f"after {done} of {count}:\n{format_trial(trial)}", err=True)

    torch.set_num_threads(1)
    stages = {
        stage.label: stage.text
        for preset in read_lock(REPOSITORY / "graphs")
        if preset.model == "tiny-glm"
        for stage in preset.stages.values()
    }
    trial = run_trial(stages, range(first, first + count), seed, report)
    typer.echo(format_trial(trial))
    raise typer.Exit(0 if trial.is_sound else 1)


def _write_page(path: Path | None, change: LockDiff, title: str) -> None:
    if path is not None:
        path.write_text(html_page(change, title))


def _traced() -> list[PresetGraphs]:
    # `diff` does without torch, which this imports.
    from trnc.compiler.graphs import traced_graphs

    return traced_graphs(REPOSITORY / "graphs", LOCKED, workers=_workers())


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _read_old(graphs: Path) -> tuple[PresetGraphs, ...]:
    """Read the lock that is about to be replaced; a broken one counts as none."""
    try:
        return read_lock(graphs)
    except TrncError as error:
        typer.echo(f"the old lock is replaced: {error}", err=True)
        return ()


def main() -> None:
    try:
        app()
    except TrncError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
