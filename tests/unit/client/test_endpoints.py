import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from k3svc.client.endpoints import Balance, Endpoints, Route
from k3svc.core.targets import Report
from k3svc.errors import InvalidRequest, ResourceExhausted, Unavailable
from k3svc.rpc.discovery import Address

FAST = Balance(refresh_s=0.005, shuffle=False)
A, B, C = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"


class Services:
    """What endpoints report, and that they were asked."""

    def __init__(self) -> None:
        self.reports: dict[str, Report | None] = dict.fromkeys((A, B, C), Report(serving=True))
        self.asked: Counter[str] = Counter()
        self.forgotten: list[str] = []

    def endpoints(self, names: Sequence[str] = (A, B), balance: Balance = FAST) -> Endpoints:
        return Endpoints(names, balance, self.ask, self.forget)

    async def ask(self, address: Address) -> Report | None:
        self.asked[address.target] += 1
        return self.reports[address.target]

    async def forget(self, endpoint: str) -> None:
        self.forgotten.append(endpoint)

    async def look(self, endpoint: str = A) -> None:
        """Returns when the endpoint has been asked, and the answer taken, after this call."""
        seen = self.asked[endpoint]
        while self.asked[endpoint] < seen + 2:
            await asyncio.sleep(0.001)


def choose(endpoints: Endpoints, tried: Sequence[str] = ()) -> str:
    found = endpoints.choose(dict.fromkeys(tried, 1e9))
    assert found is not None
    assert found[1] == 0.0
    return found[0]


def states(endpoints: Endpoints) -> dict[str, str]:
    return {state.endpoint: state.state for state in endpoints.states()}


async def test_requests_follow_free_room():
    services = Services()
    services.reports |= {A: Report(serving=True, free_share=0.25), B: Report(serving=True, free_share=0.75)}
    endpoints = services.endpoints()
    assert [choose(endpoints) for _ in range(4)] == [A, B, A, B], "before the first report they count the same"
    assert states(endpoints) == {A: "unknown", B: "unknown"}
    await services.look()
    chosen = Counter(choose(endpoints) for _ in range(100))
    assert abs(chosen[B] - 75) <= 1
    assert states(endpoints) == {A: "serving", B: "serving"}
    await endpoints.close()


async def test_what_was_sent_since_the_report_counts():
    services = Services()
    services.reports |= {name: Report(serving=True, free_share=1.0, total_slots=10) for name in (A, B)}
    endpoints = services.endpoints(balance=Balance(refresh_s=60.0, shuffle=False))
    choose(endpoints)
    while "unknown" in states(endpoints).values():
        await asyncio.sleep(0.001)
    for _ in range(9):
        endpoints.began(A)
    assert abs(Counter(choose(endpoints) for _ in range(22))[B] - 20) <= 1
    assert [(s.chosen, s.running) for s in endpoints.states()] == [(9, 9), (0, 0)]
    endpoints.ended(A, None)
    assert [(s.chosen, s.running) for s in endpoints.states()] == [(9, 8), (0, 0)]
    await endpoints.close()


@pytest.mark.parametrize(("report", "state"), [(None, "down"), (Report(serving=False), "draining")])
async def test_who_drains_or_is_down_is_left_out_until_it_serves(report: Report | None, state: str):
    services = Services()
    services.reports[A] = report
    endpoints = services.endpoints()
    choose(endpoints)
    await services.look()
    assert states(endpoints) == {A: state, B: "serving"}
    assert {choose(endpoints) for _ in range(10)} == {B}
    assert choose(endpoints, [B]) == A, "better than nobody"
    services.reports[A] = Report(serving=True)
    await services.look()
    assert {choose(endpoints) for _ in range(10)} == {A, B}
    await endpoints.close()


async def test_failed_calls_are_news_to_all_requests():
    services = Services()
    endpoints = services.endpoints(balance=Balance(refresh_s=0.0, shuffle=False))
    endpoints.began(A)
    endpoints.ended(A, Unavailable("the connection broke"))
    assert {choose(endpoints) for _ in range(4)} == {B}
    endpoints.began(B)
    endpoints.ended(B, ResourceExhausted("the queue is full", retry_after_s=5.0))
    assert states(endpoints) == {A: "down", B: "full"}
    assert choose(endpoints) == B, "a full one may have room again, a dead one has not"
    assert choose(endpoints, [B]) == A
    assert not services.asked, "refresh_s = 0: nobody is asked"


async def test_a_request_tries_each_before_it_repeats_one():
    services = Services()
    route = Route(services.endpoints((A, B, C), Balance(refresh_s=0.0, shuffle=False)))
    tried = []
    for until in (30.0, 10.0, 20.0):
        endpoint, not_before = await route.next()
        assert not_before == 0.0
        tried.append(endpoint)
        route.put_off(endpoint, until)
    assert sorted(tried) == [A, B, C]
    assert await route.next() == (tried[1], 10.0)
    route.put_off(tried[1], 40.0)
    assert await route.next() == (tried[2], 20.0)


async def test_a_file_adds_and_removes_endpoints_while_calls_run(tmp_path: Path):
    services = Services()
    path = tmp_path / "decode"
    path.write_text(f"{A}\n{B}\n")
    endpoints = services.endpoints([f"file:{path}"])
    assert endpoints.names == (A, B)
    choose(endpoints)
    endpoints.began(A)
    endpoints.began(B)
    path.write_text(f"{B}\n{C}\n")
    await services.look(C)
    assert endpoints.names == (B, C)
    assert {choose(endpoints) for _ in range(10)} == {B, C}
    assert not services.forgotten, "a call runs on it"
    assert [s.running for s in endpoints.states()] == [1, 0]
    endpoints.ended(A, None)
    await services.look(C)
    assert services.forgotten == [A]
    path.write_text("")
    while endpoints.names:
        await asyncio.sleep(0.001)
    with pytest.raises(Unavailable, match="there is no service at file:") as caught:
        await Route(endpoints).next()
    assert caught.value.reason == "NO_ENDPOINT"
    path.write_text(A)
    assert (await Route(endpoints).next())[0] == A
    await endpoints.close()


async def test_calls_to_endpoints_that_have_left_are_still_told_of(tmp_path: Path):
    services = Services()
    path = tmp_path / "decode"
    path.write_text(f"{A}\n{B}\n")
    endpoints = services.endpoints([f"file:{path}"])
    for _ in range(2):
        choose(endpoints)
        endpoints.began(A)
        endpoints.ended(A, None)
        path.write_text(B)
        while A not in services.forgotten:
            await asyncio.sleep(0.001)
        services.forgotten.clear()
        path.write_text(f"{A}\n{B}\n")
        await endpoints.find()
    assert endpoints.calls() == {A: 2, B: 0}
    await endpoints.close()


async def test_one_that_comes_back_while_others_are_forgotten_stays(tmp_path: Path):
    services = Services()
    path, may_forget = tmp_path / "decode", asyncio.Event()

    async def forget(endpoint: str) -> None:
        services.forgotten.append(endpoint)
        await may_forget.wait()

    path.write_text(f"{A}\n{B}\n{C}\n")
    endpoints = Endpoints([f"file:{path}"], FAST, services.ask, forget)
    choose(endpoints)
    path.write_text(C)
    while not services.forgotten:
        await asyncio.sleep(0.001)
    path.write_text(f"{A}\n{B}\n{C}\n")
    assert set(await endpoints.find()) == {A, B, C}
    may_forget.set()
    await services.look(B)
    assert services.forgotten == [A]
    await endpoints.close()


async def test_an_address_that_is_named_twice_counts_once():
    services = Services()
    endpoints = services.endpoints([A, f"dns:///{A}", B])
    await endpoints.find()
    choose(endpoints)
    endpoints.began(A)
    await services.look(A)
    assert [(s.endpoint, s.chosen, s.running) for s in endpoints.states()] == [(A, 1, 1), (B, 0, 0)]
    await endpoints.close()


async def test_looking_ends_when_nothing_is_sent_and_begins_again():
    services = Services()
    endpoints = services.endpoints()
    choose(endpoints)
    endpoints.began(A)
    looking = endpoints._refreshing
    assert looking is not None
    await services.look()
    for _ in range(4):
        await services.look()
    assert not looking.done(), "a call runs"
    endpoints.ended(A, None)
    await looking
    asked = services.asked[A]
    choose(endpoints)
    await services.look()
    assert services.asked[A] > asked
    await endpoints.close()


async def test_a_single_endpoint_is_never_asked():
    services = Services()
    endpoints = services.endpoints([A])
    assert [choose(endpoints) for _ in range(3)] == [A, A, A]
    assert endpoints._refreshing is None


def test_many_clients_begin_with_different_endpoints():
    services = Services()
    balance = Balance(refresh_s=0.0)
    first = Counter(choose(services.endpoints((A, B), balance)) for _ in range(200))
    # 2^-200 if the draw is fair.
    assert set(first) == {A, B}


def test_bad_names_are_refused():
    with pytest.raises(InvalidRequest, match="host:port"):
        Services().endpoints(["xds:///decode"])


@pytest.mark.parametrize("name", ["127.0.0.1", "http://127.0.0.1:50051", "dns:///decode", ""])
async def test_a_wrong_address_is_named(name: str):
    with pytest.raises(InvalidRequest) as caught:
        Services().endpoints([A, name])
    allowed = "host:port, dns:///HOST:PORT or file:PATH, such as 127.0.0.1:50051"
    assert str(caught.value) == f"endpoint: got {name!r}; allowed: {allowed}"
