"""The engine process: `python -m trnc.cli.engine_command ENDPOINT PARENT OPTIONS`.

`serve` starts it. PARENT is the process id of the one that waits for it; OPTIONS is an
`EngineArguments` as JSON, so that nothing is parsed twice. What is imported is little: imports are
most of a start with everything cached.
"""

from __future__ import annotations

import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trnc.cli.arguments import EngineArguments
from trnc.engine.grammar import load_by_name
from trnc.engine.grammar_worker import LoadTokenizer
from trnc.engine.process import EngineOptions, Report, serve_engine
from trnc.runtime.torch_import import complete_torch, import_torch, without_collections

if TYPE_CHECKING:
    from trnc.compiler.manifest import Manifest
    from trnc.compiler.program import ProgramConfig
    from trnc.compiler.store import Store
    from trnc.ops.native import Target
    from trnc.runtime.executor import ProgramExecutor


def main() -> int:
    """Serve until told to stop; return the exit status."""
    endpoint, parent, options = sys.argv[1:]
    arguments = msgspec.json.decode(options, type=EngineArguments)
    logging.basicConfig(level=logging.INFO, format="engine: %(levelname)s %(message)s")
    return serve_engine(
        partial(start, arguments),
        endpoint,
        EngineOptions(
            overlapped=arguments.loop == "overlapped",
            max_waiting=arguments.max_waiting,
            trace=Path(arguments.trace) if arguments.trace else None,
            grammars=_tokenizer_loader(arguments),
            parent_pid=int(parent),
        ),
    )


def _tokenizer_loader(arguments: EngineArguments) -> LoadTokenizer | None:
    """What loads the tokenizer, in this process or a worker, if there are grammars to compile."""
    if not arguments.load_preset().structured_outputs:
        return None
    return partial(load_by_name, arguments.model)


def start(
    arguments: EngineArguments, report: Report
) -> tuple[ProgramExecutor, dict[str, float], tuple[str, ...]]:
    """Build the executor; what the store lacks is compiled with a progress bar on stderr."""
    begun = time.perf_counter()
    with without_collections():
        import_torch()
        if arguments.backend != "inductor":
            complete_torch()  # the reference runs on the whole torch, and lowering traces
        from trnc.runtime.packed_store import packed_root
        from trnc.runtime.start import StartOptions, require_cache, start_executor
    imports = time.perf_counter() - begun
    executor, timings, features = start_executor(
        StartOptions(
            model=arguments.model,
            preset=arguments.load_preset(),
            backend=arguments.backend,
            store=Path(arguments.store),
            packed=packed_root(),
            mtp=arguments.mtp,
            require_cache=arguments.require_cache,
        ),
        require_cache if arguments.require_cache else partial(_compile_missing, arguments.jobs),
        report,
    )
    return executor, {"imports": imports, **timings}, features


def _compile_missing(jobs: int, config: ProgramConfig, target: Target, store: Store) -> Manifest:
    complete_torch()
    from rich.console import Console

    from trnc.cli import compile_command  # a start with everything cached does without

    return compile_command.compile_missing(
        config, target, store, jobs=jobs, console=Console(stderr=True)
    )


if __name__ == "__main__":
    sys.exit(main())
