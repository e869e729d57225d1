"""The routes of Anthropic's API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.body import decode_body
from trnc.serve.http import ANTHROPIC_STREAM, read_body, respond
from trnc.serve.messages.protocol import (
    COUNT_RULES,
    MESSAGES_RULES,
    MessageAnswer,
    TokenCount,
)
from trnc.serve.messages.serving import MessagesServing
from trnc.serve.openapi import DescribedRoute, Operation

_MESSAGE = Operation(
    summary="Answer a conversation (Anthropic)",
    body=MESSAGES_RULES,
    answer=MessageAnswer,
    streams=True,
)
_COUNT = Operation(
    summary="How many tokens a conversation has", body=COUNT_RULES, answer=TokenCount
)


def messages_routes(*, messages: MessagesServing, max_body_bytes: int) -> list[Route]:
    """Return /v1/messages and /v1/messages/count_tokens."""

    async def create_message(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), MESSAGES_RULES)
        return await respond(request, messages.create(body), ANTHROPIC_STREAM)

    async def count_tokens(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), COUNT_RULES)
        return await respond(request, messages.count_tokens(body))

    return [
        DescribedRoute("/v1/messages", create_message, methods=["POST"], operation=_MESSAGE),
        DescribedRoute(
            "/v1/messages/count_tokens", count_tokens, methods=["POST"], operation=_COUNT
        ),
    ]
