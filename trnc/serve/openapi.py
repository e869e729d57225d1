"""The server's own description, in OpenAPI 3.1: made of the routes and of their bodies' rules.

A field that is accepted only at its neutral value is described by that value, so that what the
description allows is what the server takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import trnc
from trnc.serve.body import BodyRules
from trnc.serve.errors import AnthropicErrorBody, ErrorBody, is_anthropic

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
# OpenAPI 3.1 has no word for a stream's events; tools take the schema for that of each.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a route does. `body` is None for one without, `answer` for one that gives no JSON."""

    summary: str
    body: BodyRules[Any] | None = None
    answer: Any = None
    streams: bool = False


class DescribedRoute(Route):
    """A route that says what it does."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: list[str],
        operation: Operation,
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.operation = operation


class OpenApiServing:
    """GET /openapi.json. `routes` may still grow when this is made."""

    def __init__(self, *, routes: Sequence[Route], protected: bool) -> None:
        self._routes = routes
        self._protected = protected

    def describe(self) -> bytes:
        """Return the description of every route."""
        return msgspec.json.encode(describe(self._routes, protected=self._protected))


def openapi_routes(*, openapi: OpenApiServing) -> list[Route]:
    """Return /openapi.json."""

    async def get_description(_request: Request) -> Response:
        return Response(openapi.describe(), media_type=_JSON)

    operation = Operation(summary="This description")
    return [DescribedRoute("/openapi.json", get_description, methods=["GET"], operation=operation)]


def describe(routes: Sequence[Route], *, protected: bool) -> Json:
    """Return the OpenAPI document of some routes; `protected` says that they need a key."""
    operations = [(route, _operation(route)) for route in routes]
    schemas, components = _schemas([operation for _, operation in operations])
    paths: Json = {}
    for route, operation in operations:
        item = paths.setdefault(_path(route), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            item[method.lower()] = _described(route, method, operation, schemas)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trnc", "version": trnc.__version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
        "security": [{"key": []}] if protected else [],
    }


def _operation(route: Route) -> Operation:
    if isinstance(route, DescribedRoute):
        return route.operation
    return Operation(summary=route.name.replace("_", " ").capitalize())


def _path(route: Route) -> str:
    return re.sub(r"{(\w+):\w+}", r"{\1}", route.path)


def _schemas(operations: Sequence[Operation]) -> tuple[Mapping[Any, Json], Json]:
    """Return the schema of every type that is needed, and the named ones they refer to."""
    types: list[Any] = [ErrorBody, AnthropicErrorBody]
    for operation in operations:
        if operation.answer is not None:
            types.append(operation.answer)
        if operation.body is not None:
            types.append(operation.body.struct)
            types += [inert.type | None for inert in operation.body.inert.values()]
    found, components = msgspec.json.schema_components(types, ref_template=_REF)
    return {str(kind): schema for kind, schema in zip(types, found, strict=True)}, components


def _described(
    route: Route, method: str, operation: Operation, schemas: Mapping[Any, Json]
) -> Json:
    described: Json = {
        "operationId": f"{method.lower()} {_path(route)}",
        "summary": operation.summary,
        "responses": _responses(route, operation, schemas),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.param_convertors
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        content = {_JSON: {"schema": _body_schema(operation.body, schemas)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _responses(route: Route, operation: Operation, schemas: Mapping[Any, Json]) -> Json:
    content: Json = {}
    if operation.answer is not None:
        content[_JSON] = {"schema": schemas[str(operation.answer)]}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    error = AnthropicErrorBody if is_anthropic(route.path) else ErrorBody
    failed = {"description": "What is wrong", "content": {_JSON: {"schema": schemas[str(error)]}}}
    answered = {"description": operation.summary, **({"content": content} if content else {})}
    return {"200": answered, "default": failed}


def _body_schema(rules: BodyRules[Any], schemas: Mapping[Any, Json]) -> Json:
    """Return the schema of a body: of its struct, and of the fields that are no struct fields."""
    [_], components = msgspec.json.schema_components([rules.struct], ref_template=_REF)
    struct = components[rules.struct.__name__]
    inert = {name: schemas[str(rule.type | None)] for name, rule in rules.inert.items()}
    refused = {name: {"enum": list(rule.neutral)} for name, rule in rules.refused.items()}
    properties = {**inert, **refused, **struct["properties"]}
    return {**struct, "properties": properties, "additionalProperties": False}
