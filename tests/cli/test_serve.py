"""`trnc serve` end to end: the real command, the default model, the official client."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cli.command import TRNC, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("own_store"),
]

MODEL = "smollm2-135m"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    output: str

    @property
    def engine(self) -> int:
        """The process id of the only child."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)


def start(*arguments: str) -> Server:
    process = subprocess.Popen(
        [TRNC, "serve", "--port", "0", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if match := re.search(r"Serving \S+ on (http://127\.0\.0\.1:\d+)", line):
            return Server(process, match[1], output)
    raise AssertionError(f"the server did not start (status {process.wait()}):\n{output}")


def finish(server: Server) -> str:
    assert server.process.stdout is not None
    rest = server.process.stdout.read()
    server.process.wait()
    return rest


@pytest.fixture(scope="module")
def server(own_store: None) -> Iterator[Server]:
    server = start("--preset", "batch8")
    yield server
    server.process.kill()
    finish(server)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_it_says_what_it_loads_and_how_long_each_part_took(server):
    assert f"model {MODEL}, preset batch8, backend inductor" in server.output
    for part in ("imports", "model", "artifacts", "weights", "state", "link"):
        assert re.search(rf"^{part} +[\d.]+ s", server.output, re.MULTILINE)
    assert "8 sequences at once, 8192 tokens each" in server.output
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_api_process_has_not_loaded_torch_and_the_engine_has(server):
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.engine}/maps").read_text()


def test_the_official_client_gets_a_sane_answer_streamed_or_not(client):
    request: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0}
    answer = client.chat.completions.create(**request)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    stream = client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def a_request(number: int) -> dict[str, Any]:
    """One of many: greedy or sampled, short or long, with and without logprobs and biases."""
    request: dict[str, Any] = {
        "model": MODEL,
        "prompt": f"{number} things that everybody knows: " + "one, two, three, " * (number % 8),
        "max_tokens": 8 + number % 17,
        "temperature": (0.0, 0.8)[number % 2],
        "seed": number,
    }
    if number % 3 == 0:
        request["logprobs"] = 3
    if number % 5 == 0:
        request["logit_bias"] = {"28": -100}
    return request


def comparable(answer: Any) -> Any:
    """All of a choice; equal only if every token and every bit of every logprob is."""
    return answer.choices[0].model_dump()


def test_200_requests_at_once_get_the_answers_that_each_gets_alone(server, client):
    requests = [a_request(number) for number in range(40)]

    async def all_at_once() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600
        ) as many:
            return await asyncio.gather(*(many.completions.create(**r) for r in requests * 5))

    together = list(map(comparable, asyncio.run(all_at_once())))
    alone = [comparable(client.completions.create(**request)) for request in requests]
    assert together == alone * 5
    # Two requests with other prompts and seeds are not one answer that everybody gets.
    assert len({choice["text"] for choice in alone}) > 20


def test_nothing_was_compiled_while_serving(server):
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r"^trnc_compiles_after_ready 0\.0$", metrics, re.MULTILINE)
    finished = re.search(r'^trnc_requests_total\{.*status="200"\} (\S+)$', metrics, re.MULTILINE)
    assert finished is not None


def test_sigterm_stops_it_and_its_engine(server):
    engine = server.engine
    server.process.send_signal(signal.SIGTERM)
    rest = finish(server)
    assert server.process.returncode == 0, rest
    assert "Traceback" not in rest
    assert not Path(f"/proc/{engine}").exists()


def test_a_compiled_preset_starts_under_require_cache():
    server = start("--preset", "batch8", "--require-cache", "--max-body-bytes", "1000")
    try:
        body = {"prompt": "x" * 2000, "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 413
        server.process.send_signal(signal.SIGINT)
        rest = finish(server)
        assert server.process.returncode == 0, rest
    finally:
        server.process.kill()
        finish(server)
