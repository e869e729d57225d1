"""`trnc serve`: what the API process knows of the model, and how it starts its engine.

This process never imports torch. It starts the engine as soon as it knows with what, and imports
what it serves with meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from trnc import __version__
from trnc.checkpoint.source import resolve
from trnc.cli.arguments import EngineArguments
from trnc.cli.console import say, tell
from trnc.serve.engine_process import engine_process
from trnc.serve.listening import ServeOptions, listen


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserNames:
    """How the model's answers are read: names of parsers, or `auto`, or `none`."""

    reasoning: str = "auto"
    tool_call: str = "auto"


def run_serve(
    arguments: EngineArguments,
    options: ServeOptions,
    *,
    names: tuple[str, ...],
    parsers: ParserNames,
) -> int:
    """Serve until stopped and return the exit status. Raises TrncError for what is wrong."""
    started = time.perf_counter() - time.process_time()
    source = resolve(arguments.model, report=tell)
    encoded = msgspec.json.encode(arguments).decode()
    module = "trnc.cli.engine_command"

    def engine_argv(endpoint: str) -> Sequence[str]:
        return [sys.executable, "-m", module, endpoint, str(os.getpid()), encoded]

    # Until the server handles it: leave through the blocks below, which stop the engine.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with listen(options) as listener, engine_process(engine_argv) as engine:
        from rich.console import Console

        console = Console()
        say(console)(
            f"trnc {__version__}: model {source.name}, preset {arguments.preset},"
            f" backend {arguments.backend}, store {arguments.store}"
        )
        from trnc.serve.launch import serve
        from trnc.serve.model import load_model

        return serve(
            listener=listener,
            engine=engine,
            model=load_model(
                source,
                names=names,
                reasoning_parser=parsers.reasoning,
                tool_call_parser=parsers.tool_call,
            ),
            options=options,
            settings=msgspec.to_builtins(arguments),
            console=console,
            started=started,
        )
