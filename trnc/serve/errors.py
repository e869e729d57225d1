"""The one place that turns an error into an answer in OpenAI's shape.

Invariants: an answer never holds a stack trace or the text of an unexpected exception, and every
error answer is `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trnc.engine.messages import QUEUE_FULL
from trnc.errors import EngineError, RequestError

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # no one reads it; it is what the metrics count


class ErrorInfo(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error envelope."""

    error: ErrorInfo


class ModelNotFoundError(RequestError):
    """The request names a model that is not served: 404."""

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        names = ", ".join(f"'{name}'" for name in served)
        super().__init__(
            f"The model '{model}' does not exist. This server serves: {names}.",
            param="model",
            code="model_not_found",
        )


class BodyTooLargeError(RequestError):
    """The body is longer than the server reads: 413."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body is larger than {limit} bytes (--max-body-bytes).",
            code="request_too_large",
        )


class EngineUnavailableError(EngineError):
    """The engine is not ready yet, or gone: 503, worth trying again."""

    code = "engine_unavailable"


class QueueFullError(EngineUnavailableError):
    """As many requests wait as may (`--max-waiting`)."""

    code = QUEUE_FULL


_REQUEST_STATUS = {ModelNotFoundError: 404, BodyTooLargeError: 413}


def describe(error: BaseException) -> tuple[int, ErrorBody]:
    """Return the HTTP status and the body for any error; logs the ones that are bugs."""
    if isinstance(error, RequestError):
        info = ErrorInfo(str(error), "invalid_request_error", error.param, error.code)
        return _REQUEST_STATUS.get(type(error), 400), ErrorBody(info)
    if isinstance(error, EngineUnavailableError):
        return 503, _body(str(error), "service_unavailable_error", error.code)
    if isinstance(error, EngineError):
        return 500, _body(str(error), "server_error", "engine_error")
    if isinstance(error, HTTPException):
        return error.status_code, _http_error(error)
    if isinstance(error, ClientDisconnect):
        return CLIENT_CLOSED_REQUEST, _body("The client went away.", "client_error", None)
    log.error("unexpected error in a request", exc_info=error)
    return 500, _body("The server failed to answer; its log says why.", "server_error", None)


def error_response(error: BaseException, headers: dict[str, str] | None = None) -> Response:
    """Return the complete HTTP answer for any error."""
    status, body = describe(error)
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer an error that a handler raised (a Starlette exception handler)."""
    if isinstance(error, HTTPException):
        error.detail = f"{request.method} {request.url.path}"
        return error_response(error, dict(error.headers or {}))
    return error_response(error)


def _http_error(error: HTTPException) -> ErrorBody:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _body(f"Unknown route: {error.detail}.", "invalid_request_error", "unknown_url")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"Method not allowed: {error.detail}. Allowed: {allowed}."
        return _body(message, "invalid_request_error", "method_not_allowed")
    phrase = HTTPStatus(error.status_code).phrase
    return _body(f"{phrase}: {error.detail}.", "invalid_request_error", None)


def _body(message: str, kind: str, code: str | None) -> ErrorBody:
    return ErrorBody(ErrorInfo(message, kind, None, code))
