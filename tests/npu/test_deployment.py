"""The launch files for Ascend fit the configuration and each other."""

import re
from pathlib import Path

import pytest

from k3svc.config import load_config
from k3svc.ops.npu.options import split_options

FOLDER = Path("deploy/ascend")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_configurations_are_valid(role: str):
    config = load_config(FOLDER / f"{role}.toml")
    name, _, options = config.model.device.partition(":")
    assert (name, config.model.dtype) == ("npu", "bfloat16")
    assert split_options(options)[1] == []
    assert config.cache.page_size == 128
    compose = (FOLDER / "docker-compose.yml").read_text()
    assert f"./{role}.toml:/etc/k3svc/{role}.toml:ro" in compose
    (grace,) = re.findall(r"stop_grace_period: (\d+)s", compose)
    assert int(grace) > config.server.drain_s


def test_decode_calls_prefill_where_it_listens():
    prefill = load_config(FOLDER / "prefill.toml").server
    assert load_config(FOLDER / "decode.toml").decode.prefill == (f"{prefill.host}:{prefill.port}",)


def test_roles_have_a_device_each():
    devices = re.findall(r'ASCEND_RT_VISIBLE_DEVICES: "(\d)"', (FOLDER / "docker-compose.yml").read_text())
    assert sorted(devices) == ["0", "1"]
