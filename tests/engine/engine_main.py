"""An engine process for tests: `python -m tests.engine.engine_main ENDPOINT [watched]`.

With `watched` it is started by a parent of its own, which then waits to be killed.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.scripted_executor import ScriptedExecutor, small_info
from trnc.engine.executor import Executor
from trnc.engine.process import EngineOptions, Report, serve_engine


def build(report: Report) -> tuple[Executor, dict[str, float], tuple[str, ...]]:
    report("building")
    return ScriptedExecutor(info=small_info(num_pages=4097, max_context=16384)), {"all": 0.5}, ()


def main(endpoint: str, watched: bool) -> int:
    if watched:
        engine = subprocess.Popen([sys.executable, "-m", __spec__.name, endpoint])
        return engine.wait()
    return serve_engine(build, endpoint, EngineOptions(parent_pid=os.getppid()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], len(sys.argv) > 2))
