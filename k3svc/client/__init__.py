"""Client of k3svc: `AsyncClient`, and `Client` for code without an event loop.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("import os", max_tokens=32, temperature=0.0):
            ...
        print(client.generate(messages=[{"role": "user", "content": "What does os.path.join do?"}]).result().text)

Errors are those of `k3svc.errors`.
"""

from k3svc.client.aio import AsyncClient
from k3svc.client.endpoints import Balance, EndpointState
from k3svc.client.events import (
    Completion,
    Delta,
    Event,
    Finished,
    ModelInfo,
    Sample,
    ServiceLoad,
    Started,
    TokenLogprobs,
)
from k3svc.client.generation import Generation
from k3svc.client.request import Options
from k3svc.client.retry import RetryPolicy
from k3svc.client.sync import Client, SyncGeneration
from k3svc.rpc.credentials import CallerCredentials

__all__ = [
    "AsyncClient",
    "Balance",
    "CallerCredentials",
    "Client",
    "Completion",
    "Delta",
    "EndpointState",
    "Event",
    "Finished",
    "Generation",
    "ModelInfo",
    "Options",
    "RetryPolicy",
    "Sample",
    "ServiceLoad",
    "Started",
    "SyncGeneration",
    "TokenLogprobs",
]
