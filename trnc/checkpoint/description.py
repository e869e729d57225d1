"""What a checkpoint says of itself, for people and for clients that ask."""

from __future__ import annotations

from dataclasses import dataclass

from trnc.checkpoint.generation import read_json
from trnc.checkpoint.gguf_file import GgufFile
from trnc.checkpoint.source import Source


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """`model_type` is the family, such as `llama`; `architectures` are transformers' class names.

    A GGUF file has no class names.
    """

    path: str
    load_format: str
    model_type: str | None
    architectures: tuple[str, ...] | None


def describe(source: Source) -> ModelDescription:
    """Read the description of a model; takes a few tenths of a second for a GGUF file.

    Raises:
        CheckpointError: a file is damaged.
    """
    path = str(source.path)
    if source.kind == "gguf":
        with GgufFile(source.path) as file:
            return ModelDescription(path, "gguf", file.metadata.get("general.architecture"), None)
    config = read_json(source, "config.json")
    names = tuple(config.get("architectures") or ())
    return ModelDescription(path, "safetensors", config.get("model_type"), names or None)
