"""Keys, limits, CORS, TLS and draining."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
import threading
from pathlib import Path

import httpx
import pytest
import trustme
from starlette.datastructures import Headers

from tests.serve.harness import MODEL, Server, Setup, running
from tests.serve.test_requests import CHAT, HELLO, chat, error_of
from trnc.errors import ConfigError
from trnc.serve.access import Keys
from trnc.serve.errors import AuthenticationError, PermissionDeniedError
from trnc.serve.listening import ServeOptions, listen, tls_context

KEYS = ("first-secret-key", "second-secret-key")
ADMIN = "admin-secret-key"
CHAT_BODY = {"model": MODEL, "messages": HELLO, "max_tokens": 1}


def post(server: Server, **headers: str) -> httpx.Response:
    with server.http() as http:
        return http.post(CHAT, json=CHAT_BODY, headers=headers)


def wait_until_open(server: Server) -> None:
    while server.admission.open != 1:
        pass


def outcome(keys: Keys, given: str | None, access: str) -> str:
    headers = {} if given is None else {"authorization": f"Bearer {given}"}
    try:
        keys.check(Headers(headers), access)
    except AuthenticationError:
        return "401"
    except PermissionDeniedError:
        return "403"
    return "ok"


@pytest.mark.parametrize(
    ("api", "admin", "client_route", "admin_route"),
    [  # what no key, a wrong one, an API key and the admin key are told
        ((), None, "ok ok ok ok", "ok ok ok ok"),
        (KEYS, None, "401 401 ok 401", "401 401 ok 401"),
        ((), ADMIN, "ok ok ok ok", "401 401 401 ok"),
        (KEYS, ADMIN, "401 401 ok ok", "401 401 403 ok"),
    ],
)
def test_which_key_opens_what(api, admin, client_route, admin_route):
    keys = Keys(api_keys=api, admin_key=admin)
    given = [None, "wrong", KEYS[1], ADMIN]
    assert " ".join(outcome(keys, key, "client") for key in given) == client_route
    assert " ".join(outcome(keys, key, "admin") for key in given) == admin_route
    assert {outcome(keys, key, "open") for key in given} == {"ok"}


def test_a_key_is_compared_with_every_key_in_constant_time(monkeypatch):
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given in (*KEYS, "x", KEYS[0][:-1]):
        compared.clear()
        outcome(Keys(api_keys=KEYS, admin_key=ADMIN), given, "client")
        assert compared == [(32, 32)] * 3


def test_a_server_with_keys(caplog):
    caplog.set_level(logging.DEBUG)
    with running(Setup(options=ServeOptions(api_keys=KEYS))) as server, server.http() as http:
        refused = post(server)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert error_of(refused)["code"] == "invalid_api_key"
        assert post(server, authorization=f"Bearer {KEYS[0]}x").status_code == 401
        assert post(server, authorization=f"Basic {KEYS[0]}").status_code == 401
        assert post(server, authorization=f"Bearer {KEYS[0]}").status_code == 200
        assert post(server, authorization=f"bearer {KEYS[1]}").status_code == 200
        assert post(server, **{"x-api-key": KEYS[1]}).status_code == 200
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200
        for path in ("/metrics", "/v1/models", "/version"):
            assert http.get(path).status_code == 401
        assert http.get("/nowhere").status_code == 404
        assert "secret" not in http.get("/metrics", headers={"x-api-key": KEYS[0]}).text
    assert "secret" not in caplog.text


def test_the_body_of_a_stranger_is_not_read():
    with running(Setup(options=ServeOptions(api_keys=KEYS))) as server, server.http() as http:
        assert http.post(CHAT, content=b"x" * 2**20).status_code == 401


def test_keys_are_not_printed_and_not_empty():
    options = ServeOptions(api_keys=KEYS, admin_api_key=ADMIN)
    assert "secret" not in repr(options)
    for wrong in ({"api_keys": ("", "a")}, {"admin_api_key": " "}):
        with pytest.raises(ConfigError, match="must not be empty"):
            ServeOptions(**wrong)
    with pytest.raises(ConfigError, match="--admin-api-key is also an --api-key"):
        ServeOptions(api_keys=KEYS, admin_api_key=KEYS[0])


def test_pages_of_other_origins_are_not_let_in_unless_named():
    page = {"origin": "https://page.example"}
    asks = {**page, "access-control-request-method": "POST"}
    with running() as server, server.http() as http:
        for answer in (http.get("/health", headers=page), http.options(CHAT, headers=asks)):
            assert not [name for name in answer.headers if name.startswith("access-control")]
    options = ServeOptions(allowed_origins=("https://page.example",), api_keys=KEYS)
    with running(Setup(options=options)) as server, server.http() as http:
        assert http.options(CHAT, headers=asks).status_code == 200  # browsers ask without a key
        refused = post(server, **page)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        other = http.get("/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[trustme.CA, ServeOptions]:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(tmp_path / "cert.pem", append=True)
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    options = ServeOptions(ssl_certfile=tmp_path / "cert.pem", ssl_keyfile=tmp_path / "key.pem")
    return authority, options


def test_https(certificate):
    authority, options = certificate
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with running(Setup(options=options)) as server:
        url = f"https://127.0.0.1:{server.port}"
        answer = httpx.post(f"{url}{CHAT}", json={**CHAT_BODY, "stream": True}, verify=trusting)
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{url}/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")


def test_https_for_clients_with_a_certificate(certificate, tmp_path):
    authority, options = certificate
    options = ServeOptions(
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ca_certs=tmp_path / "ca.pem",
    )
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with running(Setup(options=options)) as server:
        url = f"https://127.0.0.1:{server.port}/health"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=trusting)
        authority.issue_cert("someone@example.org").configure_cert(trusting)
        assert httpx.get(url, verify=trusting).status_code == 200


def test_unusable_certificates_fail_at_start(certificate, tmp_path):
    _, options = certificate
    for wrong, flag in (
        ({"ssl_certfile": tmp_path / "none.pem"}, "--ssl-certfile .*none.pem"),
        ({"ssl_certfile": options.ssl_keyfile}, "--ssl-certfile"),
        ({"ssl_keyfile": options.ssl_keyfile}, "need --ssl-certfile"),
        (
            {
                "ssl_certfile": options.ssl_certfile,
                "ssl_keyfile": options.ssl_keyfile,
                "ssl_ca_certs": tmp_path / "none.pem",
            },
            "--ssl-ca-certs .*none.pem",
        ),
    ):
        with pytest.raises(ConfigError, match=flag), listen(ServeOptions(port=0, **wrong)):
            pass
    assert tls_context(ServeOptions()) is None


def test_no_more_requests_at_once_than_the_limit():
    gate = threading.Semaphore(0)
    setup = Setup(gate=gate, options=ServeOptions(max_concurrent_requests=1))
    with running(setup) as server, server.http() as http:
        first = threading.Thread(target=chat, args=(server,))
        first.start()
        wait_until_open(server)
        refused = httpx.post(f"{server.url}{CHAT}", json=CHAT_BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert error_of(refused)["code"] == "too_many_requests"
        assert "--max-concurrent-requests" in refused.text
        assert http.get("/health").status_code == 200
        gate.release(100)
        first.join()
        server.check_idle()  # an answer is with its client a moment before its place is free
        assert httpx.post(f"{server.url}{CHAT}", json=CHAT_BODY).status_code == 200
        server.check_idle()


def test_draining_announces_itself_then_refuses_then_waits():
    gate = threading.Semaphore(0)
    with running(Setup(gate=gate)) as server, server.http() as http:

        def drain(announce: float, grace: float) -> object:
            work = server.admission.drain(announce_seconds=announce, grace_seconds=grace)
            return asyncio.run_coroutine_threadsafe(work, server.loop)

        server.say(HELLO, "one two three four five six")
        body = {**CHAT_BODY, "max_tokens": 8, "stream": True}
        gate.release(2)
        with http.stream("POST", CHAT, json=body) as stream_:
            lines = stream_.iter_lines()
            next(lines)
            announcing = drain(600, 600)
            while (answer := httpx.get(f"{server.url}/ready")).status_code != 503:
                pass
            assert error_of(answer)["code"] == "shutting_down"
            assert httpx.get(f"{server.url}/health").status_code == 503
            refused = httpx.post(f"{server.url}{CHAT}", json={**CHAT_BODY, "seed": "x"})
            assert refused.status_code == 400, "requests are taken while it announces itself"
            announcing.cancel()
            draining = drain(0, 600)
            while (answer := httpx.post(f"{server.url}{CHAT}", json={})).status_code != 503:
                pass
            assert error_of(answer)["code"] == "shutting_down"
            assert not draining.done()
            gate.release(1000)
            rest = [line for line in lines if line]
        draining.result(30)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]


def test_draining_gives_up_on_a_request_that_does_not_end():
    gate = threading.Semaphore(0)
    with running(Setup(gate=gate)) as server:
        asking = threading.Thread(target=chat, args=(server,))
        asking.start()
        wait_until_open(server)
        work = server.admission.drain(announce_seconds=0, grace_seconds=0.01)
        asyncio.run_coroutine_threadsafe(work, server.loop).result(30)
        assert server.admission.open == 1
        gate.release(100)
        asking.join()
