"""Paths of a configuration, made absolute and looked at before anything is started: a role runs in another folder."""

import dataclasses
from pathlib import Path

from k3svc.config import AuthSection, Config, TlsSection
from k3svc.errors import ConfigError

CHECKPOINT_FILES = ("config.json", "tiktoken.model", "tokenizer_config.json")
"""What every checkpoint has beside its weights."""


def with_absolute_model(config: Config) -> Config:
    """The same with an absolute path of the checkpoint. Raises ConfigError when there is none in that folder."""
    path = Path(config.model.path)
    if not path.is_dir():
        raise ConfigError(f"model.path: no folder {path}; name a checkpoint with --model DIR", key="model.path")
    missing = [name for name in CHECKPOINT_FILES if not (path / name).is_file()]
    if missing:
        raise ConfigError(f"model.path: no checkpoint in {path}: no {', '.join(missing)}", key="model.path")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(path.resolve())))


def with_absolute_files(config: Config) -> Config:
    """The same with absolute paths of certificates, keys and tokens: a role runs in another folder."""
    tls, auth = config.tls, config.auth
    return dataclasses.replace(
        config,
        tls=TlsSection(
            certificate=_absolute(tls.certificate),
            key=_absolute(tls.key),
            client_ca=_absolute(tls.client_ca),
            ca=_absolute(tls.ca),
        ),
        auth=AuthSection(keys=_absolute(auth.keys), token=_absolute(auth.token)),
    )


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else ""
