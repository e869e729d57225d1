"""The launcher in a process of its own: starts, announces, stops, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from trnc.errors import ConfigError
from trnc.serve.listening import ServeOptions, listen


class Launched:
    """A server process; `output` is what it has printed so far."""

    def __init__(self, mode: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.toy_server", "0", mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"{pattern!r} was not printed:\n{self.output}")

    def finish(self) -> int:
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait()


@contextmanager
def launched(mode: str = "ok") -> Iterator[Launched]:
    server = Launched(mode)
    try:
        yield server
    finally:
        server.process.kill()
        server.finish()


def wait_until_gone(pid: int) -> None:
    while os.path.exists(f"/proc/{pid}"):
        pass


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_announces_and_stops_with_its_engine(signum):
    with launched() as server:
        pid = int(server.read_until(r"engine pid (\d+)")[1])
        url = server.read_until(r"Serving toy on (http://127\.0\.0\.1:\d+)")[1]
        assert os.getsid(pid) == pid, "a signal to the server's group must not reach the engine"
        assert re.search(r"load the weights +1\.25 s", server.output)
        assert httpx.get(f"{url}/health").status_code == 200
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
        server.process.send_signal(signum)
        assert server.finish() == 0, server.output
        wait_until_gone(pid)
        assert "Traceback" not in server.output


def test_an_engine_that_cannot_start_ends_the_server():
    with launched("fail") as server:
        assert server.finish() == 1
        assert "failed: no weights" in server.output
        assert "error: The engine" in server.output


def test_it_stops_at_once_while_the_engine_starts():
    with launched("stuck") as server:
        pid = int(server.read_until(r"engine pid (\d+)")[1])
        server.process.send_signal(signal.SIGINT)
        assert server.finish() == 0, server.output
        wait_until_gone(pid)


def test_an_engine_that_is_killed_leaves_a_server_that_says_so():
    with launched() as server:
        pid = int(server.read_until(r"engine pid (\d+)")[1])
        url = server.read_until(r"Serving toy on (\S+)")[1]
        os.kill(pid, signal.SIGKILL)
        while (answer := httpx.get(f"{url}/health")).status_code == 200:
            pass
        assert answer.status_code == 503
        assert "The engine" in answer.json()["error"]["message"]
        server.process.terminate()
        assert server.finish() == 0, server.output


def test_a_request_and_an_engine_that_hang_do_not_keep_it_from_stopping():
    with launched("hang") as server:
        pid = int(server.read_until(r"engine pid (\d+)")[1])
        url = server.read_until(r"Serving toy on (\S+)")[1]
        host, port = url.removeprefix("http://").split(":")
        body = b'{"prompt": "x"}'
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            connection.sendall(f"content-length: {len(body)}\r\n\r\n".encode() + body)
            while httpx.get(f"{url}/health").status_code != 200:
                pass
            server.process.terminate()
            assert server.finish() == 0, server.output
            wait_until_gone(pid)


def test_a_stream_that_is_open_at_sigterm_is_finished():
    """Readiness goes first, nothing new is taken, and the stream is sent to its end."""
    with launched("held") as server:
        engine = int(server.read_until(r"engine pid (\d+)")[1])
        url = server.read_until(r"Serving toy on (\S+)")[1]
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True}
        answer: list[str] = []

        def ask() -> None:
            answer.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60).text)

        asking = threading.Thread(target=ask)
        asking.start()
        while "trnc_open_requests 1" not in httpx.get(f"{url}/metrics").text:
            pass
        server.process.terminate()
        server.read_until("Waiting for 1 open requests")
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "shutting_down"
        assert httpx.get(f"{url}/ready").status_code == 503
        os.kill(engine, signal.SIGUSR1)
        asking.join()
        assert server.finish() == 0, server.output
        assert '"finish_reason":"length"' in answer[0], "the stream was cut"
        assert answer[0].endswith("data: [DONE]\n\n")
        wait_until_gone(engine)


def test_a_second_signal_waits_for_nothing():
    with launched("held") as server:
        url = server.read_until(r"Serving toy on (\S+)")[1]
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            connection.sendall(b'content-length: 15\r\n\r\n{"prompt": "x"}')
            while "trnc_open_requests 1" not in httpx.get(f"{url}/metrics").text:
                pass
            server.process.terminate()
            server.read_until("Waiting for 1 open requests")
            server.process.terminate()
            assert server.finish() == 0, server.output


def test_a_port_in_use_is_a_clear_error():
    with listen(ServeOptions(port=0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--port {port}: .* the port is in use"),
            listen(ServeOptions(port=port)),
        ):
            pass


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"host": "no.such.host.invalid"}, "--host"), ({"port": 70_000}, "--port")],
)
def test_an_address_that_is_none_is_a_clear_error(options, flag):
    with pytest.raises(ConfigError, match=flag), listen(ServeOptions(**options)):
        pass


def test_connections_do_not_wait_for_acknowledgements():
    with listen(ServeOptions(port=0)) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
