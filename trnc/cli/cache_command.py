"""`trnc cache`: look at the store of compiled artifacts, check it, clean it."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from trnc.cli import options
from trnc.cli.console import say
from trnc.compiler.store import Entry, Store

cache_app = typer.Typer(no_args_is_help=True, help="Look at, check and clean compiled artifacts.")


@cache_app.command()
def path(store: options.StoreFolder = None) -> None:
    """Print the folder of the store."""
    typer.echo(options.store_root(store))


@cache_app.command("ls")
def list_(store: options.StoreFolder = None) -> None:
    """List every artifact: its kind, size, age and the factors that people tell it by."""
    console = Console()
    table = Table()
    for column in ("id", "kind", "KiB", "created", "target", "graph or sources"):
        table.add_column(column)
    entries = _open(store, console).entries()
    for entry in entries:
        factors = dict(entry.key.factors)
        table.add_row(
            entry.key.id[:12],
            entry.key.kind,
            str(-(-entry.size // 1024)),
            entry.created.strftime("%Y-%m-%d %H:%M"),
            factors.get("target", "-"),
            factors.get("digest", factors.get("sources", "-"))[:12],
        )
    console.print(table)
    say(console)(f"{len(entries)} artifacts, {_mib(entries):.1f} MiB")


@cache_app.command()
def verify(store: options.StoreFolder = None) -> None:
    """Check every byte; damaged artifacts are set aside and built again when they are needed."""
    console = Console()
    opened = _open(store, console)
    total = len(opened.entries())
    damaged = opened.verify()  # the store's log says which and why
    say(console)(f"{total - len(damaged)} of {total} artifacts are whole")
    if damaged:
        raise typer.Exit(1)


@cache_app.command()
def gc(
    store: options.StoreFolder = None,
    older_than_days: Annotated[
        float | None,
        typer.Option(min=0, help="Also remove artifacts created longer ago than so many days."),
    ] = None,
) -> None:
    """Remove what builds that were killed left behind, and artifacts that were set aside."""
    console = Console()
    age = None if older_than_days is None else timedelta(days=older_than_days)
    collected = _open(store, console).gc(older_than=age)
    say(console)(
        f"removed {len(collected.artifacts)} artifacts and {collected.folders} other folders, "
        f"{collected.size / 2**20:.1f} MiB"
    )


def _open(folder: options.StoreFolder, console: Console) -> Store:
    return Store(root=options.store_root(folder), log=say(console))


def _mib(entries: list[Entry]) -> float:
    return sum(entry.size for entry in entries) / 2**20
