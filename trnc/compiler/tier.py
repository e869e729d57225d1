"""A second tier behind the store: a folder or a URL that holds what another machine compiled.

It has the layout of a store (`objects/ab/<id>/...`): a copy of a store's folder, or one that `trnc
cache unpack` filled. It is only read. Artifacts are served from a folder in place; from a URL they
are copied into the store, once. Every byte is checked in both cases. `TRNC_STORE_SECOND` names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trnc.compiler.store import RECORD, Store, damage, read_record
from trnc.errors import ConfigError

VARIABLE = "TRNC_STORE_SECOND"
Log = Callable[[str], None]


class FolderTier:
    """A folder of artifacts, for example on a shared disk."""

    def __init__(self, *, root: Path, log: Log) -> None:
        """Read artifacts below `root`; `log` gets a line for each damaged one."""
        self._root, self._log = root, log

    def find(self, id: str, store: Store) -> Path | None:
        """Return the folder of a whole artifact; a damaged one is logged and left where it is."""
        del store  # nothing is copied
        path = self._root / "objects" / id[:2] / id
        if not path.is_dir():
            return None
        if (reason := damage(path, id, None)) is None:
            return path
        self._log(f"second tier: artifact {id[:12]} in {self._root} is damaged ({reason})")
        return None


class UrlTier:
    """Artifacts below a URL of any file system that fsspec knows, such as `s3://bucket/store`."""

    def __init__(self, *, url: str, log: Log) -> None:
        """Read artifacts below `url`; what fails is logged, and counts as missing.

        Raises:
            ConfigError: fsspec does not know the protocol, or its package is not installed.
        """
        import fsspec

        self._url, self._log = url.rstrip("/"), log
        try:
            self._files, self._root = fsspec.core.url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{VARIABLE}={url} cannot be opened: {error} (s3:// needs `pip install s3fs`,"
                " gs:// gcsfs, az:// adlfs)"
            ) from error

    def find(self, id: str, store: Store) -> Path | None:
        """Copy an artifact into the store; None where it is missing, damaged or out of reach."""
        remote = f"{self._root}/objects/{id[:2]}/{id}"

        def copy(folder: Path) -> None:
            self._files.get_file(f"{remote}/{RECORD}", str(folder / RECORD))
            for name in read_record(folder)["files"]:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{remote}/{name}", str(folder / name))

        try:
            return store.adopt(id, copy) if self._files.exists(f"{remote}/{RECORD}") else None
        except Exception as error:  # every file system has errors of its own
            self._log(f"second tier: artifact {id[:12]} of {self._url} is not used: {error}")
            return None


def open_store(root: Path, log: Log) -> Store:
    """Return the store in `root`, with the second tier that the environment names, if any.

    Raises:
        ConfigError: the second tier is no folder and no URL that can be opened.
    """
    location = os.environ.get(VARIABLE)
    if not location:
        return Store(root=root, log=log)
    if "://" in location:
        return Store(root=root, log=log, second=UrlTier(url=location, log=log))
    folder = Path(location).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{VARIABLE}={location} is no folder and no URL (such as s3://bucket/x)")
    return Store(root=root, log=log, second=FolderTier(root=folder, log=log))
