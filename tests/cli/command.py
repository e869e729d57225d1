"""The real `trnc` command, as a person runs it: a process, its output, its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TRNC = str(Path(sys.executable).with_name("trnc"))


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """Our environment with the width of a terminal, without colours."""
    return {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", **changes}


def trnc(*arguments: str | Path, **changes: str) -> Ran:
    """Run a command to its end; `changes` are environment variables."""
    done = subprocess.run(
        [TRNC, *map(str, arguments)],
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def fails(*arguments: str | Path, **changes: str) -> str:
    """Run a command that must fail with one line, and return that line."""
    ran = trnc(*arguments, **changes)
    assert ran.status == 1, ran
    assert "Traceback" not in ran.err + ran.out
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1, ran.err
    return ran.err
