"""`python -m tests.serve.toy_server PORT MODE`: the launcher as `trnc serve` uses it.

The engine process is this module again, with an endpoint instead of a port. MODE is `ok`, `fail`
(the engine cannot start), `stuck` (its start never ends), `hang` (a step never ends) or `held` (no
step ends before the engine gets a SIGUSR1).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from rich.console import Console

from tests.scripted_executor import ScriptedExecutor
from tests.serve.toy_model import toy_tokenizer
from trnc.checkpoint.generation import GenerationDefaults
from trnc.core import ExecutorInfo
from trnc.errors import CheckpointError, TrncError

Built = tuple[ScriptedExecutor, dict[str, float], tuple[str, ...]]


def run_engine(endpoint: str, mode: str) -> int:
    from trnc.engine.process import EngineOptions, serve_engine

    tokenizer, _ = toy_tokenizer()
    info = ExecutorInfo(4, 64, 512, 16, 200, tokenizer.vocab_size, tokenizer.eos_token_ids)

    def build(report: Callable[[str], None]) -> Built:
        report(f"engine pid {os.getpid()}")
        if mode == "fail":
            raise CheckpointError("no weights")
        if mode == "stuck":
            threading.Event().wait()
        gate = threading.Semaphore(0) if mode in ("hang", "held") else None
        if gate is not None and mode == "held":
            signal.signal(signal.SIGUSR1, lambda *_: gate.release(10_000))
        return ScriptedExecutor(info=info, gate=gate), {"load the weights": 1.25}, ()

    return serve_engine(build, endpoint, EngineOptions(parent_pid=os.getppid()))


def run_server(port: int, mode: str) -> int:
    from trnc.serve.engine_process import engine_process
    from trnc.serve.launch import serve
    from trnc.serve.listening import ServeOptions, listen
    from trnc.serve.model import ServedModel

    started = time.perf_counter()
    tokenizer, template = toy_tokenizer()
    # An engine that is told to stop does so at once, one that hangs never.
    stop_seconds = 0.3 if mode in ("hang", "held") else 600
    grace = 1 if mode == "hang" else 600
    options = ServeOptions(port=port, grace_seconds=grace, engine_stop_seconds=stop_seconds)

    def argv(endpoint: str) -> list[str]:
        return [sys.executable, "-m", __spec__.name, endpoint, mode]

    try:
        with listen(options) as listener, engine_process(argv) as engine:
            return serve(
                listener=listener,
                engine=engine,
                model=ServedModel(
                    names=("toy",),
                    tokenizer=tokenizer,
                    template=template,
                    defaults=GenerationDefaults(),
                ),
                options=options,
                settings={},
                console=Console(),
                started=started,
            )
    except TrncError as error:
        print(f"error: {error}", flush=True)
        return 1


if __name__ == "__main__":
    where, mode = sys.argv[1:]
    sys.exit(run_server(int(where), mode) if where.isdecimal() else run_engine(where, mode))
