"""An MTP block in a file of its own, for a model whose checkpoint has none.

A safetensors file. Its tensors are named as a Hugging Face folder names those of an MTP layer:
`model.layers.N.enorm.weight`, `model.layers.N.self_attn.q_proj.weight` and so on, where N is the
number of the model's layers. A matrix [n, k] may be kept in int8: then `NAME_scale`, f16
[n, k / 32], is beside it, and w = scale * q in groups of 32 along k. Embedding and head are the
model's. `draft_ids`, int32 and ascending, if it is there, are the only tokens that are drafted: the
block's head has their rows alone. Imports no torch: the API process reads configs too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from trnc.errors import CheckpointError

DRAFT_IDS = "draft_ids"
SCALE = "_scale"
TARGET = "target_sha256"  # metadata: of the GGUF file that the block was trained for


@dataclass(frozen=True, slots=True)
class MtpFile:
    """What the header says. `tensors` maps a name to its dtype, as the file has it, and shape."""

    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]

    @property
    def draft_vocab(self) -> int:
        """How many tokens the block can draft; 0 for all."""
        _, shape = self.tensors.get(DRAFT_IDS, ("", (0,)))
        return shape[0]


def packaged_block(model: str) -> Path:
    """Return where the block that comes with trnc for one of its own models is."""
    return Path(str(resources.files("trnc") / "data" / f"{model}.mtp.safetensors"))


def read_mtp_file(path: Path) -> MtpFile:
    """Read the header. Raises CheckpointError if there is no such file, or it is not one.

    The format, a length and as many bytes of JSON: https://github.com/huggingface/safetensors.
    Its package would import numpy for this.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            table = json.loads(file.read(length))
        metadata = dict(table.pop("__metadata__", {}))
        tensors = {name: (str(t["dtype"]), tuple(t["shape"])) for name, t in table.items()}
    except FileNotFoundError:
        raise CheckpointError(f"--mtp {path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"--mtp {path}: not a safetensors file ({error})") from None
    return MtpFile(path=path, tensors=tensors, metadata=metadata)
