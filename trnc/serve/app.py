"""The composition root: makes the shared parts and attaches the routers of the roles asked for.

Which role has which routes is in the table of `roles.py`.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

from trnc.serve.engine_client import EngineClient
from trnc.serve.errors import handle_error
from trnc.serve.generation import Generator
from trnc.serve.listening import MAX_BODY_BYTES
from trnc.serve.metrics import CountRequests, Metrics
from trnc.serve.model import ServedModel
from trnc.serve.planner import RequestPlanner
from trnc.serve.prompt import PromptBuilder
from trnc.serve.roles import ROUTERS, Parts, Role


def make_parts(
    *, engine: EngineClient, model: ServedModel, max_body_bytes: int = MAX_BODY_BYTES
) -> Parts:
    """Return what the serving classes of every role are built from."""
    metrics = Metrics(engine_stats=lambda: engine.last_stats)
    return Parts(
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


def create_app(
    *,
    engine: EngineClient,
    model: ServedModel,
    max_body_bytes: int = MAX_BODY_BYTES,
    roles: tuple[Role, ...] = tuple(ROUTERS),
) -> ASGIApp:
    """Return the ASGI application; `engine.run()` must be running beside it."""
    parts = make_parts(engine=engine, model=model, max_body_bytes=max_body_bytes)
    app = Starlette(
        routes=[route for role in roles for route in ROUTERS[role](parts)],
        exception_handlers={HTTPException: handle_error},
        # Not as an exception handler: Starlette raises those errors again after the answer, and
        # uvicorn then closes the connection.
        middleware=[Middleware(ExceptionMiddleware, handlers={Exception: handle_error})],
    )
    app.router.redirect_slashes = False  # an unknown route is a 404, not a hop
    return CountRequests(app, metrics=parts.metrics)
