"""Memory of a decode service, in which the hand-offs of tests land."""

from typing import Any

from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.testing.fakes import FakeCache, fake_spec
from k3svc.transfer.landing import Landing
from k3svc.transfer.manifest import PrefillDone, StateManifest, build_manifest
from tests.e2e.rpc_stack import PROMPT, call_of

SPEC = fake_spec(num_slots=8, num_pages=64)
TABLE = tuple(range(20, 20 + -(-len(PROMPT) // SPEC.page_size)))


def call(request_id: str, **changes: Any) -> PrefillCall:
    return call_of(request_id, **{"state_bytes": manifest_of(request_id).total_bytes, **changes})


def manifest_of(request_id: str) -> StateManifest:
    return build_manifest(SPEC, request_id=request_id, attempt=1, num_tokens=len(PROMPT))


class Target:
    """Memory of a decode service that a hand-off lands in."""

    def __init__(self, request_id: str) -> None:
        self.cache = FakeCache(SPEC)
        self.landing = Landing(manifest_of(request_id), self.cache, slot=3, block_table=TABLE)
        self.through_shm: list[bool] = []

    def take(self, event: HandoffEvent) -> None:
        if isinstance(event, StateManifest):
            self.landing.accept_manifest(event)
        elif isinstance(event, PrefillDone):
            self.landing.finish(event.num_frames)
        else:
            for frame in event:
                self.through_shm.append(frame.position is not None)
                self.landing.accept(frame)

    def bytes(self) -> bytes:
        views = [view for n in SPEC.kda_layers for view in (self.cache.state_bytes(n, 3), self.cache.conv_bytes(n, 3))]
        views += [self.cache.rows_bytes(layer, page) for layer in SPEC.mla_layers for page in TABLE]
        return b"".join([*map(bytes, views), bytes(self.cache.logits_bytes(3))])
