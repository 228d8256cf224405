"""Paths of a configuration, made absolute and looked at before anything is started: a role runs in another folder."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from k3svc.config import AuthSection, Config, TlsSection
from k3svc.errors import ConfigError

CHECKPOINT_FILES = ("config.json", "tiktoken.model", "tokenizer_config.json")
"""What every checkpoint has beside its weights."""
INDEX_FILE = "model.safetensors.index.json"


def with_absolute_model(config: Config) -> Config:
    """The same with absolute paths of the checkpoints. Raises ConfigError when there is none in a folder."""
    path = Path(config.model.path)
    if not path.is_dir():
        raise ConfigError(f"model.path: no folder {path}; name a checkpoint with --model DIR", key="model.path")
    _check_checkpoint("model.path", path, CHECKPOINT_FILES, "*.safetensors")
    if config.draft.path:
        _check_checkpoint("draft.path", Path(config.draft.path), ("config.json",), "model.safetensors")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=str(path.resolve())),
        draft=dataclasses.replace(config.draft, path=_absolute(config.draft.path)),
    )


def _check_checkpoint(key: str, folder: Path, needed: Sequence[str], weights: str) -> None:
    """Raises ConfigError when a file is missing. `weights`: what holds them where no index names the files."""
    missing = [name for name in needed if not (folder / name).is_file()]
    try:
        named = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
        missing += sorted(name for name in named if not (folder / name).is_file())
    except FileNotFoundError:
        missing += [] if any(folder.glob(weights)) else [weights]
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{key}: {folder / INDEX_FILE} cannot be read: {error!r}", key=key) from error
    if missing:
        raise ConfigError(f"{key}: no checkpoint in {folder}: no {', '.join(missing[:3])}", key=key)


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
