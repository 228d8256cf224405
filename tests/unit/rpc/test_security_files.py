"""Keys, tokens and the files they come from; which addresses a configuration may open."""

import hashlib
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from k3svc.config import AuthSection, Config, ServerSection, TlsSection, load_config, to_toml
from k3svc.errors import (
    ConfigError,
    InvalidRequest,
    K3svcError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from k3svc.rpc.access import Access, caller_name, parse_keys, tokens_in_flight
from k3svc.rpc.credentials import CallerCredentials, parse_token
from k3svc.rpc.files import MAX_FILE_BYTES, WatchedFiles

SECRET = "s3cr3t-of-alice-0123456789"
OTHER = "s3cr3t-of-bob-0123456789"
GENERATE = "/k3svc.v1.DecodeService/Generate"


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


@pytest.fixture
def access(tmp_path: Path) -> Access:
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    path.write_text(
        f'[alice]\ntoken = "{SECRET}"\nmax_requests = 2\nmax_tokens = 100\n[bob]\nsha256 = "{digest}"\nadmin = true\n'
    )
    return Access(ServerSection(max_streams=4, max_watches=1), path)


def test_a_key_is_found_by_its_token(access: Access):
    assert access.caller_of(GENERATE, bearer(SECRET)).key.name == "alice"
    assert access.caller_of(GENERATE, bearer(OTHER)).key.name == "bob"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        bearer(""),
        bearer(SECRET + "x"),
        bearer(SECRET[:-1]),
        bearer("x" * 100_000),
        bearer("\udcff" * 20),
        [("authorization", SECRET)],
        [("authorization", f"Basic {SECRET}")],
        [("authorization-bin", SECRET.encode())],
        [("authorization", f"Bearer {SECRET}".encode())],
        bearer(SECRET) * 2,
    ],
)
def test_everything_else_is_unauthenticated(access: Access, metadata: list[tuple[str, str | bytes]]):
    with pytest.raises(Unauthenticated) as caught:
        access.caller_of(GENERATE, metadata)
    assert SECRET[:10] not in str(caught.value)


def test_health_is_open_and_drain_is_for_admins(access: Access):
    access.caller_of("/grpc.health.v1.Health/Check", [])
    with pytest.raises(Unauthenticated):
        access.caller_of("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", [])
    with pytest.raises(PermissionDenied):
        access.caller_of("/k3svc.v1.AdminService/Drain", bearer(SECRET))
    access.caller_of("/k3svc.v1.AdminService/Drain", bearer(OTHER))


def test_streams_of_a_key_and_of_all_keys_are_bounded(access: Access):
    alice, bob = (access.caller_of(GENERATE, bearer(token)) for token in (SECRET, OTHER))
    with access.call(alice, GENERATE, is_stream=True), access.call(alice, GENERATE, is_stream=True):
        with pytest.raises(ResourceExhausted) as caught, access.call(alice, GENERATE, is_stream=True):
            pass
        assert (caught.value.reason, caught.value.retry_after_s) == ("KEY_REQUESTS", 1.0)
        with access.call(alice, "/k3svc.v1.DecodeService/Abort", is_stream=False):
            assert caller_name() == "alice"
        with access.call(bob, GENERATE, is_stream=True), access.call(bob, GENERATE, is_stream=True):
            with pytest.raises(ResourceExhausted) as caught, access.call(bob, GENERATE, is_stream=True):
                pass
            assert caught.value.reason == "TOO_MANY_STREAMS"
            watch = "/grpc.health.v1.Health/Watch"
            with (
                access.call(bob, watch, is_stream=True),
                pytest.raises(ResourceExhausted),
                access.call(bob, watch, is_stream=True),
            ):
                pass
    with access.call(alice, GENERATE, is_stream=True), access.call(alice, GENERATE, is_stream=True):
        pass


def test_tokens_of_a_key_are_bounded_over_its_calls(access: Access):
    alice, bob = (access.caller_of(GENERATE, bearer(token)) for token in (SECRET, OTHER))
    with access.call(alice, GENERATE, is_stream=True), tokens_in_flight(60):
        with pytest.raises(ResourceExhausted) as caught, tokens_in_flight(41):
            pass
        assert (caught.value.reason, caught.value.metadata) == ("KEY_TOKENS", {"key": "alice"})
        with tokens_in_flight(40):
            pass
        with pytest.raises(InvalidRequest, match="100 for key alice"), tokens_in_flight(101):
            pass
    with access.call(bob, GENERATE, is_stream=True), tokens_in_flight(10**9):
        pass
    with access.call(alice, GENERATE, is_stream=True), tokens_in_flight(100):
        pass


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = ",
        f"[a]\ntoken = '{SECRET}'\n[a]\ntoken = '{SECRET}'",
        f"token = '{SECRET}'",
        "[a]",
        f"[a]\ntoken = '{SECRET}'\nsha256 = '{'0' * 64}'",
        "[a]\nsha256 = 'abc'",
        "[a]\ntoken = 'short'",
        f"[a]\ntoken = '{SECRET} {SECRET}'",
        f"[a]\ntoken = '{SECRET}é'",
        f"[a]\ntoken = '{SECRET}'\n[b]\ntoken = '{SECRET}'",
        f"[a]\ntoken = '{SECRET}'\n{SECRET} = 1",
        f"[a]\ntoken = '{SECRET}'\nmax_requests = 0",
        f"[a]\ntoken = '{SECRET}'\nmax_tokens = true",
        f"[a]\ntoken = '{SECRET}'\nadmin = 1",
        f"[a]\ntoken = ['{SECRET}']",
        f"[a]\ntoken = {SECRET}",
        "[" * 5000,
        "\x00",
    ],
)
def test_a_bad_keys_file_is_told_without_its_secrets(text: str):
    with pytest.raises(ConfigError) as caught:
        parse_keys("keys.toml", text.encode("latin-1"))
    shown = str(caught.value) + repr(caught.value.__cause__)
    assert "keys.toml" in shown
    assert SECRET not in shown


def test_a_token_file_holds_one_token(tmp_path: Path):
    assert parse_token("f", f"{SECRET}\n".encode()) == SECRET
    for data in (b"", b"short", SECRET.encode() * 30, b"\xff" * 30, f"{SECRET}\n{SECRET}".encode()):
        with pytest.raises(ConfigError) as caught:
            parse_token("f", data)
        assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        CallerCredentials(token_file=tmp_path / "none")


def test_a_token_changes_with_its_file(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text(SECRET)
    credentials = CallerCredentials(token_file=path)
    assert credentials.metadata() == (("authorization", f"Bearer {SECRET}"),)
    assert SECRET not in repr(credentials)
    path.write_text(OTHER)
    assert credentials.metadata() == (("authorization", f"Bearer {OTHER}"),)


def test_files_that_cannot_be_used_leave_the_last_value(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, parsed = tmp_path / "f", []

    def parse(data: bytes) -> bytes:
        parsed.append(data)
        if data == b"bad":
            raise ConfigError("bad contents")
        return data

    path.write_bytes(b"one")
    files = WatchedFiles([path], parse)
    assert (files.get(), files.get(), parsed) == (b"one", b"one", [b"one"])
    for contents in (b"bad", b"x" * (MAX_FILE_BYTES + 1)):
        path.write_bytes(contents)
        assert (files.get(), files.get()) == (b"one", b"one")
    path.unlink()
    assert (files.get(), files.get()) == (b"one", b"one")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    path.write_bytes(b"two")
    assert files.get() == b"two"
    replacement = tmp_path / "g"
    replacement.write_bytes(b"333")
    os.utime(replacement, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    replacement.replace(path)
    assert files.get() == b"333"


def test_files_that_may_not_even_be_looked_at_leave_the_last_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    files = WatchedFiles([path], bytes)
    with monkeypatch.context() as patch:
        for error in (PermissionError(13, "Permission denied", "f"), FileNotFoundError(2, "No such file", "f")):
            patch.setattr(Path, "stat", Mock(side_effect=error))
            patch.setattr(Path, "open", Mock(side_effect=error))
            assert files.get() == b"one"
    assert files.get() == b"one"
    path.write_bytes(b"two!")
    assert files.get() == b"two!"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "decode", "localhost.example"])
def test_a_host_beyond_loopback_wants_tls_keys_or_a_flag(host: str):
    with pytest.raises(ConfigError, match=r"server\.host.*server\.insecure = true"):
        Config(server=ServerSection(host=host))
    Config(server=ServerSection(host=host, insecure=True))
    Config(server=ServerSection(host=host), auth=AuthSection(keys="keys.toml"))
    Config(server=ServerSection(host=host), tls=TlsSection(certificate="c", key="k"))
    for loopback in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        Config(server=ServerSection(host=loopback))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tls.certificate=a.pem", "both or none"),
        ("tls.key=a.pem", "both or none"),
        ("tls.client_ca=a.pem", "only with tls.certificate"),
        ("server.max_request_bytes=1000", "server.max_request_bytes"),
        ("server.max_connections=0", "at least 1"),
        ("server.max_streams=0", "at least 1"),
        ("server.max_watches=0", "at least 1"),
        ("server.insecure=1", "expected bool"),
    ],
)
def test_a_configuration_names_what_is_wrong(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_the_new_sections_survive_a_file(tmp_path: Path):
    config = load_config(
        None, ["server.host=0.0.0.0", "auth.keys=k.toml", "tls.certificate=c", "tls.key=k", "tls.ca=a"]
    )
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml") == config


@pytest.mark.parametrize("role", ["prefill", "decode", "draft"])
def test_the_secured_compose_file_serves_with_certificates_and_no_flag(role: str):
    root = Path(__file__).parents[3]
    compose = (root / "docker-compose.tls.yml").read_text()
    plain, secured = (load_config(root / "deploy" / "compose" / part / f"{role}.toml") for part in ("", "tls"))
    assert (plain.server.insecure, secured.server.insecure) == (True, False)
    assert secured.tls == TlsSection(
        certificate=f"/etc/k3svc/tls/{role}.pem",
        key=f"/etc/k3svc/tls/{role}.key",
        client_ca="/etc/k3svc/tls/ca.pem",
        ca="/etc/k3svc/tls/ca.pem",
    )
    assert (secured.decode, secured.model, secured.server.port) == (plain.decode, plain.model, plain.server.port)
    assert secured.draft == plain.draft
    assert f"- ./deploy/compose/tls/{role}.toml:/etc/k3svc/{role}.toml:ro" in compose
    for line in (
        f"K3SVC_TLS_CA: {secured.tls.ca}",
        f"K3SVC_TLS_CERT: {secured.tls.certificate}",
        f"K3SVC_TLS_KEY: {secured.tls.key}",
    ):
        assert line in compose


@pytest.mark.parametrize("path", ["a\nb", 'q"\\', "\x00\x1f\x7f", "é\U0001f600"])
def test_any_text_survives_a_file(path: str, tmp_path: Path):
    config = load_config(None, [f"model.path={json.dumps(path, ensure_ascii=False)}".replace("\x7f", "\\u007f")])
    assert config.model.path == path
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml") == config


def test_text_that_is_no_utf8_and_bottomless_tables_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.path.*UTF-8"):
        load_config(None, ["model.path=\udcff"])
    (tmp_path / "c.toml").write_text("a = " + "[" * 5000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "c.toml")


@pytest.mark.parametrize("error", [Unauthenticated("x"), PermissionDenied("x")])
def test_the_new_errors_are_no_reason_to_try_again(error: K3svcError):
    assert not hasattr(error, "retry_after_s")
