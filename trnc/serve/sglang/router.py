"""The route of SGLang's native API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.body import decode_body
from trnc.serve.http import read_body, respond
from trnc.serve.openapi import DescribedRoute, Operation
from trnc.serve.sglang.protocol import GENERATE_RULES, GenerateAnswer
from trnc.serve.sglang.serving import GenerateServing

_GENERATE = Operation(
    summary="Continue texts (SGLang's native API)",
    body=GENERATE_RULES,
    answer=GenerateAnswer | list[GenerateAnswer],
    streams=True,
)


def sglang_routes(*, generate: GenerateServing, max_body_bytes: int) -> list[Route]:
    """Return /generate."""

    async def create(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), GENERATE_RULES)
        return await respond(request, generate.generate(body))

    return [DescribedRoute("/generate", create, methods=["POST", "PUT"], operation=_GENERATE)]
