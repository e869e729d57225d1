"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.harness import Server, running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for the tests of a module that leave it as it was."""
    with running() as server:
        yield server
        server.check_idle()
