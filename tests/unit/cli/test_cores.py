import pytest

from k3svc.cli import cores as cores_module
from k3svc.cli.cores import Cores, cores_of
from k3svc.config import load_config

ANYWHERE = Cores()


@pytest.mark.parametrize(
    ("cores", "num_decode", "settings", "expected"),
    [
        ([4, 6], 1, ["model.device=cpu"], (Cores((6,)), Cores((4,), (6,)))),
        ([0, 1], 1, ["model.device=reference"], (Cores((1,)), Cores((0,), (1,)))),
        ([0, 1], 1, ["model.device=cpu", "model.threads=2"], (ANYWHERE, ANYWHERE)),
        ([0, 1], 1, ["model.device=cpu", "model.cpus=[0,1]"], (Cores((0, 1)), Cores((0, 1)))),
        ([0, 1], 1, ["model.device=cpu", "server.cpus=[1]"], (Cores(grpc=(1,)), Cores(grpc=(1,)))),
        ([0, 1], 2, ["model.device=cpu"], (ANYWHERE, ANYWHERE)),
        ([0, 1], 1, ["model.device=npu-emulated"], (ANYWHERE, ANYWHERE)),
        ([0], 1, ["model.device=cpu"], (ANYWHERE, ANYWHERE)),
        ([0, 1, 2, 3], 1, ["model.device=cpu"], (ANYWHERE, ANYWHERE)),
        ([], 1, ["model.device=cpu"], (ANYWHERE, ANYWHERE)),
    ],
)
def test_decode_has_a_core_of_its_own_where_there_are_two(
    cores: list[int],
    num_decode: int,
    settings: list[str],
    expected: tuple[Cores, Cores],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(cores_module, "usable_cores", lambda: cores)
    config = load_config(None, settings)
    found = tuple(cores_of(role, config, num_decode=num_decode) for role in ("prefill", "decode"))
    assert found == expected
