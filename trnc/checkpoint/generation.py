"""What a checkpoint says about sampling: defaults for requests that do not set a field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trnc.checkpoint.gguf_file import GgufFile
from trnc.checkpoint.source import Source
from trnc.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Fields are None where the checkpoint says nothing.

    `temperature` 0 is greedy. It is set by an explicit `do_sample: false`, which also drops the
    filters (transformers ignores them then). Where `do_sample` is absent the numbers in the file
    are taken as the author's advice, although transformers itself would be greedy.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def generation_defaults(source: Source) -> GenerationDefaults:
    """Read `generation_config.json` of a folder, or the `general.sampling.*` keys of a GGUF file.

    Raises:
        CheckpointError: a value that is out of range or of the wrong type; it names the key.
    """
    if source.kind == "gguf":
        with GgufFile(source.path) as file:
            return from_gguf(file.metadata)
    return from_folder(read_json(source, "generation_config.json"))


def from_folder(table: Mapping[str, Any]) -> GenerationDefaults:
    """Return the defaults of a `generation_config.json`."""
    eos = table.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"generation_config.json: 'eos_token_id' must be ids, got {eos!r}")
    defaults = GenerationDefaults(
        temperature=_number(table, "temperature", most=None),
        top_k=_integer(table, "top_k", least=0),
        top_p=_number(table, "top_p", most=1.0),
        min_p=_number(table, "min_p", most=1.0),
        # This one works on the logits, so it also counts for a greedy choice.
        repetition_penalty=_number(table, "repetition_penalty", most=None),
        max_new_tokens=_integer(table, "max_new_tokens", least=1),
        eos_token_ids=tuple(ids),
    )
    if table.get("do_sample") is False:
        return replace(defaults, temperature=0.0, top_k=None, top_p=None, min_p=None)
    return defaults


def from_gguf(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Return the defaults of GGUF metadata; the eos ids of a GGUF file are the tokenizer's."""
    prefix = "general.sampling."
    table = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    return GenerationDefaults(
        temperature=_number(table, "temp", most=None),
        top_k=_integer(table, "top_k", least=0),
        top_p=_number(table, "top_p", most=1.0),
        min_p=_number(table, "min_p", most=1.0),
        repetition_penalty=_number(table, "penalty_repeat", most=None),
    )


def read_json(source: Source, name: str) -> dict[str, Any]:
    """Return a JSON object of a model's folder; empty where there is no such file."""
    path = source.path / name
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return table


def _number(table: Mapping[str, Any], key: str, *, most: float | None) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if not fits or (most is not None and value > most):
        limit = "0 or more" if most is None else f"0 to {most}"
        raise CheckpointError(f"generation defaults: '{key}' must be {limit}, got {value!r}")
    return float(value)


def _integer(table: Mapping[str, Any], key: str, *, least: int) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise CheckpointError(
            f"generation defaults: '{key}' must be {least} or more, got {value!r}"
        )
    return value
