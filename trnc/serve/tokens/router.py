"""The routes of the tokenizer, with and without /v1."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.body import decode_body
from trnc.serve.http import read_body, respond
from trnc.serve.tokens.protocol import DETOKENIZE_RULES, TOKENIZE_RULES
from trnc.serve.tokens.serving import TokenServing


def token_routes(*, tokens: TokenServing, max_body_bytes: int) -> list[Route]:
    """Return /tokenize and /detokenize."""

    async def tokenize(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), TOKENIZE_RULES)
        return await respond(request, tokens.tokenize(body))

    async def detokenize(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), DETOKENIZE_RULES)
        return await respond(request, tokens.detokenize(body))

    return [
        Route(f"{prefix}/{name}", endpoint, methods=["POST"])
        for name, endpoint in (("tokenize", tokenize), ("detokenize", detokenize))
        for prefix in ("", "/v1")
    ]
