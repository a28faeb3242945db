"""NetworkPolicies allow the needed connections and no others: above all, only routers reach event ports."""

from collections.abc import Iterator
from copy import deepcopy

import pytest

from tests.k8s.policies import Place, Rules, place_of
from tests.k8s.rendered import ALL, ON_RAY, OVERLAYS, VARIANTS, WITH, Object, Pod, of_kind, pods, rendered

EVENTS = ("events", "replay", "status", "snapshot")
FREE_PORTS = (32768, 45000, 60999)  # ports that a fleet's replicas may get; between 32768 and 60999
STRANGER = Place(labels={"app": "stranger"})  # in the same namespace
CLIENT = Place("apps", {"app": "chat"}, {"warmroute/clients": "true"})
OTHER = Place("apps", {"app": "chat"})
PROMETHEUS = Place("monitoring", {"app.kubernetes.io/name": "prometheus"})
IMPOSTOR = Place("apps", {"app.kubernetes.io/name": "warmroute", "app.kubernetes.io/component": "router"})
# DNS servers and their ports: cluster-wide, on each node, by an address of the node, and OpenShift's.
NAMES = (
    (Place("kube-system", {"k8s-app": "kube-dns"}), 53),
    (Place("kube-system", {"k8s-app": "node-local-dns"}), 53),
    (Place(address="169.254.20.10"), 53),
    (Place(address="169.254.169.254"), 53),
    (Place("openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"}), 5353),
)
HUB = Place(address="203.0.113.7")
API_SERVERS = (Place(address="10.96.0.1"), Place(address="172.18.0.2"))
METADATA_OF_CLOUD = Place(address="169.254.169.254")
OUTSIDERS = (STRANGER, CLIENT, OTHER, PROMETHEUS, IMPOSTOR)


def routers(objects: list[Object]) -> list[Place]:
    return [place_of(pod) for pod in pods(objects) if pod.is_a(component="router")]


def plain_replicas(objects: list[Object]) -> list[Pod]:
    return [pod for pod in pods(objects) if pod.is_a(component="replica")]


def workers(objects: list[Object]) -> list[Pod]:
    return [pod for pod in pods(objects) if pod.is_a(node="worker")]


def heads(objects: list[Object]) -> list[Pod]:
    return [pod for pod in pods(objects) if pod.is_a(node="head")]


def event_places(objects: list[Object]) -> Iterator[tuple[Place, int]]:
    for pod in plain_replicas(objects):
        named = (f"{whose}{name}" for whose in ("", "mirror-") for name in EVENTS)
        yield from ((place_of(pod), pod.ports[name]) for name in named if name in pod.ports)
    for pod in workers(objects):
        yield from ((place_of(pod), port) for port in FREE_PORTS)


def intruders(objects: list[Object]) -> list[str]:
    """Pods and outsiders, other than routers, with access to an event port at either end; policies read generously."""
    rules = Rules.at_most(objects)
    ours = [(pod.owner, place_of(pod)) for pod in pods(objects) if not pod.is_a(component="router")]
    others = [(f"{each.namespace}/{each.labels}", each) for each in OUTSIDERS]
    found = []
    for target, port in event_places(objects):
        found += [f"in: {name} -> {port}" for name, source in ours + others if rules.let_in(source, target, port)]
        found += [f"out: {name} -> {port}" for name, source in ours if rules.let_out(source, target, port)]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_routers_reach_events(variant: str) -> None:
    assert not intruders(rendered(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_routers_reach_replicas_and_their_events(variant: str) -> None:
    objects = rendered(variant)
    rules = Rules.at_least(objects)
    wanted = [*event_places(objects), *((place_of(pod), pod.ports["http"]) for pod in plain_replicas(objects))]
    assert wanted
    for target, port in wanted:
        assert all(rules.allow(router, target, port) for router in routers(objects)), port


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_seat_is_free_at_the_start(variant: str) -> None:
    objects = rendered(variant)
    rules = Rules.at_most(objects)
    everybody = [place_of(pod) for pod in pods(objects)]
    for place in everybody:
        for port in (22, 80, 443, 6379, 8000, 8001, 8265, 10001):
            assert not rules.allow(place, STRANGER, port), "one of our pods reaches a foreign pod"
            assert not rules.allow(STRANGER, place, port), "a foreign pod reaches one of our pods"
            assert not rules.allow(OTHER, place, port), "a pod of another namespace reaches one of our pods"
    assert not rules.allow(STRANGER, HUB, 443)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_client_can_list_names(variant: str) -> None:
    rules = Rules.at_least(rendered(variant))
    for pod in pods(rendered(variant)):
        for server, port in NAMES:
            assert all(rules.allow(place_of(pod), server, port, protocol) for protocol in ("UDP", "TCP")), server


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_way_to_names_leads_to_nothing_else(variant: str) -> None:
    """Policies read generously allow no other port there (one is a cloud's metadata), and port 53 nowhere else."""
    rules = Rules.at_most(rendered(variant))
    impostors = (
        STRANGER,
        Place("apps", {"k8s-app": "kube-dns"}),
        Place("kube-system", {"app": "x"}),
        Place("openshift-dns", {"app": "x"}),
        Place("kube-system", {"dns.operator.openshift.io/daemonset-dns": "default"}),
        Place(address="169.254.20.11"),
        HUB,
    )
    for pod in pods(rendered(variant)):
        for server, port in NAMES:
            if server.address is not None:
                others = {53, 80, 443, 5353, 6443, 9254} - {port}
                assert not any(rules.allow(place_of(pod), server, each) for each in others), (pod.owner, server)
        for place in impostors:
            ways = [(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")]
            assert not any(rules.allow(place_of(pod), place, *way) for way in ways), (pod.owner, place)


@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_reach_routers_and_nothing_else(variant: str) -> None:
    objects = rendered(variant)
    for pod in pods(objects):
        router = pod.is_a(component="router")
        assert Rules.at_least(objects).allow(CLIENT, place_of(pod), 8000) == router, pod.owner
        others = {*pod.ports.values(), 6379, 8265, 8790, *FREE_PORTS} - {8000}
        assert not any(Rules.at_most(objects).allow(CLIENT, place_of(pod), port) for port in others), pod.owner


def metrics_of(objects: list[Object]) -> list[tuple[Pod, int]]:
    with_http = [(pod, pod.ports["http"]) for pod in pods(objects) if pod.is_a(component="router")]
    with_http += [(pod, pod.ports["http"]) for pod in plain_replicas(objects)]
    return with_http + [(pod, 8790) for pod in heads(objects)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_metrics_are_for_the_monitoring_namespace_alone(overlay: str) -> None:
    with_it, without = rendered(overlay + ALL), rendered(overlay)
    assert "monitoring" in WITH[overlay]
    wanted = metrics_of(with_it)
    for pod, port in wanted:
        assert Rules.at_least(with_it).allow(PROMETHEUS, place_of(pod), port), pod.owner
        assert not Rules.at_most(without).allow(PROMETHEUS, place_of(pod), port), pod.owner
    for pod in pods(with_it):
        others = {*pod.ports.values(), 6379, 6701, 10002, *FREE_PORTS} - {port for one, port in wanted if one == pod}
        assert not any(Rules.at_most(with_it).allow(PROMETHEUS, place_of(pod), port) for port in others), pod.owner


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_pods_that_use_the_api_server_reach_it(variant: str) -> None:
    objects = rendered(variant)
    for pod in pods(objects):
        asks = pod.spec.get("automountServiceAccountToken") is not False and not pod.is_a(node="redis-cleanup")
        for server in API_SERVERS:
            reached = {port for port in (443, 6443) if Rules.at_least(objects).allow(place_of(pod), server, port)}
            assert reached == ({443, 6443} if asks else set()), pod.owner


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_internet_is_the_hub_and_only_where_it_is_asked(variant: str) -> None:
    objects = rendered(variant)
    downloads = any(each["metadata"]["name"] == "hub-download" for each in of_kind(objects, "NetworkPolicy"))
    assert downloads == (variant.removesuffix(ALL) in ("gpu", "ha", "vllm", "sglang"))
    rules = Rules.at_least(objects)
    for pod in pods(objects):
        reached = {port for port in (22, 80, 443, 6379, 8000) if rules.allow(place_of(pod), HUB, port)}
        assert reached == ({443} if downloads else set()), pod.owner
        assert not rules.allow(place_of(pod), METADATA_OF_CLOUD, 80), pod.owner
        assert not rules.allow(place_of(pod), METADATA_OF_CLOUD, 443), pod.owner


# ---- Ray


def of_ray(params: Object) -> set[int]:
    """The ports on which other nodes talk to one."""
    names = ("port", "object-manager-port", "node-manager-port", "dashboard-agent-grpc-port")
    return {int(params[name]) for name in (*names, "min-worker-port", "max-worker-port") if name in params}


@pytest.mark.parametrize("variant", ON_RAY)
def test_pods_of_ray_reach_each_other_on_its_own_ports(variant: str) -> None:
    objects = rendered(variant)
    [cluster] = of_kind(objects, "RayCluster")
    [head], nodes = heads(objects), workers(objects)
    rules = Rules.at_least(objects)
    for node in nodes:
        for port in of_ray(cluster["spec"]["headGroupSpec"]["rayStartParams"]):
            assert rules.allow(place_of(node), place_of(head), port)
        for group in cluster["spec"]["workerGroupSpecs"]:
            for port in of_ray(group["rayStartParams"]):
                assert rules.allow(place_of(head), place_of(node), port)
                assert rules.allow(place_of(node), place_of(node), port)
        assert rules.allow(place_of(node), place_of(head), 8790), "preStop tells the controller"
        assert not Rules.at_most(objects).allow(place_of(head), place_of(node), 8790)
    for router in routers(objects):
        assert rules.allow(router, place_of(head), 8790), "the registry"
        assert not any(Rules.at_most(objects).let_in(router, place_of(node), 8790) for node in nodes)
        for place in (place_of(head), *(place_of(node) for node in nodes)):
            for port in (6379, 6700, 6701, 6704, 8080, 10002, 19999, 32767, 61000):
                assert not Rules.at_most(objects).let_in(router, place, port), port
                assert not Rules.at_most(objects).let_out(router, place, port), port


@pytest.mark.parametrize("variant", ON_RAY)
def test_all_ports_of_ray_are_below_those_of_replicas(variant: str) -> None:
    [cluster] = of_kind(rendered(variant), "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        params = group["rayStartParams"]
        ports = {name: int(value) for name, value in params.items() if name == "port" or name.endswith("-port")}
        assert {"node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port"} <= set(ports)
        assert {"runtime-env-agent-port", "dashboard-agent-grpc-port", "dashboard-agent-listen-port"} <= set(ports)
        assert max(ports.values()) < min(FREE_PORTS), ports
        assert ports["min-worker-port"] < ports["max-worker-port"]


def test_only_the_head_and_the_cleanup_job_reach_redis() -> None:
    objects = rendered("ha")
    redis = Place("redis", {"app.kubernetes.io/name": "redis"})
    reached = {
        pod.labels.get("ray.io/node-type", "")
        for pod in pods(objects)
        if Rules.at_least(objects).allow(place_of(pod), redis, 6379)
    }
    assert reached == {"head", "redis-cleanup"}


# ---- negative controls


def changed(name: str, **spec: object) -> list[Object]:
    objects = deepcopy(rendered("kind"))
    [policy] = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == name]
    policy["spec"] |= spec
    return objects


def test_an_open_rule_and_one_for_a_whole_namespace_are_found() -> None:
    """Each end is checked separately: a denial at the other end is not enough."""
    assert intruders(changed("routers-to-replicas", ingress=[{}]))
    near = [{"from": [{"podSelector": {}}], "ports": [{"port": 5557}]}]
    assert all(each.startswith("in: ") for each in intruders(changed("routers-to-replicas", ingress=near)))
    assert intruders(changed("routers-to-replicas", ingress=near))
    assert {each[:4] for each in intruders(changed("default-deny", egress=[{}]))} == {"out:"}


def test_without_the_default_policy_every_connection_is_allowed() -> None:
    """Pods that another policy selects stay protected."""
    objects = [each for each in rendered("kind") if each["metadata"]["name"] != "default-deny"]
    assert Rules.at_least(objects).allow(OTHER, STRANGER, 80)
    assert not Rules.at_most(rendered("kind")).allow(OTHER, STRANGER, 80)
    assert not intruders(objects)


def test_a_policy_without_pods_is_noticed() -> None:
    objects = changed("routers-to-replicas", podSelector={"matchLabels": {"app.kubernetes.io/component": "replicas"}})
    [replica] = plain_replicas(objects)
    [router] = routers(objects)
    assert not Rules.at_least(objects).allow(router, place_of(replica), 5557)
