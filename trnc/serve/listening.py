"""The address of `trnc serve`: bound before anything slow is imported, loaded or started."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trnc.errors import ConfigError

MAX_BODY_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how to listen, and how long to wait at the end.

    Open requests get `grace_seconds` to finish, then the engine `engine_stop_seconds` for its last
    step.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = MAX_BODY_BYTES
    grace_seconds: int = 30
    engine_stop_seconds: float = 10.0


@contextmanager
def listen(options: ServeOptions) -> Iterator[socket.socket]:
    """Bind the address now; raises ConfigError saying what to do about it.

    Connections inherit TCP_NODELAY. Event loops set it only on sockets that they make themselves,
    and without it an answer's body waits 40 ms for the acknowledgement of its headers.
    """
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
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise ConfigError(_bind_error(options, error)) from None
        yield listener


def _bind_error(options: ServeOptions, error: OSError) -> str:
    where = f"--port {options.port}: cannot listen on {options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where}, the port is in use. Stop what uses it, or give another --port."
    if error.errno == errno.EACCES:
        return f"{where}, permission denied. Ports below 1024 need rights; give another --port."
    return f"{where}: {error.strerror}."


def url_of(listener: socket.socket) -> str:
    """Return what a client would open."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
