"""The routes that change a running server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from trnc.serve.admin.serving import ABORT_RULES, FLUSHED, AdminServing, flush_timeout
from trnc.serve.body import decode_body
from trnc.serve.http import read_body, while_connected


def admin_routes(*, admin: AdminServing, max_body_bytes: int) -> list[Route]:
    """Return /abort_request and /flush_cache."""

    async def abort_request(request: Request) -> Response:
        admin.abort(decode_body(await read_body(request, max_body_bytes), ABORT_RULES))
        return Response()

    async def flush_cache(request: Request) -> Response:
        await read_body(request, max_body_bytes)  # clients send an empty one, or none
        timeout = flush_timeout(dict(request.query_params))
        await while_connected(request, admin.flush_cache(timeout))
        return PlainTextResponse(FLUSHED)

    return [
        Route("/abort_request", abort_request, methods=["POST"]),
        Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
    ]
