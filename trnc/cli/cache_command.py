"""`trnc cache`: look at compiled artifacts and packed weights, check them, clean up."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from trnc.cli import options
from trnc.cli.console import tell
from trnc.compiler.statistics import by_kind, folder_size, unreferenced
from trnc.compiler.store import Collected, Entry, Store
from trnc.compiler.tier import VARIABLE, open_store
from trnc.runtime.packed_store import is_stale, packed_root, packed_store

cache_app = typer.Typer(
    no_args_is_help=True,
    help="Look at, check, clean and carry compiled artifacts and packed weights.",
)


@cache_app.command()
def path(store: options.StoreFolder = None) -> None:
    """Print the folder of the store."""
    typer.echo(options.store_root(store))


@cache_app.command("ls")
def list_(store: options.StoreFolder = None) -> None:
    """List every artifact: its kind, size, age and the factors that people tell it by."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("id", "kind", "KiB", "created", "target", "graph or sources"):
        table.add_column(column)
    entries = _open(store).entries()
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
    Console().print(table)
    tell(f"{len(entries)} artifacts, {_mib(entries):.1f} MiB")
    for entry in _packed().entries():
        of = dict(entry.key.factors)["checkpoint"] + (", which changed" if is_stale(entry) else "")
        tell(f"packed weights {entry.key.id[:12]}, {_mib([entry]):.1f} MiB, of {of}")


@cache_app.command()
def stats(store: options.StoreFolder = None) -> None:
    """Say what the store holds by kind and toolchain, and what of it no manifest needs."""
    from rich.console import Console
    from rich.table import Table

    opened = _open(store)
    table = Table()
    for column in ("kind", "artifacts", "MiB", "targets", "torch"):
        table.add_column(column)
    entries = opened.entries()
    for kind, group in by_kind(entries).items():
        factors = [dict(entry.key.factors) for entry in group]
        table.add_row(
            kind,
            str(len(group)),
            f"{_mib(group):.1f}",
            ", ".join(sorted({f["target"] for f in factors if "target" in f})) or "-",
            ", ".join(sorted({f["torch"].split()[0] for f in factors if "torch" in f})) or "-",
        )
    Console().print(table)
    unused = unreferenced(entries)
    tell(f"{len(entries)} artifacts, {_mib(entries):.1f} MiB in {opened.root}")
    tell(f"{len(unused)} of them, {_mib(unused):.1f} MiB, are named by no manifest")
    for folder, what in (("quarantine", "set aside as damaged"), ("inductor", "Inductor's cache")):
        if (size := folder_size(opened.root / folder)) > 0:
            tell(f"{what}: {size / 2**20:.1f} MiB in {opened.root / folder}")
    packed = _packed().entries()
    tell(f"packed weights: {len(packed)}, {_mib(packed):.1f} MiB in {packed_root()}")
    if second := os.environ.get(VARIABLE):
        tell(f"second tier: {second}")


@cache_app.command("pack")
def pack_(
    file: Annotated[Path, typer.Argument(help="The file to write, such as store.tar.gz.")],
    store: options.StoreFolder = None,
) -> None:
    """Write all artifacts to one file, for `trnc cache unpack` on another machine."""
    from trnc.compiler.archive import pack

    packed = pack(_open(store), file)
    tell(
        f"packed {packed.artifacts} artifacts, {packed.size / 2**20:.1f} MiB, into {file}"
        f" ({file.stat().st_size / 2**20:.1f} MiB)"
    )


@cache_app.command("unpack")
def unpack_(
    file: Annotated[Path, typer.Argument(help="A file that `trnc cache pack` wrote.")],
    store: options.StoreFolder = None,
) -> None:
    """Add the artifacts of a file to the store; every byte is checked first."""
    from trnc.compiler.archive import unpack

    opened = _open(store)
    unpacked = unpack(opened, file)
    tell(f"added {unpacked.added} artifacts to {opened.root}, {unpacked.present} were there")
    for reason in unpacked.refused:
        tell(reason)
    if unpacked.refused:
        raise typer.Exit(1)


@cache_app.command()
def verify(store: options.StoreFolder = None) -> None:
    """Check every byte; damaged artifacts are set aside and built again when they are needed."""
    whole = True
    for opened, what in ((_open(store), "artifacts"), (_packed(), "packed weights")):
        total = len(opened.entries())
        damaged = opened.verify()  # the store's log says which and why
        whole = whole and not damaged
        tell(f"{total - len(damaged)} of {total} {what} are whole")
    if not whole:
        raise typer.Exit(1)


@cache_app.command()
def gc(
    store: options.StoreFolder = None,
    older_than_days: Annotated[
        float | None,
        typer.Option(min=0, help="Also remove artifacts created longer ago than so many days."),
    ] = None,
) -> None:
    """Remove what builds that were killed left behind, artifacts that were set aside, and packed
    weights whose checkpoint is gone or changed."""
    age = None if older_than_days is None else timedelta(days=older_than_days)
    _tell_removed(_open(store).gc(older_than=age), "artifacts")
    packed = _packed()
    useful = [entry.key.id for entry in packed.entries() if not is_stale(entry)]
    _tell_removed(packed.gc(keep=useful), "packed weights without their checkpoint")
    if age is not None:
        _tell_removed(packed.gc(older_than=age), "packed weights")


def _tell_removed(collected: Collected, what: str) -> None:
    tell(
        f"removed {len(collected.artifacts)} {what} and {collected.folders} other folders, "
        f"{collected.size / 2**20:.1f} MiB"
    )


def _open(folder: options.StoreFolder) -> Store:
    return open_store(options.store_root(folder), tell)


def _mib(entries: list[Entry]) -> float:
    return sum(entry.size for entry in entries) / 2**20


def _packed() -> Store:
    return packed_store(packed_root(), tell)
