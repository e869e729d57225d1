"""Where packed weights are kept: a `Store` of their own, beside that of the compiled artifacts.

Their key names files of this machine, which no key of a compiled artifact does. Imports no torch:
`trnc cache` looks at them, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from trnc.checkpoint.source import cache_dir
from trnc.compiler.store import ArtifactKey, Entry, Store

_KEPT = 2  # of one checkpoint: two versions of trnc may take turns
HASH_LIMIT = 4 << 20  # bytes; the tensors are above, what says where they are is below


def packed_root() -> Path:
    """Return the folder of packed weights in the user's cache."""
    return cache_dir() / "packed"


def packed_store(root: Path, log: Callable[[str], None]) -> Store:
    """Open the store of packed weights in `root`."""
    return Store(root=root, log=log, hash_limit=HASH_LIMIT)


def checkpoint_factors(checkpoint: Path) -> dict[str, str]:
    """Return what tells a checkpoint from others, and from what it was before.

    That is the path, and name, size and time of the last change of every file that holds weights:
    to read them all would take longer than packing.
    """
    stats = [(file.name, file.stat()) for file in _weight_files(checkpoint)]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return {"checkpoint": str(checkpoint), "files": digest}


def is_stale(entry: Entry) -> bool:
    """Tell whether packed weights are of no use any more: their checkpoint is gone or changed."""
    factors = dict(entry.key.factors)
    return checkpoint_factors(Path(factors["checkpoint"]))["files"] != factors["files"]


def discard_superseded(store: Store, key: ArtifactKey) -> None:
    """Remove what was packed of the same checkpoint before, but for the newest."""
    older = [e for e in store.entries() if e.key.id != key.id and _slot(e.key) == _slot(key)]
    for entry in older[: len(older) + 1 - _KEPT]:
        store.discard(entry.key.id)


def _slot(key: ArtifactKey) -> tuple[str, str]:
    """What stays the same when a checkpoint or trnc changes."""
    factors = dict(key.factors)
    return factors["checkpoint"], factors["formats"]


def _weight_files(checkpoint: Path) -> Iterator[Path]:
    if checkpoint.is_dir():
        yield from (p for p in sorted(checkpoint.glob("*.safetensors*")) if p.exists())
    elif checkpoint.exists():
        yield checkpoint
