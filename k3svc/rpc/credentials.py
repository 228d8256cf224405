"""TLS of servers and of callers, and the token that a caller shows.

Certificates, keys and tokens are files that are read again when they change: a server takes up new ones with the next
handshake, a caller with its next channel or call.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc

from k3svc.config import AuthSection, TlsSection
from k3svc.errors import ConfigError
from k3svc.obs import trace
from k3svc.obs.log import current_request_id
from k3svc.rpc.files import WatchedFiles

AUTHORIZATION = "authorization"
REQUEST_ID = "x-request-id"
"""The request of a client that a call between services is made for."""
SCHEME = "Bearer "
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 512
HTTP2 = "h2"
"""Its name in a TLS handshake."""

Metadata = tuple[tuple[str, str], ...]


def server_credentials(tls: TlsSection) -> grpc.ServerCredentials:
    """Credentials of a server with `tls.certificate`. Raises ConfigError for files that cannot be used."""
    names = [tls.certificate, tls.key, *([tls.client_ca] if tls.client_ca else [])]
    files = WatchedFiles([Path(name) for name in names], lambda *pems: _server_configuration(tls, *pems))
    # gRPC asks before every handshake, in a thread of its own.
    return grpc.dynamic_ssl_server_credentials(
        files.get(), files.get, require_client_authentication=bool(tls.client_ca)
    )


@dataclass(frozen=True, kw_only=True)
class CallerCredentials:
    """Whom a caller trusts and how it shows who it is. Raises ConfigError for files that cannot be used."""

    ca: Path | None = None
    """Authorities of the services' certificates (PEM); None: no TLS."""
    certificate: Path | None = None
    """Certificate chain for services that ask for one (PEM), with `key`."""
    key: Path | None = None
    token_file: Path | None = None
    """File with the token that services ask for; None: no token."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None) or (self.certificate is not None and self.ca is None):
            raise ConfigError("a caller's certificate needs its key and the authorities of the services")
        if self.token_file is not None:
            self._token.get()
        if self.ca is not None:
            self._tls.get()

    def metadata(self) -> Metadata:
        """Metadata of a call: the token, and the request and the trace that it is made for."""
        token = () if self.token_file is None else ((AUTHORIZATION, SCHEME + self._token.get()),)
        return (*token, *request_metadata(), *trace.outgoing())

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a channel: the same object until their files change; None without TLS."""
        return None if self.ca is None else self._tls.get()

    def tls_context(self) -> ssl.SSLContext | None:
        """For connections that are no channels: the same object until its files change; None without TLS."""
        return None if self.ca is None else self._context.get()

    def open_channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel that checks that the service's certificate has the host of `target`."""
        credentials = self.channel_credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    @cached_property
    def _token(self) -> WatchedFiles[str]:
        assert self.token_file is not None
        path = self.token_file
        return WatchedFiles([path], lambda data: parse_token(str(path), data))

    @cached_property
    def _tls(self) -> WatchedFiles[grpc.ChannelCredentials]:
        paths = [path for path in (self.ca, self.certificate, self.key) if path is not None]
        return WatchedFiles(paths, self._channel_credentials)

    @cached_property
    def _context(self) -> WatchedFiles[ssl.SSLContext]:
        paths = [path for path in (self.ca, self.certificate, self.key) if path is not None]
        return WatchedFiles(paths, self._tls_context)

    def _tls_context(self, ca: bytes, _certificate: bytes = b"", _key: bytes = b"") -> ssl.SSLContext:
        _check_authorities(self.ca, ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=ca.decode("ascii", errors="replace"))
        if self.certificate is not None and self.key is not None:
            _check_chain(self.certificate, self.key)
            context.load_cert_chain(self.certificate, self.key)
        context.set_alpn_protocols([HTTP2])
        return context

    def _channel_credentials(self, ca: bytes, certificate: bytes | None = None, key: bytes | None = None) -> Any:
        _check_authorities(self.ca, ca)
        if self.certificate is not None and self.key is not None:
            _check_chain(self.certificate, self.key)
        return grpc.ssl_channel_credentials(ca, key, certificate)


def server_context(tls: TlsSection, *protocols: str) -> WatchedFiles[ssl.SSLContext]:
    """The same for a server that is not gRPC's and speaks `protocols`. Raises ConfigError for files that cannot be
    used.
    """

    def context(*_contents: bytes) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            made.load_cert_chain(tls.certificate, tls.key)
            made.set_alpn_protocols(protocols)
            if tls.client_ca:
                made.load_verify_locations(tls.client_ca)
                made.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            raise ConfigError(
                f"{tls.certificate}, {tls.key} or {tls.client_ca} cannot be used: {error.reason}"
            ) from error
        return made

    names = [tls.certificate, tls.key, *([tls.client_ca] if tls.client_ca else [])]
    return WatchedFiles([Path(name) for name in names], context)


def request_metadata() -> Metadata:
    """Names the request of the current task to the services that are called for it; empty where an id cannot be one."""
    request_id = current_request_id()
    return ((REQUEST_ID, request_id),) if request_id.isascii() and request_id.isprintable() and request_id else ()


def peer_credentials(tls: TlsSection, auth: AuthSection) -> CallerCredentials:
    """How a role calls other roles: its server certificate is its client certificate too. Raises ConfigError."""
    has_certificate = bool(tls.ca and tls.certificate)
    return CallerCredentials(
        ca=Path(tls.ca) if tls.ca else None,
        certificate=Path(tls.certificate) if has_certificate else None,
        key=Path(tls.key) if has_certificate else None,
        token_file=Path(auth.token) if auth.token else None,
    )


def parse_token(name: str, data: bytes) -> str:
    """The token in the contents of a file. Raises ConfigError, which does not quote it."""
    token = data.decode("ascii", errors="replace").strip()
    if (
        not (MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS and token.isascii() and token.isprintable())
        or " " in token
    ):
        raise ConfigError(
            f"{name}: expected one token of {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} printable ASCII characters without "
            "blanks; `openssl rand -hex 32` makes one"
        )
    return token


def _server_configuration(
    tls: TlsSection, certificate: bytes, key: bytes, client_ca: bytes | None = None
) -> grpc.ServerCertificateConfiguration:
    _check_chain(Path(tls.certificate), Path(tls.key))
    if client_ca is not None:
        _check_authorities(Path(tls.client_ca), client_ca)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)


def _check_chain(certificate: Path, key: Path) -> None:
    """gRPC would refuse such files with a line in its own log only. A password would be asked for at the terminal."""

    def refuse_password() -> str:
        raise ConfigError(f"{key} is encrypted; allowed: a private key without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{certificate} and {key} are no PEM certificate chain with its private key ({error.reason})"
        ) from error


def _check_authorities(path: Path | None, data: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{path} holds no PEM certificates") from error
