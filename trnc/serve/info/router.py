"""The routes that say how the server is. They change nothing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.http import json_response, while_connected
from trnc.serve.info.serving import InfoServing
from trnc.serve.metrics import CONTENT_TYPE


def info_routes(*, info: InfoServing) -> list[Route]:
    """Return /health (also as /ready), /version and /metrics."""

    async def health(_request: Request) -> Response:
        return json_response(info.health())

    async def version(_request: Request) -> Response:
        return json_response(info.version())

    async def metrics(request: Request) -> Response:
        page = await while_connected(request, info.metrics())
        return Response(page, headers={"content-type": CONTENT_TYPE})

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
