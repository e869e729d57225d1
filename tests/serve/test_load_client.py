"""The load generator's client against a real server: it reads what came, and counts it right."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.serve.harness import MODEL, Server

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def load_client() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("load_client", TOOLS / "load_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("chat", [False, True])
def test_every_answer_is_read_to_its_end(server: Server, load_client: ModuleType, chat: bool):
    target = load_client.Server("127.0.0.1", server.port, MODEL, chat=chat)
    shape = load_client.Shape(12, 9, lowest=3, vocab=300)
    requests = [load_client.request_bytes(target, shape, index) for index in range(5)]
    exchanges = asyncio.run(load_client.closed_loop(target, requests, 2))
    for reply in map(load_client.reply_of, exchanges):
        assert reply.error is None
        assert reply.output_tokens == 9
        assert 1 <= len(reply.times) <= 10
        assert list(reply.times) == sorted(reply.times)
        assert chat or reply.prompt_tokens == 12


def test_an_error_is_reported_and_the_connection_goes_on(server: Server, load_client: ModuleType):
    target = load_client.Server("127.0.0.1", server.port, "no such model")
    shape = load_client.Shape(3, 2)
    requests = [load_client.request_bytes(target, shape, index) for index in range(3)]
    exchanges = asyncio.run(load_client.poisson(target, requests, rate=1000, seed=0))
    replies = [load_client.reply_of(exchange) for exchange in exchanges]
    assert all("status 404" in reply.error for reply in replies)


def test_a_shared_prefix_is_the_same_in_every_prompt(load_client: ModuleType):
    first, second = (load_client.Shape(20, 1, shared_prefix=8).prompt(index) for index in (0, 1))
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
