from pathlib import Path

import pytest

from k3svc.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[3] / "models" / "k3-nano"


@pytest.fixture(scope="session")
def nano() -> Path:
    return NANO


@pytest.fixture(scope="session")
def tokenizer(nano: Path) -> Tokenizer:
    return Tokenizer.load(nano)
