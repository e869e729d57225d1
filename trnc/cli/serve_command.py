"""`trnc serve`: what the API process knows of the model, and how it starts its engine.

This process never imports torch, so it is up, and says what is going on, long before the engine is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console

from trnc import __version__
from trnc.checkpoint.source import resolve
from trnc.cli.console import say
from trnc.cli.options import EngineArguments
from trnc.serve.launch import ServeOptions, serve
from trnc.serve.model import load_model


def run_serve(arguments: EngineArguments, options: ServeOptions, *, names: tuple[str, ...]) -> int:
    """Serve until stopped and return the exit status. Raises TrncError for what is wrong."""
    started = time.perf_counter() - time.process_time()
    console = Console()
    source = resolve(arguments.model, report=say(console))
    say(console)(
        f"trnc {__version__}: model {source.name}, preset {arguments.preset},"
        f" backend {arguments.backend}, store {arguments.store}"
    )
    encoded = msgspec.json.encode(arguments).decode()

    def engine_argv(endpoint: str) -> Sequence[str]:
        return [sys.executable, "-m", "trnc.cli.engine_command", endpoint, encoded]

    return serve(
        engine_argv=engine_argv,
        model=load_model(source, names=names),
        options=options,
        console=console,
        started=started,
    )
