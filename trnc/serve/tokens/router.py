"""The routes of the tokenizer, with and without /v1."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.body import decode_body
from trnc.serve.http import read_body, respond
from trnc.serve.openapi import DescribedRoute, Operation
from trnc.serve.tokens.protocol import DETOKENIZE_RULES, TOKENIZE_RULES, DetokenizeAnswer
from trnc.serve.tokens.serving import TokenServing

_TOKENIZE = Operation(summary="The ids of a text or a conversation", body=TOKENIZE_RULES)
_DETOKENIZE = Operation(summary="The text of ids", body=DETOKENIZE_RULES, answer=DetokenizeAnswer)


def token_routes(*, tokens: TokenServing, max_body_bytes: int) -> list[Route]:
    """Return /tokenize and /detokenize."""

    async def tokenize(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), TOKENIZE_RULES)
        return await respond(request, tokens.tokenize(body))

    async def detokenize(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), DETOKENIZE_RULES)
        return await respond(request, tokens.detokenize(body))

    return [
        DescribedRoute(f"{prefix}/{name}", endpoint, methods=["POST"], operation=operation)
        for name, endpoint, operation in (
            ("tokenize", tokenize, _TOKENIZE),
            ("detokenize", detokenize, _DETOKENIZE),
        )
        for prefix in ("", "/v1")
    ]
