"""Who proposes in a stack: --draft, the configuration, and what lies beside the model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from k3svc.cli.draft import with_draft
from k3svc.cli.paths import CHECKPOINT_FILES
from k3svc.cli.stack import Stack
from k3svc.config import Config, load_config
from k3svc.errors import ConfigError

HERE = Path(__file__).parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (*CHECKPOINT_FILES, "model.safetensors"):
        (folder / name).touch()
    return folder


def checkpoint(model: Path, kind: str) -> Path:
    folder = model.with_name(f"model-{kind}")
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "model.safetensors").touch()
    return folder


def configured(model: Path, *settings: str) -> Config:
    return load_config(None, [f"model.path={model}", *settings])


def who(config: Config) -> tuple[str, str]:
    return config.speculation.drafter, Path(config.draft.path).name if config.draft.path else ""


def test_the_first_kind_that_lies_beside_the_model_is_taken_where_nobody_says_otherwise(model: Path):
    assert who(with_draft(configured(model), None)) == ("none", "")
    checkpoint(model, "dflash")
    assert who(with_draft(configured(model), None)) == ("service", "model-dflash")
    checkpoint(model, "dspark")
    assert who(with_draft(configured(model), None)) == ("service", "model-dspark")
    assert who(with_draft(configured(model, "speculation.drafter=ngram"), None)) == ("ngram", "")
    assert who(with_draft(configured(model, "draft.path=elsewhere"), None)) == ("service", "elsewhere")


def test_the_option_wins_over_the_configuration(model: Path):
    checkpoint(model, "dflash")
    assert who(with_draft(configured(model, "speculation.drafter=none"), "dflash")) == ("service", "model-dflash")
    assert who(with_draft(configured(model, "draft.path=elsewhere"), "dflash")) == ("service", "elsewhere")
    for kind in ("ngram", "none"):
        config = with_draft(configured(model, "draft.path=a", "draft.endpoint=b:1"), kind)
        assert (who(config), config.draft.endpoint) == ((kind, ""), "")
    with pytest.raises(ConfigError, match=r"--draft dspark: no folder .*model-dspark"):
        with_draft(configured(model), "dspark")
    with pytest.raises(typer.BadParameter, match="allowed: dspark, dflash, ngram, none"):
        with_draft(configured(model), "medusa")


def stack_of(config: Config, tmp_path: Path) -> Stack:
    def command(role: str, config_path: Path) -> Sequence[str]:
        return (str(HERE / "fake_role.py"), role, str(config_path), "good")

    return Stack(config, log_dir=tmp_path / "logs", command=command, ready_timeout_s=100.0)


async def test_a_stack_starts_a_draft_role_and_tells_the_others_where_it_is(model: Path, tmp_path: Path):
    draft = checkpoint(model, "dspark")
    async with stack_of(with_draft(configured(model), None), tmp_path) as stack:
        assert list(stack.processes) == ["prefill-0", "decode-0", "draft-0"]
        told = {name: load_config(process.config_path).draft for name, process in stack.processes.items()}
    assert {section.path for section in told.values()} == {str(draft.resolve())}
    endpoint = stack.draft_endpoint
    assert endpoint
    assert {name: section.endpoint for name, section in told.items()} == {
        "prefill-0": endpoint,
        "decode-0": endpoint,
        "draft-0": "",
    }
    assert all("drained" in process.log_path.read_text() for process in stack.processes.values())


@pytest.mark.parametrize("settings", [("draft.endpoint=10.0.0.1:50053",), ("speculation.drafter=ngram",)])
def test_a_service_elsewhere_or_none_starts_no_role(settings: tuple[str, ...], model: Path, tmp_path: Path):
    draft = checkpoint(model, "dspark")
    stack = stack_of(configured(model, f"draft.path={draft}", *settings), tmp_path)
    assert stack._counts == {"prefill": 1, "decode": 1, "draft": 0}


def test_a_draft_of_another_kind_than_asked_for_is_refused():
    nano = Path(__file__).parents[3] / "models" / "k3-nano"
    named = configured(nano, f"draft.path={nano}-dspark")
    assert who(with_draft(named, "dspark")) == ("service", "k3-nano-dspark")
    with pytest.raises(ConfigError, match=r"--draft dflash: draft\.path names a dspark checkpoint, .*k3-nano-dspark"):
        with_draft(named, "dflash")


def test_a_stack_says_who_proposes(model: Path, tmp_path: Path):
    checkpoint(model, "dflash")
    said = {
        choice: stack_of(with_draft(configured(model), choice), tmp_path).drafts for choice in (None, "ngram", "none")
    }
    assert said == {None: "model-dflash", "ngram": "ngram", "none": ""}


@pytest.mark.parametrize("key", ["model.path", "draft.path"])
def test_a_checkpoint_without_its_weights_is_told_before_anything_starts(key: str, model: Path, tmp_path: Path):
    draft = checkpoint(model, "dspark")
    folder = model if key == "model.path" else draft
    config = configured(model, f"draft.path={draft}")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"{key}: no checkpoint in {folder}: no .*\.safetensors"):
        stack_of(config, tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (folder / "one.safetensors").touch()
    with pytest.raises(ConfigError, match=rf"{key}: no checkpoint in {folder}: no two\.safetensors"):
        stack_of(config, tmp_path)
    (folder / "two.safetensors").touch()
    stack_of(config, tmp_path)
    index.write_text("[]")
    with pytest.raises(ConfigError, match=rf"{key}: .*index\.json cannot be read"):
        stack_of(config, tmp_path)


def test_a_draft_that_is_no_checkpoint_is_told_before_anything_starts(model: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"draft\.path: no checkpoint in .*nowhere"):
        stack_of(configured(model, f"draft.path={tmp_path / 'nowhere'}"), tmp_path)
    with pytest.raises(ConfigError, match=r"draft\.endpoint.*only with draft\.path"):
        configured(model, "draft.endpoint=a:1")
