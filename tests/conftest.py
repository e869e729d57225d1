"""Fixtures that several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for the best target of this machine, built and loaded once."""
    from trnc.ops import native

    path = native.build_kernels(native.detect_target(), tmp_path_factory.mktemp("kernels"))
    native.load_kernels(path)
    return path
