"""The surface of the server: every route, its methods, its role and the class that answers it.

`routes.txt` is the reference. After a change on purpose, write it again and read the difference:

    python -m tests.serve.test_routes > tests/serve/routes.txt
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from tests.serve.toy_model import toy_tokenizer
from trnc.checkpoint.generation import GenerationDefaults
from trnc.serve.app import make_parts
from trnc.serve.engine_client import EngineClient
from trnc.serve.model import ServedModel
from trnc.serve.roles import ROUTERS, Parts, Role

REFERENCE = Path(__file__).with_name("routes.txt")


def surface() -> list[str]:
    """Return a line for each role, path and method: `role  METHOD  path  Class`."""

    async def lines() -> list[str]:
        with zmq.Context() as context:
            parts = _parts(EngineClient(socket=context.socket(zmq.PAIR)))
            return [line for role in ROUTERS for line in _lines(role, parts)]

    return asyncio.run(lines())


def _lines(role: Role, parts: Parts) -> list[str]:
    return [
        f"{role:10} {method:6} {route.path:28} {_answering_class(route.endpoint)}"
        for route in ROUTERS[role](parts)
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


def _answering_class(endpoint: Callable[..., Any]) -> str:
    """Return the serving class that an endpoint closes over: there must be exactly one."""
    held = inspect.getclosurevars(endpoint).nonlocals.values()
    [name] = {type(value).__name__ for value in held if type(value).__name__.endswith("Serving")}
    return name


def _parts(engine: EngineClient) -> Parts:
    tokenizer, template = toy_tokenizer()
    model = ServedModel(
        names=("toy",), tokenizer=tokenizer, template=template, defaults=GenerationDefaults()
    )
    return make_parts(engine=engine, model=model)


def test_the_surface_is_the_one_in_the_reference_file():
    assert surface() == REFERENCE.read_text().splitlines()


def test_no_route_is_attached_twice():
    routes = [tuple(line.split()[1:3]) for line in surface()]
    assert len(set(routes)) == len(routes)


if __name__ == "__main__":
    print(*surface(), sep="\n")
