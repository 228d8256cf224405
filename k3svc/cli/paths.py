"""Paths of a configuration, made absolute and looked at before anything is started: a role runs in another folder."""

import dataclasses
from pathlib import Path

from k3svc.config import AuthSection, Config, TlsSection
from k3svc.errors import ConfigError

CHECKPOINT_FILES = ("config.json", "tiktoken.model", "tokenizer_config.json")
"""What every checkpoint has beside its weights."""


def with_absolute_model(config: Config) -> Config:
    """The same with absolute paths of the checkpoints. Raises ConfigError when there is none in a folder."""
    path = Path(config.model.path)
    if not path.is_dir():
        raise ConfigError(f"model.path: no folder {path}; name a checkpoint with --model DIR", key="model.path")
    missing = [name for name in CHECKPOINT_FILES if not (path / name).is_file()]
    if missing:
        raise ConfigError(f"model.path: no checkpoint in {path}: no {', '.join(missing)}", key="model.path")
    draft = Path(config.draft.path)
    if config.draft.path and not (draft / "config.json").is_file():
        raise ConfigError(f"draft.path: no draft checkpoint in {draft}: no config.json", key="draft.path")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=str(path.resolve())),
        draft=dataclasses.replace(config.draft, path=_absolute(config.draft.path)),
    )


def with_absolute_files(config: Config) -> Config:
    """The same with absolute paths of certificates, keys, tokens and spans: a role runs in another folder."""
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
        tracing=dataclasses.replace(config.tracing, file=_absolute(config.tracing.file)),
    )


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else ""
