"""/flush_cache and /abort_request; what an abort delivers is in test_generate.py."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.serve.harness import Server, Setup, running
from tests.serve.test_engine import raw_request
from tests.serve.test_requests import completion, error_of

LONG = "a prompt that fills more than one page of the cache " * 3
FLUSHED = "Cache flushed.\nPlease check backend logs for more details. "


def cached_tokens(server: Server) -> int:
    answer = completion(server, prompt=LONG)
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_forgets_cached_prefixes(method):
    with running() as server, server.http() as http:
        assert (cached_tokens(server) == 0) < cached_tokens(server)
        answer = http.request(method, "/flush_cache")
        assert (answer.status_code, answer.text.startswith(FLUSHED)) == (200, True)
        assert answer.headers["content-type"].startswith("text/plain")
        assert cached_tokens(server) == 0
        assert cached_tokens(server) > 0


def test_a_flush_is_refused_while_there_are_requests():
    setup = Setup(max_rows=1, max_context=20_000, num_pages=2_000)
    with running(setup) as server, server.http() as http:
        endless = [raw_request(server, stream=True) for _ in range(2)]  # one runs, one waits
        endless[0].recv(100)
        for query in ("", "?timeout=0.01"):
            answer = http.get(f"/flush_cache{query}")
            assert answer.status_code == 400
            error = error_of(answer)
            assert (error["code"], "?timeout" in error["message"]) == ("not_idle", True)
        for connection in endless:
            connection.close()
        assert http.post("/flush_cache?timeout=60").status_code == 200


def test_a_flush_waits_for_the_requests_if_told_so():
    gate = threading.Semaphore(0)
    with running(Setup(gate=gate)) as server:
        answers: list[Any] = []
        url = f"{server.url}/flush_cache?timeout=60"
        asking = threading.Thread(target=completion, args=(server,), kwargs={"prompt": LONG})
        flushing = threading.Thread(target=lambda: answers.append(httpx.post(url, timeout=60)))
        asking.start()
        while not server.engine.in_flight:
            pass
        flushing.start()
        while not server.engine._flush_waiters:
            pass
        gate.release(10_000)
        asking.join()
        flushing.join()
        assert answers[0].status_code == 200
        assert cached_tokens(server) == 0


@pytest.mark.parametrize(
    "query", ["timeout=x", "timeout=-1", "timeout=nan", "timeout=inf", "time=1"]
)
def test_bad_queries(server, query):
    with server.http() as http:
        answer = http.get(f"/flush_cache?{query}")
    assert answer.status_code == 400
    assert "timeout" in error_of(answer)["message"]


def test_an_abort_of_nobody_is_nothing(server):
    with server.http() as http:
        for body in ({"rid": "unknown"}, {"rid": ""}, {}, {"abort_all": True}):
            assert http.post("/abort_request", json=body).status_code == 200
        assert error_of(http.post("/abort_request", json={"id": "x"}))["param"] == "id"
        assert http.get("/abort_request").status_code == 405
