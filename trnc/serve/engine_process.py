"""The engine as a child process, started before this process imports what it serves with.

The child has a session of its own: a Ctrl-C reaches this process only, which lets open streams
finish and then stops the engine. It connects to a socket that may be bound later.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

EngineArgv = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine and the ZeroMQ endpoint that it connects to."""

    endpoint: str
    process: subprocess.Popen[bytes]


@contextmanager
def engine_process(engine_argv: EngineArgv) -> Iterator[EngineProcess]:
    """Run an engine in the block; it is gone afterwards, if need be by force.

    `engine_argv` returns its command line for an endpoint.
    """
    with tempfile.TemporaryDirectory(prefix="trnc-") as folder:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        process = subprocess.Popen(engine_argv(endpoint), start_new_session=True)
        try:
            yield EngineProcess(endpoint, process)
        finally:
            process.kill()
            process.wait()
