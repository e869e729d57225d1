"""The one place that turns an error into an answer, in OpenAI's shape or in Anthropic's.

Invariants: an answer never holds a stack trace or the text of an unexpected exception. Every error
answer is `{"error": {"message", "type", "param", "code"}}`, below `/v1/messages` it is
`{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
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


class AnthropicErrorInfo(msgspec.Struct, frozen=True):
    """Anthropic's error object."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """Anthropic's error envelope."""

    error: AnthropicErrorInfo
    type: str = "error"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served: 404."""

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        names = ", ".join(f"'{name}'" for name in served)
        super().__init__(
            f"The model '{model}' does not exist. This server serves: {names}.",
            param="model",
            code="model_not_found",
        )


class NotFoundError(RequestError):
    """The request names something that is not here: 404."""


class BodyTooLargeError(RequestError):
    """The body is longer than the server reads: 413."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body is larger than {limit} bytes (--max-body-bytes).",
            code="request_too_large",
        )


class BodyTimeoutError(RequestError):
    """The body did not come in time: 408."""

    def __init__(self) -> None:
        super().__init__("The request body took too long to arrive.", code="request_timeout")


class AuthenticationError(RequestError):
    """The request has no key, or one that this server does not know: 401."""

    def __init__(self) -> None:
        super().__init__(
            "A valid API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            code="invalid_api_key",
        )


class PermissionDeniedError(RequestError):
    """The key opens other routes, not this one: 403."""

    def __init__(self) -> None:
        super().__init__("This route needs the admin key (--admin-api-key).", code="no_permission")


class EngineUnavailableError(EngineError):
    """The engine is not ready yet, or gone: 503, worth trying again."""

    code = "engine_unavailable"


class QueueFullError(EngineUnavailableError):
    """As many requests wait as may (`--max-waiting`)."""

    code = QUEUE_FULL


class OverloadedError(EngineUnavailableError):
    """As many requests are open as may (`--max-concurrent-requests`)."""

    code = "too_many_requests"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The server has {limit} requests open, as many as it may"
            " (--max-concurrent-requests). Try again later."
        )


class DrainingError(EngineUnavailableError):
    """The server is shutting down and takes no more requests."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


_REQUEST_STATUS = {
    AuthenticationError: 401,
    PermissionDeniedError: 403,
    ModelNotFoundError: 404,
    NotFoundError: 404,
    BodyTimeoutError: 408,
    BodyTooLargeError: 413,
}
# What a client's library acts on: when to try again, how to authenticate, what not to reuse.
_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    503: {"retry-after": "1"},
}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return the error with the client's name of its field, where `names` has one."""
    name = names.get(error.param or "")
    if name is None:
        return error
    text = str(error).replace(f"'{error.param}'", f"'{name}'")
    return RequestError(text, param=name, code=error.code)


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


def describe_to_anthropic(error: BaseException) -> tuple[int, AnthropicErrorBody]:
    """Return what `describe` does, in Anthropic's envelope."""
    status, body = describe(error)
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return status, AnthropicErrorBody(AnthropicErrorInfo(kind, body.error.message))


def is_anthropic(path: str) -> bool:
    """Return whether errors of this path have Anthropic's envelope."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer an error that a handler raised (a Starlette exception handler)."""
    headers: dict[str, str] = {}
    path = request.url.path
    if isinstance(error, HTTPException):
        error.detail = f"{request.method} {path}"
        headers |= error.headers or {}
    status, body = (describe_to_anthropic if is_anthropic(path) else describe)(error)
    headers |= _HEADERS.get(status, {})
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


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
