"""Who proposes tokens in a stack: what `--draft` makes of a configuration."""

import dataclasses
from pathlib import Path

import typer

from k3svc.config import Config, DraftSection, SpeculationSection
from k3svc.errors import ConfigError
from k3svc.model.draft_config import load_draft_config

CHECKPOINTS = ("dspark", "dflash")
"""Kinds of drafts: MODEL-KIND is the checkpoint for the model MODEL, unless draft.path names another."""
CHOICES = (*CHECKPOINTS, "ngram", "none")


def with_draft(config: Config, draft: str | None) -> Config:
    """The same with a draft checkpoint, or with none. None: what the configuration says; where it says nothing, the
    first kind of which there is a checkpoint. Raises ConfigError, and BadParameter for another choice.
    """
    if draft is None:
        says = config.draft != DraftSection() or config.speculation.drafter != SpeculationSection().drafter
        draft = next((kind for kind in CHECKPOINTS if _beside(config, kind).is_dir()), "none")
        return config if says else with_draft(config, draft)
    if draft not in CHOICES:
        raise typer.BadParameter(f"{draft!r}; allowed: {', '.join(CHOICES)}", param_hint="--draft")
    drafter = draft if draft in ("ngram", "none") else "service"
    path = config.draft.path if drafter == "service" else ""
    if path:
        _check_kind(Path(path), draft)
    elif drafter == "service":
        path = str(_beside(config, draft))
        if not Path(path).is_dir():
            raise ConfigError(f"--draft {draft}: no folder {path}; draft.path names a checkpoint", key="draft.path")
    endpoint = config.draft.endpoint if path else ""
    return dataclasses.replace(
        config,
        draft=dataclasses.replace(config.draft, path=path, endpoint=endpoint),
        speculation=dataclasses.replace(config.speculation, drafter=drafter),
    )


def _check_kind(path: Path, draft: str) -> None:
    """Raises ConfigError when the checkpoint of draft.path is of another kind than --draft asks for."""
    if (path / "config.json").is_file() and (family := load_draft_config(path).family) != draft:
        raise ConfigError(
            f"--draft {draft}: draft.path names a {family} checkpoint, {path}; give --draft {family}, or no draft.path",
            key="draft.path",
        )


def _beside(config: Config, kind: str) -> Path:
    model = Path(config.model.path)
    return model.with_name(f"{model.name}-{kind}")
