"""Keep served graphs from changing by accident: compare them with the lock in `graphs/`.

    python tools/graph_equiv.py check          trace the working tree; exit 1 if it differs
    python tools/graph_equiv.py accept         trace the working tree; rewrite the lock
    python tools/graph_equiv.py diff REV [REV] compare two git revisions of the lock

docs/GRAPHS.md says how to read the output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trnc.equiv.lock import PresetGraphs, compare, read_lock, read_revision, write_lock
from trnc.equiv.report import format_diff
from trnc.errors import TrncError

PRESETS = ("default", "batch8", "batch16")
LOCKED = tuple(("smollm2-135m", preset) for preset in PRESETS)
REPOSITORY = Path(__file__).resolve().parent.parent

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Graphs = Annotated[Path, typer.Option("--graphs", help="The folder of the lock.")]


@app.command()
def check(graphs: Graphs = REPOSITORY / "graphs") -> None:
    """Trace the working tree and compare with the lock; exit 1 and show the diff if they differ."""
    current = _traced()
    report = format_diff(compare(read_lock(graphs), current))
    if report:
        typer.echo(report)
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
        str | None, typer.Argument(help="Another; the working tree if absent.")
    ] = None,
) -> None:
    """Compare the locks of two git revisions, or of one and the working tree; traces nothing."""
    old = read_revision(REPOSITORY, before)
    new = read_revision(REPOSITORY, after) if after else read_lock(REPOSITORY / "graphs")
    typer.echo(format_diff(compare(old, new)) or "graphs unchanged")


def _traced() -> list[PresetGraphs]:
    # `diff` does without torch, which this imports.
    from trnc.compiler.graphs import traced_graphs

    models = REPOSITORY / "graphs"
    return [traced_graphs(models, model, preset) for model, preset in LOCKED]


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
