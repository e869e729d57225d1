"""The one table of routers by role, and what they are built from.

A role is a family of routes that can be attached alone. Its row in `ROUTERS` imports what only that
role needs, so a process that serves one role never loads the others. `tests/serve/routes.txt` has
every route of every role, with the class that answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.routing import Route

from trnc.serve.access import Admission
from trnc.serve.engine_client import EngineClient
from trnc.serve.generation import Generator
from trnc.serve.listening import ServeOptions
from trnc.serve.metrics import Metrics
from trnc.serve.model import ServedModel
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder
from trnc.serve.turn import TurnRunner

Role = Literal["openai", "responses", "messages", "sglang", "tokens", "info", "admin", "openapi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the serving classes are built from, made once.

    `settings` are what the server was started with and may tell, by name.
    """

    engine: EngineClient
    model: ServedModel
    metrics: Metrics
    generator: Generator
    planner: RequestPlanner
    prompts: PromptBuilder
    admission: Admission
    options: ServeOptions
    settings: Mapping[str, Any]
    routes: list[Route] = field(default_factory=list)  # of all roles; the composition root adds

    @property
    def turns(self) -> TurnRunner:
        """What the APIs of blocks and items run their turns with."""
        return TurnRunner(
            generator=self.generator,
            planner=self.planner,
            prompts=self.prompts,
            tokenizer=self.model.tokenizer,
            markup=self.model.markup,
        )

    @property
    def max_body_bytes(self) -> int:
        """The longest body that is read."""
        return self.options.max_body_bytes


def _openai(parts: Parts) -> list[Route]:
    from trnc.serve.openai.chat import ChatServing
    from trnc.serve.openai.completions import CompletionServing
    from trnc.serve.openai.models import ModelServing
    from trnc.serve.openai.router import openai_routes

    return openai_routes(
        chat=ChatServing(
            generator=parts.generator,
            planner=parts.planner,
            prompts=parts.prompts,
            tokenizer=parts.model.tokenizer,
            markup=parts.model.markup,
            model_names=parts.model.names,
        ),
        completions=CompletionServing(
            engine=parts.engine,
            generator=parts.generator,
            planner=parts.planner,
            prompts=parts.prompts,
            tokenizer=parts.model.tokenizer,
            model_names=parts.model.names,
        ),
        models=ModelServing(engine=parts.engine, model_names=parts.model.names),
        max_body_bytes=parts.max_body_bytes,
    )


def _responses(parts: Parts) -> list[Route]:
    from trnc.serve.responses.router import responses_routes
    from trnc.serve.responses.serving import ResponsesServing
    from trnc.serve.responses.store import ResponseStore

    return responses_routes(
        responses=ResponsesServing(
            turns=parts.turns,
            tokenizer=parts.model.tokenizer,
            model_names=parts.model.names,
            store=ResponseStore(
                capacity=parts.options.response_store,
                seconds=parts.options.response_store_seconds,
            ),
            admission=parts.admission,
        ),
        max_body_bytes=parts.max_body_bytes,
    )


def _messages(parts: Parts) -> list[Route]:
    from trnc.serve.messages.router import messages_routes
    from trnc.serve.messages.serving import MessagesServing

    return messages_routes(
        messages=MessagesServing(turns=parts.turns, model_names=parts.model.names),
        max_body_bytes=parts.max_body_bytes,
    )


def _sglang(parts: Parts) -> list[Route]:
    from trnc.serve.sglang.router import sglang_routes
    from trnc.serve.sglang.serving import GenerateServing

    return sglang_routes(
        generate=GenerateServing(
            engine=parts.engine,
            generator=parts.generator,
            planner=parts.planner,
            prompts=parts.prompts,
            tokenizer=parts.model.tokenizer,
        ),
        max_body_bytes=parts.max_body_bytes,
    )


def _tokens(parts: Parts) -> list[Route]:
    from trnc.serve.tokens.router import token_routes
    from trnc.serve.tokens.serving import TokenServing

    return token_routes(
        tokens=TokenServing(
            engine=parts.engine,
            prompts=parts.prompts,
            tokenizer=parts.model.tokenizer,
            model_names=parts.model.names,
        ),
        max_body_bytes=parts.max_body_bytes,
    )


def _info(parts: Parts) -> list[Route]:
    from trnc.serve.info.about import AboutServing
    from trnc.serve.info.load import LoadServing
    from trnc.serve.info.router import info_routes
    from trnc.serve.info.serving import InfoServing

    return info_routes(
        info=InfoServing(engine=parts.engine, metrics=parts.metrics, admission=parts.admission),
        about=AboutServing(engine=parts.engine, model=parts.model, settings=parts.settings),
        load=LoadServing(engine=parts.engine),
    )


def _admin(parts: Parts) -> list[Route]:
    from trnc.serve.admin.router import admin_routes
    from trnc.serve.admin.serving import AdminServing

    return admin_routes(
        admin=AdminServing(engine=parts.engine), max_body_bytes=parts.max_body_bytes
    )


def _openapi(parts: Parts) -> list[Route]:
    from trnc.serve.openapi import OpenApiServing, openapi_routes

    serving = OpenApiServing(routes=parts.routes, protected=bool(parts.options.api_keys))
    return openapi_routes(openapi=serving)


ROUTERS: Mapping[Role, Callable[[Parts], list[Route]]] = {
    "openai": _openai,
    "responses": _responses,
    "messages": _messages,
    "sglang": _sglang,
    "tokens": _tokens,
    "info": _info,
    "openapi": _openapi,
    "admin": _admin,
}
# Routes that change the server: behind the admin key, if there is one.
ADMIN_ROLES: frozenset[Role] = frozenset({"admin"})
