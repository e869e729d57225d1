"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.errors import RequestError
from trnc.serve.body import decode_body
from trnc.serve.errors import describe
from trnc.serve.http import StreamStyle, json_response, named_event, read_body, respond
from trnc.serve.openapi import DescribedRoute, Operation
from trnc.serve.responses.protocol import RESPONSES_RULES, Deleted, ErrorEvent
from trnc.serve.responses.protocol import Response as Stored
from trnc.serve.responses.serving import ResponsesServing


def _describe(error: BaseException) -> tuple[int, ErrorEvent]:
    status, body = describe(error)
    return status, ErrorEvent(body.error.message, body.error.code, body.error.param)


RESPONSES_STREAM = StreamStyle(named_event, _describe, b"")
_CREATE = Operation(
    summary="Answer items (OpenAI's Responses)",
    body=RESPONSES_RULES,
    answer=Stored,
    streams=True,
)
_GET = Operation(summary="A stored response", answer=Stored)
_DELETE = Operation(summary="Forget a stored response", answer=Deleted)
_CANCEL = Operation(summary="End a response of the background", answer=Stored)


def responses_routes(*, responses: ResponsesServing, max_body_bytes: int) -> list[Route]:
    """Return the routes below /v1/responses."""

    async def create_response(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), RESPONSES_RULES)
        return await respond(request, responses.create(body), RESPONSES_STREAM)

    async def get_response(request: Request) -> Response:
        for name in request.query_params:
            raise RequestError(f"The query parameter '{name[:64]}' is not supported.", param=name)
        return json_response(responses.get(request.path_params["response_id"]))

    async def cancel_response(request: Request) -> Response:
        return json_response(await responses.cancel(request.path_params["response_id"]))

    async def delete_response(request: Request) -> Response:
        return json_response(await responses.delete(request.path_params["response_id"]))

    path = "/v1/responses/{response_id}"
    return [
        DescribedRoute("/v1/responses", create_response, methods=["POST"], operation=_CREATE),
        DescribedRoute(path, get_response, methods=["GET"], operation=_GET),
        DescribedRoute(path, delete_response, methods=["DELETE"], operation=_DELETE),
        DescribedRoute(f"{path}/cancel", cancel_response, methods=["POST"], operation=_CANCEL),
    ]
