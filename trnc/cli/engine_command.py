"""The engine process: `python -m trnc.cli.engine_command ENDPOINT OPTIONS`, started by `serve`.

OPTIONS is an `EngineArguments` as JSON, so that nothing is parsed twice.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from trnc.cli.options import EngineArguments
from trnc.core import Executor
from trnc.engine.process import EngineOptions, Report, serve_engine
from trnc.presets import load_preset

if TYPE_CHECKING:
    from trnc.compiler.manifest import Manifest
    from trnc.compiler.program import ProgramConfig
    from trnc.compiler.store import Store
    from trnc.ops.native import Target


def main() -> int:
    """Serve until told to stop; return the exit status."""
    endpoint, options = sys.argv[1:]
    arguments = msgspec.json.decode(options, type=EngineArguments)
    logging.basicConfig(level=logging.INFO, format="engine: %(levelname)s %(message)s")
    return serve_engine(
        partial(start, arguments),
        endpoint,
        EngineOptions(
            overlapped=arguments.loop == "overlapped",
            max_waiting=arguments.max_waiting,
            trace=Path(arguments.trace) if arguments.trace else None,
            parent_pid=os.getppid(),
        ),
    )


def start(
    arguments: EngineArguments, report: Report
) -> tuple[Executor, dict[str, float], tuple[str, ...]]:
    """Build the executor; what the store lacks is compiled with a progress bar on stderr."""
    begun = time.perf_counter()
    from trnc.runtime.start import StartOptions, require_cache, start_executor

    imports = time.perf_counter() - begun

    def compile_missing(config: ProgramConfig, target: Target, store: Store) -> Manifest:
        from trnc.cli import compile_command  # a start with everything cached does without

        return compile_command.compile_missing(
            config, target, store, jobs=arguments.jobs, console=Console(stderr=True)
        )

    executor, timings, features = start_executor(
        StartOptions(
            model=arguments.model,
            preset=load_preset(arguments.preset),
            backend=arguments.backend,
            store=Path(arguments.store),
        ),
        require_cache if arguments.require_cache else compile_missing,
        report,
    )
    return executor, {"imports": imports, **timings}, features


if __name__ == "__main__":
    sys.exit(main())
