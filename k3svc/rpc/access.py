"""Who may call, and how much of it at once: keys that callers show as bearer tokens, and the bounds on streams.

Health is open to everybody, within its bound; every other method of every service needs a key where there are keys.
Keys come from a TOML file, one table a key:

    [alice]
    sha256 = "..."        # of the token, in hexadecimal; or token = "...", the token itself
    max_requests = 16     # streaming calls at once; absent: as many as the service takes
    max_tokens = 100000   # prompt and output tokens of those calls; absent: no limit
    admin = true          # may drain the service, flush and watch its prefix cache; absent: false
"""

import hashlib
import hmac
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from k3svc.config import Config, ServerSection
from k3svc.errors import ConfigError, InvalidRequest, PermissionDenied, ResourceExhausted, Unauthenticated
from k3svc.rpc.credentials import (
    AUTHORIZATION,
    MAX_TOKEN_CHARS,
    SCHEME,
    parse_token,
    peer_credentials,
    server_credentials,
)
from k3svc.rpc.files import WatchedFiles

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ("/k3svc.v1.", "/sglang.grpc.scheduler.")
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
ADMIN_METHODS = frozenset(
    {
        "/k3svc.v1.AdminService/Drain",
        # These see or drop the prompts of all keys.
        "/sglang.grpc.scheduler.SglangScheduler/FlushCache",
        "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
    }
)
RETRY_AFTER_S = 1.0
"""Hint of a refusal; how long a stream lasts is not known."""
_KEY_FIELDS = {"sha256": str, "token": str, "max_requests": int, "max_tokens": int, "admin": bool}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key and what it allows. Without authentication everybody has the nameless key, which allows all."""

    name: str = ""
    digest: bytes = b""
    """SHA-256 of the token."""
    max_requests: int | None = None
    max_tokens: int | None = None
    admin: bool = False


@dataclass(kw_only=True)
class Account:
    """What the calls of one key, or of all keys, hold now."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who makes a call."""

    key: Key
    account: Account


_NOBODY = Caller(key=Key(), account=Account())
_caller: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)


class Access:
    """The rules of one server. Belongs to its event loop."""

    def __init__(self, server: ServerSection, keys: Path | None) -> None:
        """Without `keys` there is no authentication. Raises ConfigError for a file that cannot be used."""
        self._server = server
        self._keys = None if keys is None else WatchedFiles([keys], lambda data: parse_keys(str(keys), data))
        self._accounts: dict[str, Account] = {}
        self._streams = Account()
        self._watches = Account()

    def caller_of(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """Raises Unauthenticated or PermissionDenied."""
        if self._keys is None or method.startswith(OPEN_SERVICES):
            return _NOBODY
        key = _find(self._keys.get(), [value for name, value in metadata if name == AUTHORIZATION])
        if method in ADMIN_METHODS and not key.admin:
            raise PermissionDenied(f"key {key.name} has no admin = true", key=key.name)
        return Caller(key=key, account=self._accounts.setdefault(key.name, Account()))

    @contextmanager
    def call(self, caller: Caller, method: str, *, is_stream: bool) -> Iterator[None]:
        """Surrounds the work of a call. Raises ResourceExhausted when a bound is reached."""
        _caller.set(caller)
        if not is_stream:
            yield
            return
        is_ours = method.startswith(PACKAGES)
        total, bound = (self._streams, "max_streams") if is_ours else (self._watches, "max_watches")
        limit = getattr(self._server, bound)
        if total.requests >= limit:
            raise ResourceExhausted(
                f"server.{bound}: {limit} streams are open", retry_after_s=RETRY_AFTER_S, reason="TOO_MANY_STREAMS"
            )
        key, account = caller.key, caller.account
        if is_ours and key.max_requests is not None and account.requests >= key.max_requests:
            raise ResourceExhausted(
                f"key {key.name} has {account.requests} of {key.max_requests} requests in flight",
                retry_after_s=RETRY_AFTER_S,
                reason="KEY_REQUESTS",
                key=key.name,
            )
        total.requests += 1
        account.requests += is_ours
        try:
            yield
        finally:
            total.requests -= 1
            account.requests -= is_ours


def check_files(config: Config) -> None:
    """Raises ConfigError when a file of certificates, keys or tokens cannot be used: before a model is loaded."""
    if config.tls.certificate:
        server_credentials(config.tls)
    peer_credentials(config.tls, config.auth)
    Access(config.server, Path(config.auth.keys) if config.auth.keys else None)


def caller_name() -> str:
    """Name of the key of the current call; empty without authentication."""
    return _caller.get().key.name


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Whose prompts those of the current call are: the caller's key, or else its certificate; empty without both."""
    name = caller_name()
    if name:
        return f"key {name}"
    identities = context.peer_identities() or ()
    return f"certificate {hashlib.sha256(repr(tuple(identities)).encode()).hexdigest()}" if identities else ""


@contextmanager
def tokens_in_flight(count: int) -> Iterator[None]:
    """Counts tokens for the key of the current call while the block runs.

    Raises ResourceExhausted when its other calls leave no room, InvalidRequest when the key never allows so many.
    """
    caller = _caller.get()
    limit, account = caller.key.max_tokens, caller.account
    if limit is not None and count > limit:
        raise InvalidRequest("stop.max_tokens", f"{count} tokens with the prompt", f"{limit} for key {caller.key.name}")
    if limit is not None and account.tokens + count > limit:
        raise ResourceExhausted(
            f"key {caller.key.name} has {account.tokens} of {limit} tokens in flight, {count} more do not fit",
            retry_after_s=RETRY_AFTER_S,
            reason="KEY_TOKENS",
            key=caller.key.name,
        )
    account.tokens += count
    try:
        yield
    finally:
        account.tokens -= count


def parse_keys(name: str, data: bytes) -> tuple[Key, ...]:
    """The keys in the contents of a keys file. Raises ConfigError naming key and field, quoting no secret."""
    try:
        tree = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        # The error may quote what it failed on, so it is neither shown nor chained.
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{name} is not valid TOML" + (f", line {line}" if line else "")) from None
    if not tree:
        raise ConfigError(f'{name} has no keys; expected one table a key, such as [alice] with token = "..."')
    keys = tuple(_parse_key(f"{name}: [{key}]", key, fields) for key, fields in tree.items())
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"{name}: two keys have the same token")
    return keys


def _parse_key(place: str, name: str, fields: object) -> Key:
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{place}: expected a table")
    for field, value in fields.items():
        kind = _KEY_FIELDS.get(field)
        if kind is None:
            raise ConfigError(f"{place}: unknown field; allowed: {', '.join(_KEY_FIELDS)}")
        if type(value) is not kind or (isinstance(value, int) and kind is int and value < 1):
            raise ConfigError(f"{place} {field}: expected {'an integer from 1' if kind is int else kind.__name__}")
    if ("token" in fields) == ("sha256" in fields):
        raise ConfigError(f"{place}: expected either token or sha256")
    return Key(
        name=name,
        digest=_digest(place, fields),
        max_requests=fields.get("max_requests"),
        max_tokens=fields.get("max_tokens"),
        admin=fields.get("admin", False),
    )


def _digest(place: str, fields: Mapping[str, Any]) -> bytes:
    if "token" in fields:
        return hashlib.sha256(parse_token(f"{place} token", fields["token"].encode()).encode()).digest()
    try:
        digest = bytes.fromhex(fields["sha256"])
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{place} sha256: expected 64 hexadecimal digits, as `sha256sum` prints them")
    return digest


def _find(keys: Sequence[Key], shown: Sequence[str | bytes]) -> Key:
    """The key of a token, found in a time that tells nothing about the keys."""
    if len(shown) != 1 or not isinstance(shown[0], str) or not shown[0].startswith(SCHEME):
        raise Unauthenticated("this service wants one header `authorization: Bearer TOKEN`", reason="NO_TOKEN")
    token = shown[0].removeprefix(SCHEME)
    digest = hashlib.sha256(token[: MAX_TOKEN_CHARS + 1].encode(errors="replace")).digest()
    found: Key | None = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    if found is None:
        raise Unauthenticated("the token is none of this service's keys")
    return found
