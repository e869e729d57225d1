"""Health, metrics, load, and what is told of the model and the server."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import gguf
import httpx
import pytest

import trnc
from tests.serve.harness import ALIAS, MODEL, Server, Setup, running
from tests.serve.test_engine import raw_request
from tests.serve.test_requests import chat, error_of
from trnc.checkpoint.description import ModelDescription, describe
from trnc.checkpoint.source import Source
from trnc.serve.errors import EngineUnavailableError
from trnc.serve.info.serving import InfoServing
from trnc.serve.metrics import Metrics


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


def test_health_by_generating(server):
    before = server.stats().finished
    with server.http() as http:
        answer = http.get("/health_generate")
        assert (answer.status_code, answer.content) == (200, b"")
        assert server.stats().finished == before + 1
        for method in ("GET", "POST"):
            assert http.request(method, "/ping").content == b""


def test_a_silent_engine_is_not_well():
    gate = threading.Semaphore(0)
    with running(Setup(gate=gate)) as server:
        serving = InfoServing(
            engine=server.engine,
            metrics=Metrics(engine_stats=lambda: None, open_requests=lambda: 0),
            admission=server.admission,
        )

        def probe() -> None:
            probing = serving.health_generate(seconds=0.05)
            asyncio.run_coroutine_threadsafe(probing, server.loop).result(30)

        with pytest.raises(EngineUnavailableError, match="no sign of life"):
            probe()
        gate.release(10_000)
        probe()
        server.wait_for(lambda stats: stats.running + stats.waiting == 0)


def test_a_full_engine_is_well():
    gate = threading.Semaphore(0)
    with running(Setup(gate=gate, max_rows=1, max_waiting=0)) as server:
        asking = threading.Thread(target=chat, args=(server,))
        asking.start()
        while not server.executor.plans:
            pass
        answers = []
        url = f"{server.url}/health_generate"
        probing = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=60)))
        probing.start()
        while len(server.engine.in_flight) < 2:
            pass
        gate.release(10_000)
        asking.join()
        probing.join()
        assert answers[0].status_code == 200


def test_nothing_is_well_before_the_engine_is_ready():
    with running(Setup(start_engine=False)) as server, server.http() as http:
        for path in ("/health_generate", "/ping", "/server_info", "/get_load", "/v1/loads"):
            assert http.get(path).status_code == 503, path
        for path in ("/model_info", "/tokenizer_info", "/load"):
            assert http.get(path).status_code == 200, path


def test_what_is_told_of_the_model_and_the_server(server):
    with server.http() as http:
        for path in ("/model_info", "/get_model_info"):
            info = http.get(path).json()
            assert (info["served_model_name"], info["is_generation"]) == (MODEL, True)
        for path in ("/server_info", "/get_server_info"):
            info = http.get(path).json()
            assert (info["version"], info["context_length"]) == (trnc.__version__, 512)
            assert info["max_total_num_tokens"] == 399 * 16
            assert info["internal_states"][0]["total_pages"] == 399
        tokens = http.get("/tokenizer_info").json()
        assert tokens["vocab_size"] == server.tokenizer.vocab_size
        assert tokens["special_tokens"] == {"eos_token": "<|im_end|>"}
        assert tokens["chat_template"].startswith("{% for")


def test_the_description_of_a_folder_and_of_a_gguf_file(tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = Source(kind="folder", path=tmp_path, name="it")
    assert describe(source) == ModelDescription(
        str(tmp_path), "safetensors", "llama", ("LlamaForCausalLM",)
    )
    path = tmp_path / "it.gguf"
    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    source = Source(kind="gguf", path=path, name="it")
    assert describe(source) == ModelDescription(str(path), "gguf", "glm4moe", None)


def test_load_is_told_in_three_shapes():
    setup = Setup(max_rows=1, max_context=20_000, num_pages=2_000)
    with running(setup) as server, server.http() as http:
        endless = [raw_request(server, stream=True) for _ in range(2)]  # one runs, one waits
        server.wait_for(lambda stats: (stats.running, stats.waiting) == (1, 1))
        assert http.get("/load").json() == {"server_load": 2}
        [load] = http.get("/get_load").json()
        assert (load["num_reqs"], load["num_waiting_reqs"]) == (2, 1)
        assert load["num_tokens"] >= 16
        [entry] = http.get("/v1/loads", params={"include": "all"}).json()["loads"]
        assert entry["queues"] == {"running": 1, "waiting": 1, "open": 2}
        assert 0 < entry["token_usage"] == entry["num_used_tokens"] / (1_999 * 16)
        assert http.post("/abort_request", json={"abort_all": True}).status_code == 200
        server.check_idle()
        assert http.get("/load").json() == {"server_load": 0}
        [entry] = http.get("/v1/loads", params={"include": "all"}).json()["loads"]
        assert entry["memory"]["free_pages"] == entry["memory"]["total_pages"] == 1_999
        assert entry["gen_throughput"] > 0
        for connection in endless:
            connection.close()


def test_sections_and_formats_of_the_load(server):
    with server.http() as http:
        entry = http.get("/v1/loads").json()["loads"][0]
        assert not {"memory", "queues"} & set(entry)
        entry = http.get("/v1/loads?include=core,memory").json()["loads"][0]
        assert {"memory", "queues"} & set(entry) == {"memory"}
        page = http.get("/v1/loads?format=prometheus")
        assert "\ntrnc_load_num_running_reqs 0.0\n" in page.text
        assert page.headers["content-type"].startswith("text/plain")
        for query in ("include=spec", "format=xml", "incude=core"):
            assert http.get(f"/v1/loads?{query}").status_code == 400
