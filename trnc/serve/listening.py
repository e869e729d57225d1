"""The address of `trnc serve`: bound before anything slow is imported, loaded or started."""

from __future__ import annotations

import errno
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trnc.errors import ConfigError

MAX_BODY_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how to listen, for whom, and how long to wait at the end.

    After SIGTERM the server is not ready, yet takes requests for `drain_seconds`; open ones get
    `grace_seconds` to finish, then the engine `engine_stop_seconds` for its last step. A peer that
    takes nothing of what it is sent for `write_seconds` is cut off.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = MAX_BODY_BYTES
    max_concurrent_requests: int | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    priority_scheduling: bool = False
    response_store: int = 0
    response_store_seconds: int = 3600
    drain_seconds: float = 0.0
    grace_seconds: int = 30
    write_seconds: float = 120.0
    engine_stop_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Refuse keys that would protect nothing."""
        if any(not key.strip() for key in (*self.api_keys, self.admin_api_key or "x")):
            raise ConfigError("--api-key and --admin-api-key must not be empty.")
        if self.admin_api_key in self.api_keys:
            raise ConfigError("--admin-api-key is also an --api-key: give it a value of its own.")


@contextmanager
def listen(options: ServeOptions) -> Iterator[socket.socket]:
    """Bind the address now; raises ConfigError saying what to do about it.

    Connections inherit TCP_NODELAY. Event loops set it only on sockets that they make themselves,
    and without it an answer's body waits 40 ms for the acknowledgement of its headers.
    """
    tls_context(options)  # so that an unusable certificate fails now
    if not 0 <= options.port < 2**16:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"--port must be between 0 and 65535, got {options.port}.")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {options.host}: {error}") from None
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _cut_off_dead_peers(listener, options.write_seconds)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise ConfigError(_bind_error(options, error)) from None
        yield listener


def _cut_off_dead_peers(listener: socket.socket, write_seconds: float) -> None:
    """Let the kernel end connections whose peer is gone, or takes nothing: inherited as well."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        milliseconds = round(write_seconds * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def tls_context(options: ServeOptions) -> ssl.SSLContext | None:
    """Return the TLS settings, or None for plain HTTP; raises ConfigError for unusable files.

    With `ssl_ca_certs`, clients must have a certificate that one of these authorities signed.
    """
    certfile, keyfile = options.ssl_certfile, options.ssl_keyfile
    if certfile is None:
        if keyfile or options.ssl_ca_certs:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile.")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    flag = "--ssl-certfile"
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
        if options.ssl_ca_certs is not None:
            flag = "--ssl-ca-certs"
            context.load_verify_locations(options.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # of which ssl.SSLError is one
        files = " ".join(str(file) for file in (certfile, keyfile) if file is not None)
        what = options.ssl_ca_certs if flag == "--ssl-ca-certs" else files
        raise ConfigError(f"{flag} {what}: {error.strerror or error}.") from None
    return context


def _no_password() -> str:
    """Refuse to ask for a passphrase: a server has no one to ask."""
    raise ConfigError("--ssl-keyfile: the key is encrypted; give one without a passphrase.")


def raise_file_limit() -> None:
    """Allow as many open files, of which each connection is one, as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bind_error(options: ServeOptions, error: OSError) -> str:
    where = f"--port {options.port}: cannot listen on {options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}, the port is in use. Stop what uses it, or give another --port."
    if error.errno == errno.EACCES:
        return f"{where}, permission denied. Ports below 1024 need rights; give another --port."
    return f"{where}: {error.strerror}."


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return what a client would open."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
