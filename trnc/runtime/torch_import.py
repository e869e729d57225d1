"""Importing torch as a serving process needs it: the longest part of a start with all cached.

The collector is off meanwhile, since all that is imported stays. And the shapes that torch
registers for its own operators (with what they import, a quarter of the time) are left out: only
tracing asks for them. Whoever traces calls `complete_torch` first. Imports no torch itself.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_FOR_TRACING = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch without what only tracing needs; nothing happens if it is imported already."""
    if "torch" not in sys.modules:
        sys.modules[_FOR_TRACING] = ModuleType(_FOR_TRACING, "Left out: see trnc.")
        importlib.import_module("torch")


def complete_torch() -> None:
    """Import what `import_torch` left out, if it did: before anything is traced."""
    module = sys.modules.get(_FOR_TRACING)
    if module is not None and module.__spec__ is None:
        del sys.modules[_FOR_TRACING]
        importlib.import_module(_FOR_TRACING)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block, and never look again at what is alive at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
