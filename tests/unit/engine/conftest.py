"""Fixtures of the engine tests."""

from pathlib import Path

import pytest

from k3svc.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[3] / "models" / "k3-nano")
