"""What is served: the model, its tokenizer, and what the server was started with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

import trnc
from trnc.checkpoint.description import ModelDescription, describe
from trnc.serve.engine_client import EngineClient
from trnc.serve.model import ServedModel
from trnc.serve.planner import context_size


class ModelInfo(msgspec.Struct, frozen=True):
    """GET /model_info, in SGLang's shape. `model_type` is the family, null where none is told."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    preferred_sampling_params: dict[str, float]
    load_format: str
    model_type: str | None
    architectures: tuple[str, ...] | None
    is_generation: bool = True
    weight_version: Literal["default"] = "default"
    reasoning_parser: None = None
    tool_call_parser: None = None
    disaggregation_mode: Literal["null"] = "null"
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class TokenizerInfo(msgspec.Struct, frozen=True):
    """GET /tokenizer_info: special tokens by their names in chat templates, and the template."""

    vocab_size: int
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


class AboutServing:
    """Describes the model, the tokenizer and the server. None of it changes while it runs.

    `settings` are what the server was started with, without anything secret.
    """

    def __init__(
        self, *, engine: EngineClient, model: ServedModel, settings: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._model = model
        self._settings = settings
        self._started = time.time()
        self._about: ModelDescription | None = None

    async def model_info(self) -> ModelInfo:
        """Return what is known of the model."""
        about = await self._describe()
        return ModelInfo(
            model_path=about.path,
            served_model_name=self._model.names[0],
            tokenizer_path=about.path,
            preferred_sampling_params=self._preferred(),
            load_format=about.load_format,
            model_type=about.model_type,
            architectures=about.architectures,
        )

    async def server_info(self) -> dict[str, Any]:
        """Return the settings and limits of the server, flat, and the engine's counters of now.

        Raises EngineUnavailableError.
        """
        about, info, stats = await self._describe(), self._engine.info, await self._engine.stats()
        return {
            **self._settings,
            "model_path": about.path,
            "served_model_name": self._model.names[0],
            "context_length": context_size(info),
            "max_running_requests": info.max_rows,
            "max_total_num_tokens": stats.total_pages * info.page_size,
            "page_size": info.page_size,
            "vocab_size": info.vocab_size,
            "features": info.features,
            "startup_time": self._started,
            "startup_seconds": info.timings,
            "internal_states": [msgspec.structs.asdict(stats)],
            "version": trnc.__version__,
            "frontend": "python",
        }

    def tokenizer_info(self) -> TokenizerInfo:
        """Return what is known of the tokenizer."""
        tokenizer = self._model.tokenizer
        return TokenizerInfo(
            vocab_size=tokenizer.vocab_size,
            special_tokens=tokenizer.special_tokens,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_ids=tokenizer.eos_token_ids,
            chat_template=tokenizer.chat_template,
        )

    def _preferred(self) -> dict[str, float]:
        names = ("temperature", "top_k", "top_p", "min_p")
        values = {name: getattr(self._model.defaults, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    async def _describe(self) -> ModelDescription:
        """Read the model's own description once, beside the event loop."""
        source = self._model.source
        if self._about is None and source is not None:
            self._about = await asyncio.to_thread(describe, source)
        return self._about or ModelDescription(self._model.names[0], "memory", None, None)
