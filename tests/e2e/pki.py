"""Certificates of tests."""

from dataclasses import dataclass
from pathlib import Path

import trustme

from k3svc.config import TlsSection
from k3svc.rpc.credentials import CallerCredentials


@dataclass(frozen=True, kw_only=True)
class Pki:
    """An authority and the files of identities that it made."""

    ca: trustme.CA
    folder: Path

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued = self.ca.issue_cert(*hosts)
        # Each of them at once, as tools that renew certificates do.
        for path, data in (
            (certificate, b"".join(pem.bytes() for pem in issued.cert_chain_pems)),
            (key, issued.private_key_pem.bytes()),
        ):
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").replace(path)
        return certificate, key

    def tls(self, name: str, *hosts: str, mutual: bool = False) -> TlsSection:
        certificate, key = self.issue(name, *hosts)
        ca = str(self.ca_file)
        return TlsSection(certificate=str(certificate), key=str(key), ca=ca, client_ca=ca if mutual else "")

    def caller(self, name: str | None = None) -> CallerCredentials:
        certificate, key = (None, None) if name is None else self.issue(name, "caller.example")
        return CallerCredentials(ca=self.ca_file, certificate=certificate, key=key)


def new_pki(folder: Path) -> Pki:
    folder.mkdir(exist_ok=True)
    pki = Pki(ca=trustme.CA(), folder=folder)
    pki.ca_file.write_bytes(pki.ca.cert_pem.bytes())
    return pki
