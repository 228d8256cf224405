from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from k3svc.core.targets import Affinity, Report, ranked
from k3svc.engine.observer import Observer
from k3svc.engine.peers import BACKOFF_MIN_S, PrefillPeers
from k3svc.engine.ports import HandoffEvent, PrefillCall
from k3svc.obs.metrics import Metrics

AFFINITY = Affinity(num_blocks=2, block_tokens=4, bound=1.25)
SERVING = Report(serving=True)


@dataclass(eq=False)
class Peer:
    name: str
    released: list[str] = field(default_factory=list)

    async def prefill(self, call: PrefillCall) -> AsyncGenerator[HandoffEvent, None]:
        raise NotImplementedError
        yield

    async def release(self, request_id: str, attempt: int) -> None:
        self.released.append(request_id)


@dataclass
class World:
    peers: list[Peer]
    chosen: PrefillPeers
    now: list[float]

    def pick(self, prompt: tuple[int, ...] = (), **options: set[Peer]) -> Peer:
        picked = self.chosen.pick(prompt=prompt, **options)
        assert picked is not None
        peer, wait_s = picked
        assert wait_s == 0
        assert isinstance(peer, Peer)
        return peer

    def favourites(self, prompt: tuple[int, ...]) -> list[Peer]:
        by_name = {peer.name: peer for peer in self.peers}
        return [by_name[name] for name in ranked(AFFINITY.key(prompt), by_name)]


PROMPT = tuple(range(20))


@pytest.fixture
def world() -> World:
    now = [0.0]
    peers = [Peer(f"p{index}") for index in range(3)]
    return World(peers=peers, chosen=PrefillPeers(peers, lambda: now[0], AFFINITY), now=now)


def test_prompts_that_begin_alike_go_to_one_peer_and_others_elsewhere(world: World):
    assert {world.pick((*PROMPT[:8], index)) for index in range(50)} == {world.favourites(PROMPT)[0]}
    assert {world.pick(tuple(range(index, index + 8))) for index in range(50)} == set(world.peers)


def test_prompts_without_a_whole_block_take_turns(world: World):
    assert Counter(world.pick((1, 2)) for _ in range(9)) == dict.fromkeys(world.peers, 3)


def test_a_loaded_favourite_is_passed_over_until_it_has_less_to_do(world: World):
    first, second, _ = world.favourites(PROMPT)
    world.chosen.begin(first, 1000)
    assert world.pick(PROMPT) is second
    assert world.pick((1, 2)) is not first
    world.chosen.end(first, 1000)
    assert world.pick(PROMPT) is first


def test_what_others_ask_of_a_peer_counts_and_what_is_ours_is_not_counted_twice(world: World):
    first, second, _ = world.favourites(PROMPT)
    world.chosen.begin(first, 30)
    world.chosen.report(first, Report(serving=True, queued_tokens=30))
    world.chosen.end(first, 30)
    assert world.pick(PROMPT) is first, "it was all ours"
    world.chosen.report(first, Report(serving=True, queued_tokens=500))
    assert world.pick(PROMPT) is second


def test_who_failed_or_refused_lately_is_left_out_and_used_again(world: World):
    first, second, third = world.favourites(PROMPT)
    world.chosen.failed(first)
    world.chosen.failed(second, 7.0)
    assert world.pick(PROMPT) is third
    world.now[0] = BACKOFF_MIN_S
    assert world.pick(PROMPT) is first
    world.chosen.succeeded(first)
    world.now[0] = 7.0
    world.chosen.failed(first)
    assert world.pick(PROMPT) is second


@pytest.mark.parametrize("report", [None, Report(serving=False)])
def test_who_drains_or_does_not_answer_is_left_out_until_it_serves(world: World, report: Report | None):
    first, second, _ = world.favourites(PROMPT)
    world.chosen.report(first, report)
    world.chosen.failed(first)
    assert world.pick(PROMPT) is second
    world.now[0] = 100.0
    assert world.pick(PROMPT) is second, "time alone brings nobody back"
    world.chosen.report(first, SERVING)
    assert world.pick(PROMPT) is first


def test_a_peer_that_says_that_it_serves_again_need_not_wait_out_its_back_off(world: World):
    first, _, _ = world.favourites(PROMPT)
    for _ in range(20):
        world.now[0] += 10.0
        world.chosen.failed(first)
    world.chosen.report(first, None)
    world.chosen.report(first, SERVING)
    assert world.pick(PROMPT) is first


def test_a_report_that_it_serves_does_not_end_the_back_off_of_a_refusal(world: World):
    first, second, _ = world.favourites(PROMPT)
    world.chosen.failed(first, 5.0)
    world.chosen.report(first, SERVING)
    assert world.pick(PROMPT) is second


def test_attempts_go_to_different_peers_in_the_order_of_the_prefix(world: World):
    tried: set[Peer] = set()
    for want in world.favourites(PROMPT):
        assert world.pick(PROMPT, tried=tried) is want
        tried.add(want)
    assert world.pick(PROMPT, tried=tried) is world.favourites(PROMPT)[0]


def test_reports_never_leave_nobody(world: World):
    for peer in world.peers:
        world.chosen.report(peer, None)
    assert world.pick(PROMPT) in world.peers
    world.chosen.failed(world.peers[0], 2.0)
    world.chosen.failed(world.peers[1], 1.0)
    world.chosen.report(world.peers[2], SERVING)
    assert world.pick(PROMPT) is world.peers[2]
    assert world.chosen.pick(set(world.peers)) is None
    assert PrefillPeers([], lambda: 0.0).pick() is None


def test_peers_come_and_go(world: World):
    first, second, third = world.favourites(PROMPT)
    world.chosen.begin(first, 10)
    world.chosen.replace([second, third])
    assert world.pick(PROMPT) is second
    assert world.chosen.names == (second.name, third.name)
    assert world.chosen.holds(first)
    world.chosen.failed(first)
    world.chosen.report(first, SERVING)
    world.chosen.succeeded(first)
    world.chosen.end(first, 10)
    assert not world.chosen.holds(first)
    world.chosen.failed(second, 9.0)
    again = Peer(first.name)
    world.chosen.replace([again, second, third])
    assert world.pick(PROMPT) is again
    world.chosen.failed(again, 9.0)
    assert world.pick(PROMPT) is third, "those that stay keep what is known of them"


def test_only_one_that_may_have_left(world: World):
    assert world.chosen.only("p1").pick(prompt=PROMPT) == (world.peers[1], 0.0)
    assert world.chosen.only("gone").pick(prompt=PROMPT) is None


def test_every_choice_is_counted():
    metrics = Metrics("decode")
    peers = [Peer("p0"), Peer("p1")]
    chosen = PrefillPeers(peers, lambda: 0.0, AFFINITY, Observer(metrics))
    for _ in range(3):
        chosen.pick(prompt=PROMPT)
    chosen.pick(prompt=(1,))
    chosen.report(peers[0], None)
    chosen.report(peers[1], None)
    chosen.pick(prompt=PROMPT)

    def count(by: str) -> float:
        values = [
            metrics.registry.get_sample_value("k3svc_prefill_choices_total", {"target": peer.name, "by": by})
            for peer in peers
        ]
        return sum(value or 0.0 for value in values)

    assert (count("prefix"), count("load"), count("last resort")) == (3, 1, 1)
