"""The Helm chart: rendered by Helm with many sets of values, and checked against the schemas of Kubernetes."""

import copy
import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client import generate_latest
from smg.launch_router import parse_router_args

import k3svc
from k3svc.core.events import Load
from k3svc.obs.metrics import Metrics
from tests.unit.deploy.manifests import (
    Object,
    configurations,
    container_ports,
    hardening,
    label,
    named,
    of_kind,
    parse,
    pod_of,
    ports,
    read_configurations,
    references,
    selectors,
)

helm = pytest.importorskip("helm_python", reason="Helm as a library has wheels for Linux on x86-64 only")

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = KUBERNETES / "k3svc"
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in (KUBERNETES / "examples").glob("*.yaml")}
OLDEST, NEWEST = "1.27", "1.37"
WITH_IMAGE_VOLUMES = "1.33"
GIVEN = frozenset(
    {"checkpoints", "registry"} | {f"k3svc-{r}-{k}" for r in ("prefill", "decode", "draft") for k in ("tls", "auth")}
)
ALL_MONITORING = {
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    **EXAMPLES,
    "no draft": {"draft": {"enabled": False}},
    "gateway alone": {"gateway": {"enabled": True, "toolCallParser": "", "reasoningParser": ""}},
    "gateway and all monitoring": {"gateway": {"enabled": True}, "metrics": ALL_MONITORING},
    "one-way TLS": {"tls": {"enabled": True, "mutual": False}, "metrics": ALL_MONITORING},
    "keys without TLS": {"auth": {"enabled": True}, "metrics": ALL_MONITORING},
    "scaled by one metric": {"decode": {"autoscaling": {"enabled": True, "cacheUsage": None}}},
    "scaled by the other": {"prefill": {"autoscaling": {"enabled": True, "waitingRequests": None}}},
    "models on a host": {"model": {"volume": {"hostPath": {"path": "/srv/models", "type": "Directory"}}}},
    "bare": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "everything at the pods": {
        "metrics": {"port": 9500},
        "decode": {
            "podAnnotations": {"note": "x"},
            "nodeSelector": {"pool": "gpu"},
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "service": {"type": "NodePort", "port": 443, "annotations": {"a": "b"}},
            "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            "config": {"decode": {"gather_s": 0.005}, "cache": {"num_pages": 1234567}, "log": {"level": "debug"}},
        },
        "networkPolicy": {"extraEgress": [{"ports": [{"port": 4317}]}]},
    },
}

# The schemas of Kubernetes have no kinds of operators: what the chart uses of these.
OPERATOR_KEYS = {
    "ServiceMonitor": {"jobLabel", "selector", "endpoints"},
    "PrometheusRule": {"groups"},
}


def render(values: dict[str, Any], release: str = "demo") -> dict[str, str]:
    with helm.Chart.load(CHART) as chart:
        texts: dict[str, str] = chart.render(values, name=release, namespace="serving")
    return texts


@functools.cache
def rendered(variant: str) -> list[Object]:
    return parse(render(VARIANTS[variant]))


def component(objects: list[Object], kind: str, role: str) -> Object:
    return named(objects, kind, f"demo-k3svc-{role}")


each_variant = pytest.mark.parametrize("variant", VARIANTS)


@each_variant
def test_every_object_is_valid_for_old_and_new_clusters(variant: str):
    uses_image_volume = "image" in VARIANTS[variant].get("model", {}).get("volume", {})
    for one in rendered(variant):
        if one["kind"] in OPERATOR_KEYS:
            assert one["apiVersion"] == "monitoring.coreos.com/v1"
            assert one["spec"].keys() == OPERATOR_KEYS[one["kind"]], label(one)
            continue
        for version in (WITH_IMAGE_VOLUMES if uses_image_volume else OLDEST, NEWEST):
            kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_find_a_key_that_is_not_there():
    broken = copy.deepcopy(component(rendered("defaults"), "Deployment", "decode"))
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


@each_variant
def test_helm_finds_nothing_to_complain_of(variant: str):
    report = helm.lint(CHART, VARIANTS[variant], strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if "icon" not in message["error"]] == []


@each_variant
def test_objects_fit_each_other_and_what_the_services_read(variant: str, tmp_path: Path):
    objects = rendered(variant)
    identities = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(identities)) == len(identities)
    assert selectors(objects) == []
    assert ports(objects) == []
    assert references(objects, GIVEN) == []
    assert hardening(objects) == []
    assert configurations(objects, read_configurations(objects, tmp_path)) == []


def _break_selector(objects: list[Object]) -> None:
    component(objects, "Service", "decode")["spec"]["selector"]["app.kubernetes.io/component"] = "decoder"


def _break_policy(objects: list[Object]) -> None:
    component(objects, "NetworkPolicy", "draft")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"] = {
        "a": "b"
    }


def _break_port(objects: list[Object]) -> None:
    component(objects, "Service", "prefill")["spec"]["ports"][0]["targetPort"] = "gprc"


def _break_probe(objects: list[Object]) -> None:
    _, spec = pod_of(component(objects, "Deployment", "decode"))
    spec["containers"][0]["readinessProbe"]["grpc"]["port"] = 50052


def _break_volume(objects: list[Object]) -> None:
    pod_of(component(objects, "Deployment", "draft"))[1]["volumes"][1] = {"name": "model", "emptyDir": {}}


def _break_claim(objects: list[Object]) -> None:
    objects.remove(named(objects, "PersistentVolumeClaim", "demo-k3svc-models"))


def _break_root(objects: list[Object]) -> None:
    del pod_of(component(objects, "Deployment", "gateway"))[1]["containers"][0]["securityContext"][
        "readOnlyRootFilesystem"
    ]


@pytest.mark.parametrize(
    ("check", "breach", "found"),
    [
        (selectors, _break_selector, "Service demo-k3svc-decode selects nothing"),
        (selectors, _break_policy, "NetworkPolicy demo-k3svc-draft selects nothing"),
        (ports, _break_port, "Service demo-k3svc-prefill: no port gprc"),
        (ports, _break_probe, "Deployment demo-k3svc-decode: readinessProbe asks no port of the container: 50052"),
        (references, _break_volume, "Deployment demo-k3svc-draft: no volume models"),
        (references, _break_claim, "Deployment demo-k3svc-decode: there is no PersistentVolumeClaim demo-k3svc-models"),
        (hardening, _break_root, "Deployment demo-k3svc-gateway writes to its root"),
    ],
)
def test_the_checks_find_planted_breaches(
    check: Callable[[list[Object]], list[str]], breach: Callable[[list[Object]], None], found: str
):
    objects = copy.deepcopy(rendered("gateway and all monitoring"))
    assert check(objects) == []
    breach(objects)
    assert found in check(objects)


def test_configurations_say_what_the_values_say(tmp_path: Path):
    read = read_configurations(rendered("production"), tmp_path)
    assert read["decode"].decode.prefill == ("dns:///demo-k3svc-prefill:50051",)
    assert (read["prefill"].draft.endpoint, read["draft"].draft.endpoint) == ("demo-k3svc-draft:50051", "")
    assert (read["decode"].decode.max_batch, read["decode"].decode.gather_s) == (128, 0.01)
    assert (read["prefill"].prefill.chunk_tokens, read["draft"].cache.num_pages) == (2048, 8192)
    assert {config.server.insecure for config in read.values()} == {False}
    assert {config.tls.client_ca for config in read.values()} == {"/etc/k3svc/tls/ca.crt"}
    plain = read_configurations(rendered("everything at the pods"), tmp_path)
    assert (plain["decode"].cache.num_pages, plain["prefill"].cache.num_pages) == (1234567, 2048)
    assert {config.server.insecure for config in plain.values()} == {True}
    assert {config.transfer.transport for config in plain.values()} == {"grpc"}


def test_a_draft_service_that_is_off_leaves_nothing_behind(tmp_path: Path):
    objects = rendered("no draft")
    assert [label(one) for one in objects if "draft" in one["metadata"]["name"]] == []
    assert {(c.draft.path, c.draft.endpoint) for c in read_configurations(objects, tmp_path).values()} == {("", "")}


def test_probes_ask_what_the_service_tells():
    spec = pod_of(component(rendered("defaults"), "Deployment", "decode"))[1]["containers"][0]
    assert spec["livenessProbe"]["grpc"] == spec["startupProbe"]["grpc"] == {"port": 50051, "service": "liveness"}
    assert spec["readinessProbe"]["grpc"] == {"port": 50051, "service": ""}
    # The kubelet has no certificate to show, and takes none.
    secured = pod_of(component(rendered("production"), "Deployment", "decode"))[1]["containers"][0]
    assert secured["readinessProbe"]["exec"]["command"] == ["k3svc", "health", "localhost:50051", "--service", ""]
    environment = {variable["name"]: variable["value"] for variable in secured["env"]}
    assert environment == {
        "K3SVC_TLS_CA": "/etc/k3svc/tls/ca.crt",
        "K3SVC_TLS_CERT": "/etc/k3svc/tls/tls.crt",
        "K3SVC_TLS_KEY": "/etc/k3svc/tls/tls.key",
    }


@pytest.mark.parametrize(
    ("variant", "allowed"),
    [
        ("defaults", {"prefill": {"decode"}, "decode": {"anybody", "test"}, "draft": {"prefill", "decode"}}),
        (
            "gateway alone",
            {
                "prefill": {"decode"},
                "decode": {"anybody", "gateway", "test"},
                "draft": {"prefill", "decode"},
                "gateway": {"anybody"},
            },
        ),
    ],
)
def test_the_network_lets_roles_call_whom_they_must(variant: str, allowed: dict[str, set[str]]):
    policies = of_kind(rendered(variant), "NetworkPolicy")
    callers: dict[str, set[str]] = {}
    called: dict[str, set[str]] = {}
    for policy in policies:
        role = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        peers = policy["spec"]["ingress"][0]["from"]
        callers[role] = {
            peer["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component", "anybody") for peer in peers
        }
        called[role] = {
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in policy["spec"]["egress"]
            for peer in rule.get("to", ())
        }
    assert callers == allowed
    # Whoever may be called by a role is a role that the caller may reach.
    assert called == {who: {role for role, from_ in allowed.items() if who in from_} for who in allowed}


def test_the_network_lets_decode_read_hand_offs():
    """At the port that prefill opens for it, which no one else may reach."""
    policies = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: policy["spec"]
        for policy in of_kind(rendered("production"), "NetworkPolicy")
    }
    assert [port["port"] for port in policies["prefill"]["ingress"][0]["ports"]] == ["grpc", "state"]
    assert "state" not in str([policies["decode"]["ingress"], policies["draft"]["ingress"]])
    reached = {
        role: [port["port"] for rule in spec["egress"] for port in rule["ports"] if port["port"] == 50052]
        for role, spec in policies.items()
    }
    assert reached == {"prefill": [], "decode": [50052], "draft": []}


def test_pods_that_scale_are_counted_by_the_autoscaler_alone():
    objects = rendered("production")
    for role, highest in (("prefill", 8), ("decode", 16)):
        assert "replicas" not in component(objects, "Deployment", role)["spec"]
        assert component(objects, "HorizontalPodAutoscaler", role)["spec"]["maxReplicas"] == highest
    assert component(objects, "Deployment", "draft")["spec"]["replicas"] == 1
    assert component(rendered("gateway"), "Deployment", "decode")["spec"]["replicas"] == 2


def _wanted(objects: list[Object]) -> dict[str, str]:
    """Metric → its target, over all autoscalers."""
    return {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for one in of_kind(objects, "HorizontalPodAutoscaler")
        for metric in one["spec"]["metrics"]
    }


def test_autoscalers_ask_for_metrics_that_services_export_and_the_adapter_serves():
    assert _wanted(rendered("production")) == {"k3svc_num_requests_waiting": "8", "k3svc_kv_cache_usage_perc": "800m"}
    assert _wanted(rendered("scaled by one metric")).keys() == {"k3svc_num_requests_waiting"}
    assert _wanted(rendered("scaled by the other")).keys() == {"k3svc_kv_cache_usage_perc"}
    pools = {name: 1 for one in ("pages", "slots") for name in (f"free_{one}", f"total_{one}")}
    load: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(Load)} | pools | {"outcomes": {}}
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    for role in ("prefill", "decode"):
        exported = generate_latest(Metrics(role, lambda: load).registry).decode()
        for name in _wanted(rendered("production")):
            assert f"\n{name} " in exported
            assert name in rule["seriesQuery"]


def test_the_gateway_understands_its_command_line():
    (container,) = pod_of(component(rendered("gateway"), "Deployment", "gateway"))[1]["containers"]
    module, command, *arguments = container["args"]
    assert (module, command) == ("smg", "launch")
    parsed = parse_router_args(arguments)
    assert parsed.service_discovery
    assert (parsed.service_discovery_port, parsed.service_discovery_namespace) == (50051, "serving")
    labels, spec = pod_of(component(rendered("gateway"), "Deployment", "decode"))
    assert parsed.selector.items() <= labels.items()
    assert container_ports(spec)["grpc"] == parsed.service_discovery_port
    assert {"http": parsed.port, "metrics": parsed.prometheus_port} == {
        port["name"]: port["containerPort"] for port in container["ports"]
    }


@pytest.mark.parametrize("guard", ["tls", "auth"])
def test_a_gateway_that_could_reach_nobody_is_refused(guard: str):
    with pytest.raises(helm.HelmError, match=r"gateway\.enabled excludes tls\.enabled and auth\.enabled"):
        render({"gateway": {"enabled": True}, guard: {"enabled": True}})


@pytest.mark.parametrize(
    "values", [{"decode": {"replica": 2}}, {"prefill": {"replicas": 0}}, {"draft": {"replicas": 2}}]
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]):
    with pytest.raises(helm.HelmError, match=r"additional properties|minimum"):
        render(values)


def test_two_releases_share_nothing():
    first, second = (parse(render({}, release=name)) for name in ("blue", "green"))
    names = [{(one["kind"], one["metadata"]["name"]) for one in objects} for objects in (first, second)]
    assert not names[0] & names[1]
    services = of_kind(first, "Service")
    assert selectors([*services, *of_kind(second, "Deployment")]) == [
        f"{label(one)} selects nothing" for one in services
    ]


def test_rules_and_dashboard_are_those_of_the_repository():
    objects = rendered("gateway and all monitoring")
    monitoring = ROOT / "deploy" / "monitoring"
    assert named(objects, "PrometheusRule", "demo-k3svc")["spec"] == yaml.safe_load(
        (monitoring / "alerts.yml").read_text()
    )
    board = named(objects, "ConfigMap", "demo-k3svc-dashboard")["data"]["k3svc.json"]
    assert board.strip() == (monitoring / "grafana" / "dashboards" / "k3svc.json").read_text().strip()
    # Rules and panels know services by the jobs prefill, decode, draft and gateway.
    (monitor,) = of_kind(objects, "ServiceMonitor")
    jobs = {
        service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        for service in of_kind(objects, "Service")
        if "metrics" in {port["name"] for port in service["spec"]["ports"]}
    }
    assert jobs == {"prefill", "decode", "draft", "gateway"}


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == k3svc.__version__ == importlib.metadata.version("k3svc")
