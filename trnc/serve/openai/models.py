"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time

from trnc.errors import EngineError
from trnc.serve.engine_client import EngineClient
from trnc.serve.openai.common import served_model
from trnc.serve.openai.protocol import Model, ModelList
from trnc.serve.planner import context_size


class ModelServing:
    """Lists the names of the one model that is served."""

    def __init__(self, *, engine: EngineClient, model_names: tuple[str, ...]) -> None:
        self._engine = engine
        self._model_names = model_names
        self._created = int(time.time())

    def list(self) -> ModelList:
        """Return every served name."""
        return ModelList([self._model(name) for name in self._model_names])

    def get(self, name: str) -> Model:
        """Return one served name; raises ModelNotFoundError."""
        return self._model(served_model(name, self._model_names))

    def _model(self, name: str) -> Model:
        try:
            max_model_len = context_size(self._engine.info)
        except EngineError:
            max_model_len = None
        return Model(name, self._created, max_model_len)
