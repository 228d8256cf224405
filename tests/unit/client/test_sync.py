"""The blocking client, against the fake in a process-wide loop of its own thread, as an application would use it."""

import threading
from collections.abc import Iterator

import pytest

from k3svc.client import Client, Delta, Finished, Started
from k3svc.client.sync import _LOOP
from k3svc.errors import Cancelled, InvalidRequest, Unavailable
from tests.unit.client.fake_decode import RunningFake, Step, running, text, tokens


@pytest.fixture
def fake() -> Iterator[RunningFake]:
    """Runs on the clients' loop, since gRPC wants one loop a process."""
    _LOOP.acquire()
    context = running()
    yield _LOOP.run(context.__aenter__())
    _LOOP.run(context.__aexit__(None, None, None))
    _LOOP.release()


def test_events_and_result(fake: RunningFake):
    with Client(fake.endpoint) as client:
        events = list(client.generate(tokens=[1, 2, 3], max_tokens=4))
        result = client.generate(tokens=[1, 2, 3], max_tokens=4).result()
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == text(tokens(3, n=4)) == result.text


def test_admin_calls(fake: RunningFake):
    with Client(fake.endpoint) as client:
        client.wait_ready(60.0)
        assert client.health() == "SERVING"
        assert client.model_info().role == "decode"
        assert client.load().free_pages == 7
        assert client.abort("nobody") is False


def test_errors_are_those_of_k3svc(fake: RunningFake):
    with Client(fake.endpoint) as client:
        with pytest.raises(InvalidRequest, match="tokens"):
            client.generate(tokens=[-1])
        fake.service.script.append(Step(error=InvalidRequest("sampling.top_p", 2.0, "a number in (0, 1]")))
        with pytest.raises(InvalidRequest, match=r"sampling.top_p: got 2.0; allowed: a number in \(0, 1\]"):
            client.generate("a", top_p=2.0).result()


def test_closing_a_generation_ends_the_request(fake: RunningFake):
    fake.service.script.append(Step(hang_after=1))
    with Client(fake.endpoint) as client:
        with client.generate(tokens=[1]) as generation:
            assert isinstance(next(generation), Started)
            assert isinstance(next(generation), Delta)
        _LOOP.run(fake.service.ended.wait())
        with pytest.raises(Cancelled):
            generation.result()


def test_closing_the_client_ends_requests_of_other_threads(fake: RunningFake):
    fake.service.script.append(Step(hang_after=1))
    client = Client(fake.endpoint)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            client.generate(tokens=[1]).result()
        except Cancelled as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    _LOOP.run(fake.service.reached.wait())
    client.close()
    reader.join()
    assert [type(error) for error in caught] == [Cancelled]
    client.close()
    with pytest.raises(Cancelled, match="closed"):
        client.load()


def test_threads_share_one_loop(fake: RunningFake):
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "k3svc-client"]

    with Client(fake.endpoint) as one, Client(fake.endpoint) as two:
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda c=c: results.append(c.generate(tokens=[1]).result().text))
            for c in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [text(tokens(1))] * 2
        assert len(names()) == 1


def test_the_loop_ends_with_its_last_client_and_starts_again():
    for _ in range(2):
        with Client("127.0.0.1:1") as client:
            with pytest.raises(Unavailable):
                client.load()
            assert any(thread.name == "k3svc-client" for thread in threading.enumerate())
        assert not any(thread.name == "k3svc-client" for thread in threading.enumerate())
