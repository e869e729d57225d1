"""The composition root: builds every serving class and attaches the routers of the roles asked for.

Each role has one line in `ROUTERS`. Its function imports what only that role needs, so a process
that serves one role never loads the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from trnc.serve.engine_client import EngineClient
from trnc.serve.errors import handle_error
from trnc.serve.generation import Generator
from trnc.serve.listening import MAX_BODY_BYTES
from trnc.serve.metrics import CountRequests, Metrics
from trnc.serve.model import ServedModel
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder

Role = Literal["openai", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the serving classes are built from, made once."""

    engine: EngineClient
    model: ServedModel
    metrics: Metrics
    generator: Generator
    planner: RequestPlanner
    prompts: PromptBuilder
    max_body_bytes: int


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


def _admin(parts: Parts) -> list[Route]:
    from trnc.serve.admin.router import admin_routes
    from trnc.serve.admin.serving import AdminServing

    return admin_routes(admin=AdminServing(engine=parts.engine, metrics=parts.metrics))


ROUTERS: Mapping[Role, Callable[[Parts], list[Route]]] = {"openai": _openai, "admin": _admin}


def create_app(
    *,
    engine: EngineClient,
    model: ServedModel,
    max_body_bytes: int = MAX_BODY_BYTES,
    roles: tuple[Role, ...] = ("openai", "admin"),
) -> ASGIApp:
    """Return the ASGI application; `engine.run()` must be running beside it."""
    metrics = Metrics(engine_stats=lambda: engine.last_stats)
    parts = Parts(
        engine=engine,
        model=model,
        metrics=metrics,
        generator=Generator(engine=engine, tokenizer=model.tokenizer, metrics=metrics),
        planner=RequestPlanner(
            engine=engine,
            eos_token_ids=model.tokenizer.eos_token_ids,
            defaults=model.defaults,
        ),
        prompts=PromptBuilder(tokenizer=model.tokenizer, template=model.template),
        max_body_bytes=max_body_bytes,
    )
    app = Starlette(
        routes=[route for role in roles for route in ROUTERS[role](parts)],
        exception_handlers={HTTPException: handle_error},
        # Not as an exception handler: Starlette raises those errors again after the answer, and
        # uvicorn then closes the connection.
        middleware=[Middleware(ExceptionMiddleware, handlers={Exception: handle_error})],
    )
    app.router.redirect_slashes = False  # an unknown route is a 404, not a hop
    return CountRequests(app, metrics=metrics)
