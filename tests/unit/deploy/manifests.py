"""What must hold among the objects of a rendered chart. Each check gives one line for each breach it finds."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from k3svc.config import Config, load_config

Object = dict[str, Any]

POD_KINDS = ("Deployment", "Pod")


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [one for one in of_kind(objects, kind) if one["metadata"]["name"] == name]
    return found


def label(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


def pod_of(one: Object) -> tuple[Mapping[str, str], Object]:
    """Labels and spec of the pods that an object makes."""
    template = one["spec"]["template"] if one["kind"] == "Deployment" else one
    return template["metadata"]["labels"], template["spec"]


def pods(objects: list[Object]) -> Iterator[tuple[Object, Mapping[str, str], Object]]:
    for one in of_kind(objects, *POD_KINDS):
        yield (one, *pod_of(one))


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def container_ports(spec: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for one in spec["containers"] for port in one.get("ports", ())}


def role_configs(objects: list[Object]) -> dict[str, str]:
    """File name → TOML of the ConfigMap that the roles read."""
    (found,) = [one for one in of_kind(objects, "ConfigMap") if "decode.toml" in one["data"]]
    data: dict[str, str] = found["data"]
    return data


def selectors(objects: list[Object]) -> list[str]:
    """Every selector chooses pods of the chart."""
    chosen: list[tuple[str, Mapping[str, str]]] = []
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Service":
            chosen.append((label(one), spec["selector"]))
        elif one["kind"] in ("Deployment", "PodDisruptionBudget"):
            chosen.append((label(one), spec["selector"]["matchLabels"]))
        elif one["kind"] == "NetworkPolicy":
            peers = [peer for rule in spec["ingress"] for peer in rule["from"]]
            peers += [peer for rule in spec["egress"] for peer in rule.get("to", ())]
            # A peer of another namespace is somebody else's.
            own = [peer["podSelector"] for peer in peers if "podSelector" in peer and "namespaceSelector" not in peer]
            chosen += [(label(one), selector.get("matchLabels", {})) for selector in (spec["podSelector"], *own)]
    known = [labels for _, labels, _ in pods(objects)]
    found = [f"{who} selects nothing" for who, selector in chosen if not any(matches(selector, k) for k in known)]
    for one in of_kind(objects, "Deployment"):
        labels, spec = pod_of(one)
        spread = [constraint["labelSelector"]["matchLabels"] for constraint in spec["topologySpreadConstraints"]]
        own = [one["spec"]["selector"]["matchLabels"], *spread]
        found += [f"{label(one)} does not select its own pods" for selector in own if not matches(selector, labels)]
    return found


def ports(objects: list[Object]) -> list[str]:
    """Every port that is named is a port of the pods behind it."""
    found = []
    for one in of_kind(objects, "Service"):
        for _, labels, spec in pods(objects):
            if matches(one["spec"]["selector"], labels):
                wanted = {port["targetPort"] for port in one["spec"]["ports"]}
                found += [f"{label(one)}: no port {name}" for name in wanted - container_ports(spec).keys()]
    for one in of_kind(objects, "NetworkPolicy"):
        for _, labels, spec in pods(objects):
            if matches(one["spec"]["podSelector"]["matchLabels"], labels):
                wanted = {port["port"] for rule in one["spec"]["ingress"] for port in rule["ports"]}
                found += [f"{label(one)}: no port {name}" for name in wanted - container_ports(spec).keys()]
    for one, _, spec in pods(objects):
        offered = container_ports(spec)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            how = spec["containers"][0].get(probe, {})
            asked = how.get("grpc", {}).get("port") or how.get("httpGet", {}).get("port")
            if asked is not None and asked not in (*offered, *offered.values()):
                found.append(f"{label(one)}: {probe} asks no port of the container: {asked}")
    for one in of_kind(objects, "ServiceMonitor"):
        chosen = [
            service
            for service in of_kind(objects, "Service")
            if matches(one["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        ]
        offered_names = {port["name"] for service in chosen for port in service["spec"]["ports"]}
        found += [
            f"{label(one)}: no port {e['port']}" for e in one["spec"]["endpoints"] if e["port"] not in offered_names
        ]
    return found


def references(objects: list[Object], given: frozenset[str] = frozenset()) -> list[str]:
    """What objects name is in the chart, or among `given`: names of claims and Secrets that the user makes."""
    found = []
    present = {(one["kind"], one["metadata"]["name"]) for one in objects}

    def want(one: Object, kind: str, name: str) -> None:
        if (kind, name) not in present and name not in given:
            found.append(f"{label(one)}: there is no {kind} {name}")

    for one, _, spec in pods(objects):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for volume in volumes.values():
            if "configMap" in volume:
                want(one, "ConfigMap", volume["configMap"]["name"])
            if "secret" in volume:
                want(one, "Secret", volume["secret"]["secretName"])
            if "persistentVolumeClaim" in volume:
                want(one, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
        for secret in spec.get("imagePullSecrets", ()):
            want(one, "Secret", secret["name"])
        if "serviceAccountName" in spec:
            want(one, "ServiceAccount", spec["serviceAccountName"])
        for container in spec["containers"]:
            mounts = container["volumeMounts"]
            found += [f"{label(one)}: no volume {m['name']}" for m in mounts if m["name"] not in volumes]
            found += [
                f"{label(one)}: volume {name} is not used"
                for name in volumes
                if name not in {m["name"] for m in mounts}
            ]
            for mount in mounts:
                if "subPath" in mount and mount["subPath"] not in role_configs(objects):
                    found.append(f"{label(one)}: the ConfigMap has no {mount['subPath']}")
    for one in of_kind(objects, "HorizontalPodAutoscaler"):
        want(one, one["spec"]["scaleTargetRef"]["kind"], one["spec"]["scaleTargetRef"]["name"])
    for one in of_kind(objects, "RoleBinding"):
        want(one, one["roleRef"]["kind"], one["roleRef"]["name"])
        for subject in one["subjects"]:
            want(one, subject["kind"], subject["name"])
    return found


def hardening(objects: list[Object]) -> list[str]:
    """No pod runs as root, writes to its root file system, keeps a capability, or has a token that it does not need."""
    found = []
    for one, labels, spec in pods(objects):
        context = spec["securityContext"]
        held = {
            "runs as root": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
            "has no seccomp profile": context.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "has a token": spec.get("automountServiceAccountToken") is False
            or labels["app.kubernetes.io/component"] == "gateway",
        }
        for container in spec["containers"]:
            own = container["securityContext"]
            held["writes to its root"] = own.get("readOnlyRootFilesystem") is True
            held["may gain privileges"] = own.get("allowPrivilegeEscalation") is False
            held["keeps capabilities"] = own.get("capabilities") == {"drop": ["ALL"]}
            held["has no bound on memory"] = "memory" in container["resources"].get("limits", {})
        found += [f"{label(one)} {breach}" for breach, is_held in held.items() if not is_held]
    return found


def configurations(objects: list[Object], read: Mapping[str, Config]) -> list[str]:
    """What `read`, role → its configuration, says is what the pods, mounts and Services of the chart are."""
    found = []
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    for role, config in read.items():
        (one,) = [one for one, labels, _ in pods(objects) if labels["app.kubernetes.io/component"] == role]
        _, spec = pod_of(one)
        container = spec["containers"][0]
        if container["args"] != [f"services.{role}", "--config", f"/etc/k3svc/{role}.toml"]:
            found.append(f"{role}: {container['args']}")
        ports = {"grpc": config.server.port, "metrics": config.metrics.port}
        if role == "prefill":
            ports["state"] = config.transfer.state_port
        if container_ports(spec) != ports:
            found.append(f"{role}: the ports of the container are not those of its configuration")
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        tls, auth = config.tls, config.auth
        paths = (config.model.path, config.draft.path, tls.certificate, tls.key, tls.ca, tls.client_ca)
        found += [
            f"{role}: nothing is mounted at {path}"
            for path in (*paths, auth.keys, auth.token)
            if path and not any(path.startswith(f"{folder}/") for folder in mounted)
        ]
        called = [*config.decode.prefill, *([config.draft.endpoint] if config.draft.endpoint else [])]
        for address in called:
            host, _, port = address.removeprefix("dns:///").rpartition(":")
            offered = [offer["port"] for offer in services[host]["spec"]["ports"]] if host in services else []
            if int(port) not in offered:
                found.append(f"{role}: no Service offers {address}")
        before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        if spec["terminationGracePeriodSeconds"] < before + config.server.drain_s + 5:
            found.append(f"{role}: it is killed before it has drained")
    return found


def read_configurations(objects: list[Object], folder: Any) -> dict[str, Config]:
    """Role → its configuration, read by k3svc as the role does. `folder`: where files may be written."""
    read = {}
    for name, text in role_configs(objects).items():
        (folder / name).write_text(text)
        read[name.removesuffix(".toml")] = load_config(folder / name)
    return read


def parse(texts: Mapping[str, str]) -> list[Object]:
    """The objects of rendered templates, all of Kubernetes' own and of the Prometheus operator."""
    return [
        one
        for name, text in texts.items()
        if name.endswith(".yaml")
        for one in yaml.safe_load_all(text)
        if one is not None
    ]
