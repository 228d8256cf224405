#!/usr/bin/env python3
"""Runs docker-compose.yml on the Docker engine of this machine, and checks what docs/docker.md promises.

    .venv/bin/python scripts/check_compose.py [--no-build] [--only STEP ...]

Builds the image; starts prefill, decode, draft and the gateway; compares greedy tokens with golden.json of k3-nano;
asks the gateway's OpenAI API; kills the main process of each container with SIGKILL and times its way back; starts a
second decode service by profile and by --scale; repeats the most of it with mutual TLS; and looks that `down` leaves
nothing. Prints a table; the exit code is 0 when every line holds. The project has a name and ports of its own, so that
a stack that runs already is left alone. `--only` takes some of: stack, scale, tls, monitoring.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3svc.client import Client
from k3svc.errors import K3svcError
from k3svc.rpc.credentials import CallerCredentials

ROOT = Path(__file__).resolve().parents[1]
PROJECT = f"k3svc-check-{os.getpid()}"
BACK_S = 30.0
"""Longest time between the death of a main process and its container being healthy again."""
START_S = 300.0
ROLES = ("prefill", "decode", "draft")
UID = "10001"
STEPS = ("stack", "scale", "tls", "monitoring")


class CheckError(Exception):
    """What a check expected and what it found."""


class Table:
    """Lines of what was checked, printed as they come."""

    def __init__(self) -> None:
        self.failed = 0

    def line(self, what: str, verdict: str, note: str) -> None:
        print(f"{what:<58} {verdict:<8} {note}", flush=True)

    @contextmanager
    def check(self, what: str) -> Iterator[list[str]]:
        """One line: what the block adds to the list it is given is the note."""
        notes: list[str] = []
        begin = time.monotonic()
        try:
            yield notes
        except (CheckError, K3svcError, OSError, subprocess.SubprocessError) as error:
            self.failed += 1
            self.line(what, "FAILED", " ".join(str(error).split())[:400])
        else:
            self.line(what, "ok", ", ".join(notes) or f"{time.monotonic() - begin:.1f} s")


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckError(f"{' '.join(command)}: exit code {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout.strip()


def compose_command() -> tuple[str, ...]:
    """Compose v2 where it is, else the classic program."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]):
            done = subprocess.run([*command, "version"], capture_output=True, check=False)
            if done.returncode == 0:
                return command
    sys.exit("neither `docker compose` nor `docker-compose` is here")


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(21_000, 29_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as held:
                    held.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise CheckError("no free ports")


class Stack:
    """The containers of one start of the compose files, from `up` to `down`."""

    def __init__(self, *, files: tuple[str, ...] = ("docker-compose.yml",), environment: dict[str, str]) -> None:
        self.compose = [*compose_command(), "-p", PROJECT, *(part for file in files for part in ("-f", file))]
        self.environment = environment

    def run(self, *arguments: str) -> str:
        return run(*self.compose, *arguments, environment=self.environment)

    def up(self, *services: str, profiles: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> None:
        chosen = [part for profile in profiles for part in ("--profile", profile)]
        self.run(*chosen, "up", "--detach", *options, *services)

    def containers(self, service: str = "") -> list[str]:
        filters = ["--filter", f"label=com.docker.compose.project={PROJECT}"]
        if service:
            filters += ["--filter", f"label=com.docker.compose.service={service}"]
        return run("docker", "ps", "--all", "--quiet", *filters).split()

    def inspect(self, service: str) -> dict[str, Any]:
        (container,) = self.containers(service)
        described: dict[str, Any] = json.loads(run("docker", "inspect", container))[0]
        return described

    def wait_healthy(self, *services: str, since: str = "", seconds: float = START_S) -> None:
        """Until the containers of each service are healthy; with `since`, in a life that began later than that."""
        deadline = time.monotonic() + seconds
        waiting = list(services)
        while waiting:
            for service in list(waiting):
                states = [json.loads(run("docker", "inspect", one))[0]["State"] for one in self.containers(service)]
                healthy = [s["Health"]["Status"] == "healthy" and s["StartedAt"] > since for s in states]
                if healthy and all(healthy):
                    waiting.remove(service)
            if time.monotonic() > deadline:
                raise CheckError(
                    f"not healthy after {seconds:.0f} s: {', '.join(waiting)}; {self.last_words(waiting[0])}"
                )
            time.sleep(0.2)

    def last_words(self, service: str) -> str:
        containers = self.containers(service)
        return run("docker", "logs", "--tail", "5", containers[0]) if containers else "it has no container"

    def down(self) -> None:
        """Raises CheckError when containers, networks or volumes are left."""
        # All profiles, since those of the classic program are left running otherwise.
        profiles = [part for name in ("gateway", "monitoring", "two-decodes") for part in ("--profile", name)]
        self.run(*profiles, "down")
        mine = f"label=com.docker.compose.project={PROJECT}"
        left = {
            "containers": self.containers(),
            "networks": run("docker", "network", "ls", "--quiet", "--filter", mine).split(),
            "volumes": run("docker", "volume", "ls", "--quiet", "--filter", mine).split(),
        }
        if any(left.values()):
            raise CheckError(f"down left {left}")


def kill_main_process(stack: Stack, service: str) -> str:
    """SIGKILL from the host to the first process of the container; when its life had begun. `docker kill` would not do:
    the engine takes it for the user's wish, and does not start the container again.
    """
    described = stack.inspect(service)
    began: str = described["State"]["StartedAt"]
    pid = str(described["State"]["Pid"])
    # Not every user may kill a process of the engine, but every container that sees the host's processes can.
    run(
        "docker", "run", "--rm", "--pid=host", "--user=0", "--entrypoint=sh", described["Image"], "-c", f"kill -9 {pid}"
    )
    return began


def golden_prompts() -> list[tuple[list[int], list[int]]]:
    read = json.loads((ROOT / "models" / "k3-nano" / "golden.json").read_text())["prompts"]
    return [(prompt["ids"], prompt["continuation_ids"]) for prompt in read]


def compare_golden(address: str, credentials: CallerCredentials | None = None) -> str:
    """Greedy tokens of every golden prompt; how many there were."""
    count = 0
    with Client(address, credentials=credentials) as client:
        for tokens, expected in golden_prompts():
            got = client.generate(tokens=tokens, max_tokens=len(expected), temperature=0.0, ignore_eos=True).result()
            if list(got.token_ids) != expected:
                raise CheckError(f"{address}: tokens differ from golden.json: {got.token_ids} against {expected}")
            count += len(expected)
    return f"{count} tokens"


def metric(container: str, name: str) -> float:
    """Of a prefill container, by its own endpoint; `name` with its labels."""
    script = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    text = run("docker", "exec", container, "python", "-c", script)
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def open_ai_text(port: int) -> str:
    """The gateway continues `import os`, as the native client does."""
    body = {"model": "k3-nano", "prompt": "import os\n", "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        text: str = json.loads(answer.read())["choices"][0]["text"]
    return text


def healthy_workers(port: int) -> int:
    return sum(worker["is_healthy"] for worker in ask(f"http://127.0.0.1:{port}/workers")["workers"])


def until(what: str, attempt: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if attempt():
                return
        except (OSError, ValueError, KeyError, IndexError) as error:
            last = error
        time.sleep(0.2)
    raise CheckError(f"{what}: not within {seconds:.0f} s ({last})")


def check_hardening(stack: Stack, service: str) -> None:
    described = stack.inspect(service)
    host = described["HostConfig"]
    found = {
        "user": described["Config"]["User"],
        "read-only root": host["ReadonlyRootfs"],
        "dropped capabilities": host["CapDrop"],
        "no new privileges": any(option.startswith("no-new-privileges") for option in host["SecurityOpt"] or ()),
    }
    user = stack.environment.get("K3SVC_UID", UID)
    expected = {"user": user, "read-only root": True, "dropped capabilities": ["ALL"], "no new privileges": True}
    if found != expected:
        raise CheckError(f"{service}: {found}, expected {expected}")
    if not (host["Memory"] and host["NanoCpus"] and host["PidsLimit"]):
        raise CheckError(f"{service} has no bound on memory, processors or processes")
    script = (
        "id -u; touch /written 2>/dev/null && echo writes to its root; touch /tmp/written || echo cannot write to /tmp"
    )
    said = run("docker", "exec", described["Id"], "sh", "-c", f"{script}; command -v g++ || true").splitlines()
    if said != [user]:
        raise CheckError(f"{service}: {said}")


def check_device(address: str) -> str:
    with Client(address) as client:
        device = client.model_info().device
    if device != "cpu":
        raise CheckError(f"{address} computes with {device}, not with the kernels of cpu")
    return f"model.device = {device}"


def time_recovery(stack: Stack, service: str, works: Callable[[], object]) -> str:
    """Kills the main process; how long until the container is healthy, and until what it does is done again."""
    began = kill_main_process(stack, service)
    begin = time.monotonic()
    stack.wait_healthy(service, since=began, seconds=2 * BACK_S)
    healthy = time.monotonic() - begin
    works()
    if healthy > BACK_S:
        raise CheckError(f"healthy again after {healthy:.1f} s, more than {BACK_S:.0f} s")
    return f"healthy again after {healthy:.1f} s"


def check_stack(table: Table) -> None:
    first = free_ports(3)
    ports = {"K3SVC_PORT": str(first), "K3SVC_PORT_2": str(first + 1), "K3SVC_GATEWAY_PORT": str(first + 2)}
    stack = Stack(environment=ports)
    address, second = f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"
    try:
        with table.check("prefill, decode and draft: from up to healthy"):
            stack.up()
            stack.wait_healthy(*ROLES)
        with table.check("greedy tokens are those of golden.json") as notes:
            notes.append(compare_golden(address))
        with table.check("hand-offs go by the state port, all but the first") as notes:
            (prefill,) = stack.containers("prefill")
            ways = {way: metric(prefill, f'k3svc_handoffs_total{{way="{way}"}}') for way in ("state_port", "stream")}
            if ways["state_port"] < 1 or ways["stream"] > 2:
                raise CheckError(f"they went by {ways}")
            notes += [f"{way} {count:.0f}" for way, count in ways.items()]
        with table.check("decode computes with the cpu backend") as notes:
            notes.append(check_device(address))
        with table.check("profile gateway: from up to healthy"):
            stack.up(profiles=("gateway",))
            stack.wait_healthy("gateway")
        with Client(address) as client, table.check("a completion through the gateway is that of the native client"):
            native = client.generate("import os\n", max_tokens=16, temperature=0.0).result().text
            if (through := open_ai_text(first + 2)) != native:
                raise CheckError(f"{through!r} against {native!r}")
        for service in (*ROLES, "gateway"):
            with table.check(f"{service}: not root, read-only root, bounded") as notes:
                check_hardening(stack, service)
                notes.append("no compiler, no capabilities")
        works: dict[str, Callable[[], object]] = {
            **dict.fromkeys(ROLES, lambda: compare_golden(address)),
            "gateway": lambda: open_ai_text(first + 2),
        }
        for service, work in works.items():
            with table.check(f"SIGKILL of the main process of {service}") as notes:
                notes.append(time_recovery(stack, service, work))
        with table.check("the gateway reaches decode again after that") as notes:
            until("an answer of the gateway", lambda: bool(open_ai_text(first + 2)), BACK_S)
        with table.check("profile two-decodes: the second one gives the same tokens") as notes:
            stack.up("decode-2", profiles=("two-decodes",))
            stack.wait_healthy("decode-2")
            notes.append(compare_golden(second))
        with table.check("the gateway has taken the second one in"):
            until("two healthy workers", lambda: healthy_workers(first + 2) == 2, BACK_S)
    finally:
        with table.check("down leaves no container, network or volume"):
            stack.down()


def check_scale(table: Table) -> None:
    first = free_ports(2)
    stack = Stack(environment={"K3SVC_PORT": f"{first}-{first + 1}"})
    try:
        with table.check("up --scale prefill=2 --scale decode=2") as notes:
            stack.up("prefill", "decode", options=("--scale", "prefill=2", "--scale", "decode=2"))
            stack.wait_healthy("prefill", "decode")
            published = [run("docker", "port", one, "50051").splitlines()[0] for one in stack.containers("decode")]
            if len(set(published)) != 2:
                raise CheckError(f"decode is reached at {published}")
            notes += [f"{address} {compare_golden(address)}" for address in sorted(published)]
        with table.check("both prefill services compute prompts") as notes:
            with Client(published[0]) as client:
                # Their beginnings decide where they go: so many differ that not all go to one.
                for first_token in range(24):
                    tokens = [(first_token * 97 + position) % 4000 for position in range(80)]
                    client.generate(tokens=tokens, max_tokens=1).result()
            prompts = [metric(container, "k3svc_prompt_tokens_total") for container in stack.containers("prefill")]
            if not all(prompts):
                raise CheckError(f"prompt tokens of each: {prompts}")
            notes.append(" and ".join(f"{count:.0f}" for count in prompts) + " tokens")
    finally:
        with table.check("down leaves no container, network or volume"):
            stack.down()


def check_tls(table: Table) -> None:
    port = free_ports(1)
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path(folder) / "certificates"
        run("scripts/make-certificates", str(certificates))
        owner = str(os.getuid())
        if owner == "0":
            # The containers shall not run as root, whoever calls this.
            owner = UID
            for path in (Path(folder), certificates, *certificates.iterdir()):
                os.chown(path, int(owner), -1)
        stack = Stack(
            files=("docker-compose.yml", "docker-compose.tls.yml"),
            environment={"K3SVC_PORT": str(port), "K3SVC_UID": owner, "K3SVC_CERTIFICATES": str(certificates)},
        )
        shown = ("--tls-ca", "ca.pem", "--tls-cert", "client.pem", "--tls-key", "client.key")
        options = [str(certificates / part) if not part.startswith("--") else part for part in shown]
        command = str(Path(sys.executable).parent / "k3svc")
        call = ("generate", "--endpoint", address, "--tokens", "780,727,10", "--temperature", "0", "--max-tokens", "8")
        credentials = CallerCredentials(
            ca=certificates / "ca.pem", certificate=certificates / "client.pem", key=certificates / "client.key"
        )
        try:
            with table.check("docker-compose.tls.yml: from up to healthy"):
                stack.up()
                stack.wait_healthy(*ROLES)
            with table.check("mutual TLS: tokens for k3svc generate with a certificate") as notes:
                notes.append(f"{len(json.loads(run(command, *options, *call, '--json'))['token_ids'])} tokens")
                notes.append(compare_golden(address, credentials))
            with table.check("none for a caller without a certificate") as notes:
                if not answers(address, certificates, shows_own=True):
                    raise CheckError("no answer to a caller with a certificate")
                if answers(address, certificates, shows_own=False):
                    raise CheckError("an answer to a caller without a certificate")
                notes.append("refused")
            with table.check("mutual TLS: not root, read-only root, bounded"):
                for service in ROLES:
                    check_hardening(stack, service)
            with table.check("mutual TLS: SIGKILL of the main process of decode") as notes:
                notes.append(time_recovery(stack, "decode", lambda: compare_golden(address, credentials)))
        finally:
            with table.check("down leaves no container, network or volume"):
                stack.down()


def answers(address: str, certificates: Path, *, shows_own: bool) -> bool:
    """Whether the service speaks HTTP/2 to a caller, who shows a certificate or none."""
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    context.set_alpn_protocols(["h2"])
    if shows_own:
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            # The preface and empty settings.
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            return secured.recv(1) != b""
    except (ssl.SSLError, ConnectionError):
        return False


def check_monitoring(table: Table) -> None:
    image = os.environ.get("PROMETHEUS_IMAGE", "prom/prometheus:v3.5.0")
    graphs = os.environ.get("GRAFANA_IMAGE", "grafana/grafana:12.1.1")
    services = [name for name, tag in (("prometheus", image), ("grafana", graphs)) if obtainable(tag)]
    for name, tag in (("prometheus", image), ("grafana", graphs)):
        if name not in services:
            table.line(f"profile monitoring: {name}", "left out", f"the image {tag} cannot be had here")
    if not services:
        return
    first = free_ports(3)
    ports = {"K3SVC_PORT": str(first), "PROMETHEUS_PORT": str(first + 1), "GRAFANA_PORT": str(first + 2)}
    stack = Stack(environment=ports)
    try:
        with table.check("profile monitoring: Prometheus scrapes all roles") as notes:
            stack.up(*ROLES, *services, profiles=("monitoring",))
            until("targets", lambda: scraped(first + 1) >= set(ROLES), START_S)
            notes.append(", ".join(sorted(scraped(first + 1))))
        with table.check("profile monitoring: the rules are loaded") as notes:
            groups = ask(f"http://127.0.0.1:{first + 1}/api/v1/rules")["data"]["groups"]
            notes.append(f"{sum(len(group['rules']) for group in groups)} rules")
        if "grafana" in services:
            with table.check("profile monitoring: Grafana has the dashboard"):
                url = f"http://127.0.0.1:{first + 2}/api/search?query=k3svc"
                until("the dashboard", lambda: bool(ask(url)), START_S)
    finally:
        with table.check("down leaves no container, network or volume"):
            stack.down()


def obtainable(image: str) -> bool:
    for command in (("docker", "image", "inspect", image), ("docker", "pull", "--quiet", image)):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return True
    return False


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  an address of ours
        return json.loads(answer.read())


def scraped(port: int) -> set[str]:
    """Jobs of which Prometheus reaches a target."""
    targets = ask(f"http://127.0.0.1:{port}/api/v1/targets")["data"]["activeTargets"]
    return {target["labels"]["job"] for target in targets if target["health"] == "up"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="some of the steps")
    chosen = parser.parse_args()
    # So that a run that is ended takes its containers along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    table = Table()
    version = run("docker", "version", "--format", "{{.Server.Version}}")
    print(f"engine {version}, {run(*compose_command(), 'version', '--short')}, {os.cpu_count()} processors", flush=True)
    if not chosen.no_build:
        with table.check("the image is built") as notes:
            begin = time.monotonic()
            run("docker", "build", "--quiet", "--network=host", "--tag", "k3svc:latest", ".")
            size = int(run("docker", "image", "inspect", "--format", "{{.Size}}", "k3svc:latest"))
            notes.append(f"{time.monotonic() - begin:.0f} s, {size / 1e6:.0f} MB")
    steps = {"stack": check_stack, "scale": check_scale, "tls": check_tls, "monitoring": check_monitoring}
    for name in STEPS:
        if name in chosen.only:
            steps[name](table)
    Stack(environment={}).run("down", "--rmi", "local")
    print(f"{table.failed} failed" if table.failed else "all of it holds")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
