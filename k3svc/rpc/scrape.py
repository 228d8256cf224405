"""The Prometheus endpoint of a role: GET /metrics over HTTP, in threads of its own, so that a loop that hangs is seen.

It keeps the rules of the gRPC server: with tls.certificate it speaks TLS, with tls.client_ca it wants a certificate of
the scraper, with auth.keys a bearer token (`authorization` in a scrape configuration).
"""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from k3svc.config import Config
from k3svc.errors import ConfigError, Unauthenticated
from k3svc.rpc.access import Access
from k3svc.rpc.credentials import AUTHORIZATION, server_context
from k3svc.rpc.files import WatchedFiles

PATH = "/metrics"
MAX_CONNECTIONS = 16
"""Scrapes at once; more are closed."""
TIMEOUT_S = 10.0
"""Longest silence of a scraper."""

App = Callable[..., Iterable[bytes]]

log = logging.getLogger(__name__)


class Endpoint:
    """Serves one registry from `start` to `close`."""

    def __init__(self, registry: CollectorRegistry, config: Config) -> None:
        """Raises ConfigError when the address is taken or a file cannot be used."""
        # A gauge beside every counter that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        section, keys = config.metrics, config.auth.keys
        access = Access(config.server, Path(keys)) if keys else None
        tls = server_context(config.tls) if config.tls.certificate else None
        server_class = type("Server", (_Server,), {"tls": tls, "address_family": _family(section.host)})
        try:
            self._server: WSGIServer = make_server(
                section.host, section.port, _app(registry, access), server_class, handler_class=_Handler
            )
        except OSError as error:
            raise ConfigError(
                f"metrics.port: cannot bind {section.host}:{section.port}: {error.strerror}", key="metrics.port"
            ) from error
        host = f"[{section.host}]" if ":" in section.host else section.host
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="k3svc-metrics", daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        log.info("metrics at %s%s", self.address, PATH)

    def close(self) -> None:
        """Stops listening; a scrape that runs may be cut off."""
        self._server.shutdown()
        self._server.server_close()


def _app(registry: CollectorRegistry, access: Access | None) -> App:
    serve: App = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            return _plain(start_response, "404 Not Found", f"metrics are at {PATH}")
        if access is not None:
            try:
                access.caller_of(PATH, [(AUTHORIZATION, environ.get("HTTP_AUTHORIZATION", ""))])
            except Unauthenticated as error:
                return _plain(start_response, "401 Unauthorized", error.message, ("WWW-Authenticate", "Bearer"))
        return serve(environ, start_response)

    return app


def _plain(start_response: Callable[..., Any], status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
    return [f"{text}\n".encode()]


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  named so by the library
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    tls: WatchedFiles[ssl.SSLContext] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*args, **options)

    def verify_request(self, _request: Any, _client_address: Any) -> bool:
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the thread of the connection, which may wait for a handshake."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(TIMEOUT_S)
        with self.tls.get().wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, _request: Any, client_address: Any) -> None:
        log.info("a scrape from %s broke off: %s", client_address, sys.exc_info()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
