"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest


@pytest.fixture(scope="session", autouse=True)
def capture_graphs() -> Iterator[None]:
    """Write every graph that is traced to the folder that TRNC_CAPTURE_GRAPHS names, if any."""
    folder = os.environ.get("TRNC_CAPTURE_GRAPHS")
    if not folder:
        yield
        return
    from trnc.compiler import trace
    from trnc.compiler.canonical import canonical_text
    from trnc.equiv.corpus import write_graph

    export = trace._export

    def exporting(spec):
        program = export(spec)
        write_graph(Path(folder), spec.kind, spec, canonical_text(program))
        return program

    with patch.object(trace, "_export", exporting):
        yield


@pytest.fixture(scope="session")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store for the whole session: everything is compiled once.

    Workers of pytest-xdist share one: what two of them want is compiled by the first.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("store")
    folder = tmp_path_factory.getbasetemp().parent / "store"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def native_library(store_root: Path) -> Path:
    """The kernels for the best target of this machine, built and loaded once.

    A process can load one library of kernels only, so executors must find them in this store, too.
    """
    from trnc.compiler.compile import kernels_key
    from trnc.compiler.store import Store
    from trnc.ops import native

    def build(out: Path) -> None:
        native.build_kernels(target, out)

    target = native.detect_target()
    folder = Store(root=store_root, log=print).get_or_build(kernels_key(target), build)
    native.load_kernels(folder / native.LIBRARY_NAME)
    return folder / native.LIBRARY_NAME
