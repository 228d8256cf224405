"""Which cores the roles of a stack run on."""

from dataclasses import dataclass

from k3svc.config import Config
from k3svc.rpc.process import usable_cores


@dataclass(frozen=True)
class Cores:
    """Numbers of cores; none: all that there are."""

    process: tuple[int, ...] = ()
    """`model.cpus`: those of the process."""
    grpc: tuple[int, ...] = ()
    """`server.cpus`: those of gRPC's own threads."""


def cores_of(role: str, config: Config, *, num_decode: int = 1) -> Cores:
    """Those of the configuration, or all, but with one decode service on two cores: its engine has one of its own. The
    other has what comes beside: the other roles, and the threads of gRPC that state arrives on. The loop of decode goes
    between them: it and its engine wait for each other, and to wake a thread on the same core takes less time, but
    while state arrives it is busy itself.
    """
    model, server, cores = config.model, config.server, usable_cores()
    computes_alone = model.device.partition(":")[0] in ("cpu", "reference") and model.threads == 1
    if model.cpus or server.cpus or not computes_alone or num_decode > 1 or len(cores) != 2:
        return Cores(process=model.cpus, grpc=server.cpus)
    own, other = cores
    return Cores(process=(own,), grpc=(other,)) if role == "decode" else Cores(process=(other,))
