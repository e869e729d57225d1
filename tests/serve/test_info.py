"""/health, /version, /metrics and /v1/models."""

from __future__ import annotations

import re

import trnc
from tests.serve.harness import ALIAS, MODEL, Server, running
from tests.serve.test_requests import chat, error_of


def samples(server: Server) -> dict[str, float]:
    """Return the metrics page as a map from `name{labels}` to value."""
    with server.http() as http:
        page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    lines = [line for line in page.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_health_and_version(server):
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json() == {"version": trnc.__version__}


def test_models(server):
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == [MODEL, ALIAS]
        assert client.models.retrieve(MODEL).object == "model"  # its name has a slash
    with server.http() as http:
        assert http.get(f"/v1/models/{ALIAS}").json()["max_model_len"] == 512
        answer = http.get("/v1/models/other")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


def test_metrics_count_requests_tokens_and_latencies():
    with running() as server:
        chat(server, max_tokens=5, ignore_eos=True)
        chat(server, max_tokens=5, ignore_eos=True, stream=True)
        chat(server, temperature=9)
        with server.http() as http:
            http.get("/nowhere")
            http.get("/elsewhere")
            http.get("/v1/models/a")
        server.wait_for(lambda stats: stats.running == 0)
        page = samples(server)
    route = "/v1/chat/completions"
    assert page[f'trnc_requests_total{{route="{route}",status="200"}}'] == 2
    assert page[f'trnc_requests_total{{route="{route}",status="400"}}'] == 1
    assert page['trnc_requests_total{route="(unknown)",status="404"}'] == 2
    assert page['trnc_requests_total{route="/v1/models/{name:path}",status="404"}'] == 1
    assert page["trnc_generated_tokens_total"] == 10
    assert page["trnc_prompt_tokens_total"] > 0
    assert page["trnc_time_to_first_token_seconds_count"] == 2
    assert page["trnc_request_seconds_count"] == 2
    assert page["trnc_inter_token_latency_seconds_count"] == 8
    assert page["trnc_compiles_after_ready"] == 0
    assert page["trnc_requests_running"] == 0
    assert page["trnc_free_pages"] <= page["trnc_total_pages"]


def test_a_stop_string_ends_a_request_for_the_metrics():
    with running() as server:
        server.say([{"role": "user", "content": "hello"}], "one two three")
        chat(server, max_tokens=50, stop="two")
        assert samples(server)["trnc_request_seconds_count"] == 1


def test_two_servers_in_one_process_share_no_metrics():
    with running() as first, running() as second:
        chat(first)
        assert not [name for name in samples(second) if re.match("trnc_requests_total", name)]
