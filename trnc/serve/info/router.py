"""The routes that say how the server is and what it serves. They change nothing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trnc.serve.http import json_response, while_connected
from trnc.serve.info.about import AboutServing
from trnc.serve.info.load import LoadServing, loads_query, prometheus
from trnc.serve.info.serving import Health, InfoServing, Version
from trnc.serve.metrics import CONTENT_TYPE
from trnc.serve.openapi import DescribedRoute, Operation

_HEALTH = Operation(summary="Whether requests can be answered", answer=Health)
_VERSION = Operation(summary="The version of trnc", answer=Version)
_METRICS = Operation(summary="Prometheus metrics")


def info_routes(*, info: InfoServing, about: AboutServing, load: LoadServing) -> list[Route]:
    """Return the routes of health, metrics, descriptions and load."""
    return [*_info_routes(info), *_about_routes(about), *_load_routes(load)]


def _info_routes(info: InfoServing) -> list[Route]:
    async def health(_request: Request) -> Response:
        return json_response(info.health())

    async def health_generate(request: Request) -> Response:
        await while_connected(request, info.health_generate())
        return Response()

    async def ping(_request: Request) -> Response:
        info.health()
        return Response()

    async def version(_request: Request) -> Response:
        return json_response(info.version())

    async def metrics(request: Request) -> Response:
        page = await while_connected(request, info.metrics())
        return Response(page, headers={"content-type": CONTENT_TYPE})

    return [
        DescribedRoute("/health", health, methods=["GET"], operation=_HEALTH),
        DescribedRoute("/ready", health, methods=["GET"], operation=_HEALTH),
        Route("/health_generate", health_generate, methods=["GET"]),
        Route("/ping", ping, methods=["GET", "POST"]),
        DescribedRoute("/version", version, methods=["GET"], operation=_VERSION),
        DescribedRoute("/metrics", metrics, methods=["GET"], operation=_METRICS),
    ]


def _about_routes(about: AboutServing) -> list[Route]:
    async def model_info(_request: Request) -> Response:
        return json_response(await about.model_info())

    async def server_info(request: Request) -> Response:
        return json_response(await while_connected(request, about.server_info()))

    async def tokenizer_info(_request: Request) -> Response:
        return json_response(about.tokenizer_info())

    return [
        Route("/model_info", model_info, methods=["GET"]),
        Route("/get_model_info", model_info, methods=["GET"]),
        Route("/server_info", server_info, methods=["GET"]),
        Route("/get_server_info", server_info, methods=["GET"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    ]


def _load_routes(load: LoadServing) -> list[Route]:
    async def get_load(request: Request) -> Response:
        return json_response(await while_connected(request, load.get_load()))

    async def loads(request: Request) -> Response:
        sections, as_page = loads_query(request.query_params)
        answer = await while_connected(request, load.loads(sections))
        if as_page:
            return Response(prometheus(answer), headers={"content-type": CONTENT_TYPE})
        return json_response(answer)

    async def server_load(_request: Request) -> Response:
        return json_response(load.server_load())

    return [
        Route("/get_load", get_load, methods=["GET"]),
        Route("/v1/loads", loads, methods=["GET"]),
        Route("/load", server_load, methods=["GET"]),
    ]
