"""The routes of OpenAI's API: HTTP on one side, the serving classes on the other."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.body import decode_body
from trnc.serve.http import json_response, read_body, respond
from trnc.serve.openai.chat import ChatServing
from trnc.serve.openai.completions import CompletionServing
from trnc.serve.openai.models import ModelServing
from trnc.serve.openai.protocol import (
    CHAT_RULES,
    COMPLETION_RULES,
    ChatCompletion,
    Completion,
    Model,
    ModelList,
)
from trnc.serve.openapi import DescribedRoute, Operation

_CHAT = Operation(
    summary="Answer a conversation", body=CHAT_RULES, answer=ChatCompletion, streams=True
)
_COMPLETION = Operation(
    summary="Continue a text", body=COMPLETION_RULES, answer=Completion, streams=True
)
_MODELS = Operation(summary="The names of the model that is served", answer=ModelList)
_MODEL = Operation(summary="One of these names", answer=Model)


def openai_routes(
    *,
    chat: ChatServing,
    completions: CompletionServing,
    models: ModelServing,
    max_body_bytes: int,
) -> list[Route]:
    """Return the routes below /v1."""

    async def create_chat(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), CHAT_RULES)
        return await respond(request, chat.create(body))

    async def create_completion(request: Request) -> Response:
        body = decode_body(await read_body(request, max_body_bytes), COMPLETION_RULES)
        return await respond(request, completions.create(body))

    async def list_models(_request: Request) -> Response:
        return json_response(models.list())

    async def get_model(request: Request) -> Response:
        return json_response(models.get(request.path_params["name"]))

    return [
        DescribedRoute("/v1/chat/completions", create_chat, methods=["POST"], operation=_CHAT),
        DescribedRoute(
            "/v1/completions", create_completion, methods=["POST"], operation=_COMPLETION
        ),
        DescribedRoute("/v1/models", list_models, methods=["GET"], operation=_MODELS),
        DescribedRoute("/v1/models/{name:path}", get_model, methods=["GET"], operation=_MODEL),
    ]
