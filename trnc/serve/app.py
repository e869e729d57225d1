"""The composition root: makes the shared parts and attaches the routers of the roles asked for.

Which role has which routes is in the table of `roles.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

from trnc.serve.access import Admission, Keys, access_of, guarded
from trnc.serve.engine_client import EngineClient
from trnc.serve.errors import handle_error
from trnc.serve.generation import Generator
from trnc.serve.listening import ServeOptions
from trnc.serve.metrics import CountRequests, Metrics
from trnc.serve.model import ServedModel
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder
from trnc.serve.roles import ADMIN_ROLES, ROUTERS, Parts, Role


def make_parts(
    *,
    engine: EngineClient,
    model: ServedModel,
    options: ServeOptions | None = None,
    admission: Admission | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Parts:
    """Return what the serving classes of every role are built from."""
    options = options or ServeOptions()
    admission = admission or Admission(limit=options.max_concurrent_requests)
    metrics = Metrics(engine_stats=lambda: engine.last_stats, open_requests=lambda: admission.open)
    return Parts(
        engine=engine,
        model=model,
        metrics=metrics,
        generator=Generator(engine=engine, tokenizer=model.tokenizer, metrics=metrics),
        planner=RequestPlanner(
            engine=engine,
            tokenizer=model.tokenizer,
            defaults=model.defaults,
            reasoning=model.markup.reasoning,
            priorities=options.priority_scheduling,
        ),
        prompts=PromptBuilder(tokenizer=model.tokenizer, template=model.template),
        admission=admission,
        options=options,
        settings=settings or {},
    )


def create_app(
    *,
    engine: EngineClient,
    model: ServedModel,
    options: ServeOptions | None = None,
    admission: Admission | None = None,
    settings: Mapping[str, Any] | None = None,
    roles: tuple[Role, ...] = tuple(ROUTERS),
) -> ASGIApp:
    """Return the ASGI application; `engine.run()` must be running beside it.

    `admission` is how the caller drains it. `settings` are what `/server_info` tells of how the
    server was started: nothing secret.
    """
    parts = make_parts(
        engine=engine,
        model=model,
        options=options,
        admission=admission,
        settings=settings,
    )
    keys = Keys(api_keys=parts.options.api_keys, admin_key=parts.options.admin_api_key)
    for role in roles:
        for route in ROUTERS[role](parts):
            access = access_of(route, admin=role in ADMIN_ROLES)
            parts.routes.append(guarded(route, access, keys, parts.admission))
    app = Starlette(
        routes=parts.routes,
        exception_handlers={HTTPException: handle_error},
        # Not as an exception handler: Starlette raises those errors again after the answer, and
        # uvicorn then closes the connection.
        middleware=[
            *_cors(parts.options.allowed_origins),
            Middleware(ExceptionMiddleware, handlers={Exception: handle_error}),
        ],
    )
    app.router.redirect_slashes = False  # an unknown route is a 404, not a hop
    return CountRequests(app, metrics=parts.metrics)


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Return what lets pages of these origins read answers; by default there is none."""
    if not origins:
        return []
    return [
        Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    ]
