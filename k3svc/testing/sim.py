"""SimWorld: production engines under faults on virtual time. A run is a seed; the same seed is the same run.

Two prefill and two decode engines, and clients that resume on another decode service with the tokens they have, as
k3svc.client does. What the model says depends on every byte of state, so that a wrong hand-off is a wrong token. After
every turn of the event loop the checkers look at what changed; when the faults end everything must finish, and nothing
may be held. `run_seed` returns what happened or raises.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from k3svc.core.decode_scheduler import DecodeScheduler
from k3svc.core.pages import PagePool
from k3svc.core.prefill_scheduler import PrefillScheduler
from k3svc.core.prefix_cache import PrefixCache
from k3svc.core.request import GenerateRequest
from k3svc.core.slots import SlotPool
from k3svc.engine.decode import DecodeEngine
from k3svc.engine.ports import Fingerprint
from k3svc.engine.prefill import PrefillEngine
from k3svc.errors import EngineFault, Incompatible, K3svcError
from k3svc.testing.fakes import FakeCache, FakeRunner, fake_spec
from k3svc.testing.links import Broken, Host, LinkedPeer, LinkFaults, Network
from k3svc.testing.sim_clients import STOP_TOKEN, SimClient, draw_story, share_beginnings
from k3svc.testing.sim_drafters import NUM_PROPOSALS, draw_speculator
from k3svc.testing.virtual import VirtualLoop
from k3svc.text.tokenizer import Tokenizer
from k3svc.transfer.manifest import wire_layout

PAGE_SIZE = 8
GRID = 16
LEASE_S = 2.0
SPAN_S = 1.0
"""Requests arrive within it, faults a second longer."""
DRAIN_S = 0.5
PREFILL_ADDRESSES = ("prefill0", "prefill1", "prefill2")
DECODE_ADDRESSES = ("decode0", "decode1", "decode2")
SPECULATING_SEEDS = (2, 4)
"""Seeds modulo 5 in which decode has drafters."""
OVERLAPPING_SEEDS = (1, 2)
"""Seeds modulo 3 in which decode asks for the next step while one runs."""
SNAPSHOTS_OF_SEEDS = (4, 1, 0, 8)
"""Seeds modulo 4: states that the prefix caches of prefill keep; with none there is no cache."""
NUM_HOSTS = 2
"""Hosts of each kind; one that restarts takes any free address."""
FINGERPRINT = Fingerprint(protocol=1, model="m", tokenizer="t", wire_layout=wire_layout(fake_spec()), variant="f")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens to hosts, and to the links between them. Weights are relative; with none nothing happens."""

    links: LinkFaults = field(default_factory=LinkFaults)
    interval_mean_s: float = 0.3
    crash_weight: float = 0.0
    partition_weight: float = 0.0
    drain_weight: float = 0.0
    upgrade_weight: float = 0.0
    """A prefill service is replaced by one of another model, later by one of the right model."""
    restart_delay_max_s: float = 0.3
    partition_max_s: float = 1.0
    step_failure_probability: float = 0.0
    step_min_s: float = 0.0005
    step_max_s: float = 0.004


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Pools and queues of the engines, small enough to be full."""

    prefill_slots: int
    prefill_pages: int
    decode_slots: int
    decode_pages: int
    chunk_tokens: int
    max_waiting: int
    max_transfers: int
    prefill_attempts: int
    frame_bytes: int
    max_unread_tokens: int
    reader_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run did, for coverage: a fault that never happens tests nothing."""

    seed: int
    counts: "Counter[str]"
    virtual_s: float


def draw_faults(rng: random.Random) -> Faults:
    """Each kind of fault is on in a part of the seeds, so that each also meets a world without the others."""
    links = LinkFaults(
        delay_max_s=rng.choice((0.0005, 0.005, 0.03)),
        window_events=rng.choice((1, 2, 8)),
        straggler_probability_per_call=rng.choice((0.0, 0.2)),
        break_probability=rng.choice((0.0, 0.03)),
        silence_probability=rng.choice((0.0, 0.01)),
        loss_probability=rng.choice((0.0, 0.03)),
        duplicate_probability=rng.choice((0.0, 0.03)),
        swap_probability=rng.choice((0.0, 0.03)),
        corrupt_probability=rng.choice((0.0, 0.05)),
        foreign_probability_per_call=rng.choice((0.0, 0.1)),
        repeat_probability_per_call=rng.choice((0.0, 0.1)),
        loss_probability_per_release=rng.choice((0.0, 0.3)),
    )
    return Faults(
        links=links,
        interval_mean_s=rng.choice((0.05, 0.2, 0.5)),
        crash_weight=rng.choice((0.0, 1.0)),
        partition_weight=rng.choice((0.0, 0.5)),
        drain_weight=rng.choice((0.0, 0.3)),
        upgrade_weight=rng.choice((0.0, 0.0, 0.3)),
        step_failure_probability=rng.choice((0.0, 0.0, 0.0, 0.01)),
    )


def draw_sizes(rng: random.Random) -> Sizes:
    return Sizes(
        prefill_slots=rng.randint(1, 5),
        prefill_pages=rng.choice((16, 24, 40)),
        decode_slots=rng.randint(2, 6),
        decode_pages=rng.choice((16, 20, 40)),
        chunk_tokens=rng.choice((16, 32, 64)),
        max_waiting=rng.randint(1, 12),
        max_transfers=rng.randint(1, 4),
        prefill_attempts=rng.randint(1, 4),
        frame_bytes=rng.choice((64, 256, 1024)),
        max_unread_tokens=rng.choice((2, 8, 64)),
        reader_timeout_s=rng.choice((0.2, 1.0)),
    )


class SimWorld:
    """One run on the VirtualLoop that runs it."""

    def __init__(self, seed: int, tokenizer: Tokenizer, *, num_requests: int) -> None:
        self._rng = random.Random(seed)
        self._seed = seed
        self._faults = draw_faults(self._rng)
        self._sizes = draw_sizes(self._rng)
        self._network = Network(self._rng, self._faults.links)
        self._num_requests = num_requests
        self._tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        self._is_calm = False
        self._repairs: set[asyncio.Task[None]] = set()
        self._checked: dict[Host, tuple[int, ...]] = {}
        self._speculates = seed % 5 in SPECULATING_SEEDS
        self._overlaps = seed % 3 in OVERLAPPING_SEEDS
        self._num_snapshots = SNAPSHOTS_OF_SEEDS[seed % len(SNAPSHOTS_OF_SEEDS)]
        self._draft_rng = random.Random(f"drafts of {seed}")
        self._requests: dict[str, GenerateRequest] = {}
        self._decode_runners: list[FakeRunner] = []
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> Outcome:
        for index in range(NUM_HOSTS):
            self._start(PREFILL_ADDRESSES[index])
            self._start(DECODE_ADDRESSES[index])
        max_context = self._sizes.decode_pages * PAGE_SIZE
        stories = [
            draw_story(self._rng, index, max_context_tokens=max_context, span_s=SPAN_S)
            for index in range(self._num_requests)
        ]
        stories = share_beginnings(stories, random.Random(f"beginnings of {self._seed}"))
        self._requests |= {story.request.request_id: story.request for story in stories}
        may_fail: tuple[type[K3svcError], ...] = ()
        if self._faults.step_failure_probability:
            may_fail += (EngineFault,)
        if self._faults.upgrade_weight:
            may_fail += (Incompatible,)
        clients = [SimClient(story, self._network, DECODE_ADDRESSES, self._rng, may_fail=may_fail) for story in stories]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        chaos = asyncio.create_task(self._make_trouble())
        await asyncio.wait({chaos, *tasks}, timeout=2 * SPAN_S, return_when=asyncio.FIRST_EXCEPTION)
        await self._end_trouble(chaos)
        _, late = await asyncio.wait(tasks, timeout=200.0, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        if late:
            raise Broken(f"never ended: {[client.story for client in clients if not client.outcome]}")
        for client in clients:
            self._counts[f"request {client.outcome}"] += 1
            self._counts += client.counts
        await self._wind_up()
        self._counts["steps ahead"] = sum(runner.num_ahead for runner in self._decode_runners)
        return Outcome(seed=self._seed, counts=self._counts, virtual_s=self._clock())

    def check(self) -> None:
        """The invariants of every engine that changed since they were checked last; called at every turn."""
        for host in self._network.hosts.values():
            if not host.is_alive:
                continue
            scheduler = host.engine.scheduler
            state: tuple[int, ...] = (scheduler.pages.num_free, scheduler.slots.num_free)
            state += (len(scheduler.waiting), len(host.streams))
            if isinstance(scheduler, PrefillScheduler) and scheduler.cache is not None:
                state += (scheduler.cache.num_idle, scheduler.cache.slots.num_free)
            if self._checked.get(host) != state:
                self._checked[host] = state
                scheduler.check()
                self._check_bounds(host)
            if host.broken:
                raise Broken(f"{host.address}: {host.broken}")
            for stream, deadline in host.streams.items():
                if deadline is not None and self._clock() > deadline + 1e-6 and not stream.is_ended:
                    raise Broken(f"{stream.request_id} runs past its deadline")

    def _check_bounds(self, host: Host) -> None:
        load, sizes = host.engine.load(), self._sizes
        is_decode = host.address in DECODE_ADDRESSES
        if load.waiting > sizes.max_waiting + (sizes.decode_slots if is_decode else 0):
            raise Broken(f"{load.waiting} wait at {host.address}")
        if load.in_transfer > (sizes.max_transfers if is_decode else sizes.prefill_slots):
            raise Broken(f"{load.in_transfer} hand-offs at once at {host.address}")
        of_a_sample = 1 + NUM_PROPOSALS * self._speculates + self._overlaps
        most = sizes.max_unread_tokens + sizes.decode_slots * of_a_sample
        for stream in host.streams:
            if stream.num_unread > most:
                raise Broken(f"{stream.num_unread} tokens of {stream.request_id} wait to be read")
        if not host.is_leaving and self._clock() > host.begun_s and not host.engine.is_progressing():
            raise Broken(f"{host.address} says that it makes no progress")
        if host.loop_task.done() and not load.draining:
            raise Broken(f"the step loop of {host.address} ended by itself: {host.loop_task}")

    def _start(self, address: str, fingerprint: Fingerprint = FINGERPRINT) -> None:
        make = self._prefill if address in PREFILL_ADDRESSES else self._decode
        host = self._network.hosts[address] = Host(address)
        host.begin(make(host, fingerprint))

    def _prefill(self, _host: Host, fingerprint: Fingerprint) -> PrefillEngine:
        sizes = self._sizes
        spec = fake_spec(
            num_slots=sizes.prefill_slots + self._num_snapshots, num_pages=sizes.prefill_pages, page_size=PAGE_SIZE
        )
        cache = FakeCache(spec)
        pages = PagePool(sizes.prefill_pages)
        scheduler = PrefillScheduler(
            pages=pages,
            slots=SlotPool(sizes.prefill_slots),
            page_size=PAGE_SIZE,
            chunk_tokens=sizes.chunk_tokens,
            grid=GRID,
            max_waiting=sizes.max_waiting,
            max_waiting_tokens=1 << 12,
            max_prompt_tokens=sizes.prefill_pages * PAGE_SIZE,
            cache=self._prefix_cache(pages),
        )
        return PrefillEngine(
            scheduler=scheduler,
            runner=self._runner(cache),
            cache=cache,
            fingerprint=fingerprint,
            clock=self._clock,
            lease_s=LEASE_S,
            frame_bytes=sizes.frame_bytes,
        )

    def _prefix_cache(self, pages: PagePool) -> PrefixCache | None:
        if not self._num_snapshots:
            return None
        slots = SlotPool(self._num_snapshots, first=self._sizes.prefill_slots + 1)
        return PrefixCache(pages=pages, slots=slots, page_size=PAGE_SIZE, interval=GRID)

    def _decode(self, host: Host, fingerprint: Fingerprint) -> DecodeEngine:
        sizes = self._sizes
        self._counts["decode starts"] += 1
        spec = fake_spec(num_slots=sizes.decode_slots, num_pages=sizes.decode_pages, page_size=PAGE_SIZE)
        cache = FakeCache(spec)
        scheduler = DecodeScheduler(
            pages=PagePool(sizes.decode_pages),
            slots=SlotPool(sizes.decode_slots),
            page_size=PAGE_SIZE,
            max_batch=sizes.decode_slots,
            max_waiting=sizes.max_waiting,
            max_transfers=sizes.max_transfers,
            max_context_tokens=sizes.decode_pages * PAGE_SIZE,
            stop_token_ids=[STOP_TOKEN],
        )
        runner = self._runner(cache)
        self._decode_runners.append(runner)
        engine = DecodeEngine(
            scheduler=scheduler,
            runner=runner,
            ahead=runner if self._overlaps else None,
            cache=cache,
            peers=[LinkedPeer(self._network, host, address) for address in PREFILL_ADDRESSES],
            tokenizer=self._tokenizer,
            fingerprint=fingerprint,
            clock=self._clock,
            instance=f"{host.address}.{self._counts['decode starts']}",
            prefill_attempts=sizes.prefill_attempts,
            max_samples=2,
            max_unread_tokens=sizes.max_unread_tokens,
            reader_timeout_s=sizes.reader_timeout_s,
        )
        if self._speculates:
            engine.speculator = draw_speculator(self._draft_rng, scheduler, self._clock, self._requests)
        return engine

    def _runner(self, cache: FakeCache) -> FakeRunner:
        faults, rng = self._faults, self._rng

        def fails() -> bool:
            return not self._is_calm and rng.random() < faults.step_failure_probability

        return FakeRunner(cache, step_s=lambda: rng.uniform(faults.step_min_s, faults.step_max_s), fails=fails)

    async def _make_trouble(self) -> None:
        faults = self._faults
        troubles = {
            self._crash: faults.crash_weight,
            self._part: faults.partition_weight,
            self._drain: faults.drain_weight,
            self._upgrade: faults.upgrade_weight,
        }
        while any(troubles.values()):
            await asyncio.sleep(self._rng.expovariate(1 / faults.interval_mean_s))
            trouble = self._rng.choices(list(troubles), list(troubles.values()))[0]
            repair = asyncio.create_task(trouble())
            self._repairs.add(repair)
            repair.add_done_callback(self._repairs.discard)

    async def _end_trouble(self, chaos: "asyncio.Task[None]") -> None:
        chaos.cancel()
        await asyncio.wait({chaos})
        if not chaos.cancelled():
            chaos.result()
        self._network.calm()
        for repair in list(self._repairs):
            await repair
        self._is_calm = True

    async def _crash(self) -> None:
        host = self._pick((*PREFILL_ADDRESSES, *DECODE_ADDRESSES))
        if host is not None:
            host.crash()
            self._counts["crashes"] += 1
            await host.gone()
            await self._replace(host)

    async def _part(self) -> None:
        """One link is cut, and heals."""
        ends = self._rng.sample(("client", *PREFILL_ADDRESSES, *DECODE_ADDRESSES), 2)
        self._counts["partitions"] += 1
        self._network.partitions.add(frozenset(ends))
        await asyncio.sleep(self._rng.uniform(0, self._faults.partition_max_s))
        self._network.partitions.discard(frozenset(ends))

    async def _drain(self) -> None:
        """A host drains for a bounded time, then stops without waiting, as k3svc.rpc.server does."""
        host = self._pick((*PREFILL_ADDRESSES, *DECODE_ADDRESSES))
        if host is None:
            return
        host.is_leaving = True
        host.engine.drain()
        await asyncio.wait({host.loop_task}, timeout=DRAIN_S)
        self._counts["drained" if host.loop_task.done() else "drained late"] += 1
        host.loop_task.cancel()
        await asyncio.wait({host.loop_task})
        for stream in host.streams:
            if not stream.is_ended:
                raise Broken(f"{stream.request_id} lives on after the step loop of {host.address}")
        if host.is_alive:
            host.crash()
        await host.gone()
        await self._replace(host)

    async def _upgrade(self) -> None:
        """A prefill service is replaced by one of another model at the same address, for a while."""
        host = self._pick(PREFILL_ADDRESSES)
        if host is None:
            return
        self._counts["upgrades"] += 1
        host.crash()
        await host.gone()
        self._start(host.address, replace(FINGERPRINT, model="another"))
        other = self._network.hosts[host.address]
        other.is_leaving = True
        await asyncio.sleep(self._rng.uniform(0, self._faults.partition_max_s))
        other.crash()
        await other.gone()
        await self._replace(other)

    def _pick(self, addresses: tuple[str, ...]) -> Host | None:
        """A host that nothing happens to yet."""
        address = self._rng.choice(addresses)
        host = self._network.hosts.get(address)
        return host if host is not None and host.is_alive and not host.is_leaving else None

    async def _replace(self, host: Host) -> None:
        """A new incarnation, at any free address of its kind; all memory is lost."""
        await asyncio.sleep(self._rng.uniform(0, self._faults.restart_delay_max_s))
        if self._network.hosts[host.address] is host:
            del self._network.hosts[host.address]
        kind = PREFILL_ADDRESSES if host.address in PREFILL_ADDRESSES else DECODE_ADDRESSES
        self._start(self._rng.choice([address for address in kind if address not in self._network.hosts]))

    async def _wind_up(self) -> None:
        """All requests have ended: nothing may be held, and drained engines stop by themselves."""
        await asyncio.sleep(2 * LEASE_S + 1.0)
        hosts = list(self._network.hosts.values())
        for host in hosts:
            role = "decode" if host.address in DECODE_ADDRESSES else "prefill"
            load = host.engine.load()
            held = (load.running, load.waiting, load.in_transfer, len(host.streams))
            if any(held) or (load.free_pages, load.free_slots) != (load.total_pages, load.total_slots):
                raise Broken(f"{host.address} holds something at the end: {load}")
            speculator = host.engine.speculator if isinstance(host.engine, DecodeEngine) else None
            if speculator is not None:
                if speculator.num_followed:
                    raise Broken(f"{speculator.num_followed} samples are followed at the end")
                self._counts["drafts accepted"] += speculator.total.accepted
                self._counts["drafts rejected"] += speculator.total.proposed - speculator.total.accepted
                self._counts["drafts salvaged"] += speculator.total.salvaged
            self._counts["prefix hits"] += load.prefix_hit_tokens
            self._counts["prefix evictions"] += load.prefix_evicted_pages + load.prefix_evicted_snapshots
            if isinstance(host.engine, PrefillEngine):
                _check_flush(host.engine)
            for outcome, count in load.outcomes.items():
                self._counts[f"{role} {outcome}"] += count
            host.is_leaving = True
            host.engine.drain()
        for host in hosts:
            await asyncio.wait_for(host.loop_task, 10.0)
            host.crash()
            await host.gone()


def _check_flush(engine: PrefillEngine) -> None:
    """Nothing is left of a cache that nobody uses."""
    scheduler = engine.scheduler
    engine.flush_cache()
    scheduler.check()
    if scheduler.pages.num_free != scheduler.pages.num_pages:
        raise Broken(f"{scheduler.pages} after a flush")
    if scheduler.cache is not None and scheduler.cache.slots.num_free != scheduler.cache.slots.num_slots:
        raise Broken(f"{scheduler.cache.slots} after a flush")


def run_seed(seed: int, tokenizer: Tokenizer, *, num_requests: int = 14) -> Outcome:
    """Runs one seed. Raises Broken, or what the engines raised."""
    loop = VirtualLoop(random.Random(~seed))

    async def main() -> Outcome:
        world = SimWorld(seed, tokenizer, num_requests=num_requests)
        loop.after_turn = world.check
        return await world.run()

    return loop.run(main())
