"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

# The longest first, so that no worker is left alone with one of them at the end.
LONGEST = (
    "tests/runtime/test_one_answer.py",
    "tests/cli/test_schemas.py",
    "tests/runtime/test_default_model.py",
    "tests/ops/test_native.py",
    "tests/cli/test_serve.py",
    "tests/runtime/test_feature_pairs.py",
    "tests/runtime/test_speculation.py",
    "tests/trainium/test_serving.py",
    "tests/runtime/test_features.py",
    "tests/runtime/test_damage.py",
    "tests/models/test_oracle.py",
    "tests/compiler/test_trace.py",
    "tests/models/test_mtp.py",
    "tests/cli/test_compile.py",
    "tests/trainium/test_modules.py",
    "tests/trainium/test_rows.py",
)

# How Inductor compiles the calls between its kernels; the kernels themselves have the same code.
# It saves a third of what a tiny stage takes. The default model is compiled as for its users.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {config.rootpath / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


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
    from trnc.compiler.compile import Job, kernels_key, write_artifact
    from trnc.compiler.store import Store
    from trnc.ops import native

    target = native.detect_target()
    job = Job(key=kernels_key(target), label="kernels")
    store = Store(root=store_root, log=print)
    folder = store.get_or_build(job.key, partial(write_artifact, job, target))
    native.load_kernels(folder / native.LIBRARY_NAME)
    return folder / native.LIBRARY_NAME


@pytest.fixture(scope="module")
def own_store(native_library: Path, store_root: Path) -> Iterator[None]:
    """The user's own store, for the default model; it takes its kernels from the session's.

    So it does the program runner. What it lacks otherwise, all stages, is compiled as `trnc` does
    it for its users.
    """
    from trnc.compiler.backends.inductor import WRAPPER_LEVEL
    from trnc.compiler.compile import Job, runner_key, write_artifact
    from trnc.compiler.store import Store
    from trnc.compiler.tier import VARIABLE
    from trnc.ops import native

    job = Job(key=runner_key(), label="runner")
    build = partial(write_artifact, job, native.detect_target())
    Store(root=store_root, log=print).get_or_build(job.key, build)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, f"file://{store_root}")
        environment.delenv(WRAPPER_LEVEL)
        yield
