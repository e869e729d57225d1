"""Where an op of a traced graph was written: an annotation for people, part of no digest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary
from unittest.mock import patch

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

_TORCH = str(Path(torch.__file__).parent)
_OPS = str(Path(__file__).parent.parent / "ops")


@contextmanager
def recording_sources() -> Iterator[None]:
    """Make `torch.export` note every caller's line, for `source_of`.

    By itself it keeps only the frames of functions named `forward`, so everything that a stage
    calls would seem to come from one line. Tracing is changed for the whole process meanwhile.
    """

    def without_torch(_: PythonKeyTracer, frames: StackSummary) -> StackSummary:
        return StackSummary.from_list(f for f in frames if not f.filename.startswith(_TORCH))

    with patch.object(PythonKeyTracer, "_filter_traceback_frames", without_torch):
        yield


def source_of(node: Node) -> str | None:
    """Return `file:line` of the innermost frame that called the op, outside of `trnc.ops`.

    Files below the working directory are given relative to it.
    """
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    callers = [frame for frame in frames if not frame[0].startswith(_OPS)]
    if not callers:
        return None
    file, line = callers[-1]
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"
