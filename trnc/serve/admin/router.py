"""The routes for operators."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.admin.serving import AdminServing
from trnc.serve.http import json_response, while_connected
from trnc.serve.metrics import CONTENT_TYPE


def admin_routes(*, admin: AdminServing) -> list[Route]:
    """Return /health, /version and /metrics."""

    async def health(_request: Request) -> Response:
        return json_response(admin.health())

    async def version(_request: Request) -> Response:
        return json_response(admin.version())

    async def metrics(request: Request) -> Response:
        page = await while_connected(request, admin.metrics())
        return Response(page, headers={"content-type": CONTENT_TYPE})

    return [
        Route("/health", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
