"""Replicas from Kubernetes pods, chosen by labels, without a service in between."""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from router.members.discovery.collection import Collection, Kind
from router.members.discovery.labels import HTTP, HTTP_PORT, PREFIX, Metadata, Values, annotations_in
from router.members.spec import OFF, SOCKETS, BadSpec, ReplicaSpec, spec_of


class ContainerPort(Struct, rename="camel"):
    container_port: int
    name: str = ""
    protocol: str = "TCP"


class Container(Struct, rename="camel"):
    name: str
    ports: list[ContainerPort] | None = None
    restart_policy: str | None = None  # an init container with "Always" is a sidecar


class PodSpec(Struct, rename="camel"):
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None


class Condition(Struct):
    type: str = ""
    status: str = ""


class ContainerStatus(Struct, rename="camel"):
    name: str
    restart_count: int = 0
    container_id: str = field(default="", name="containerID")


class PodStatus(Struct, rename="camel"):
    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class Pod(Struct):
    metadata: Metadata
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def is_ending(self) -> bool:
        return self.metadata.deletion_timestamp is not None


def pods_of(namespace: str, selector: str, http_ports: Sequence[int] = ()) -> Collection[Pod, ReplicaSpec]:
    """`http_ports`: those of HTTP of all pods, a replica each, whatever the pods say themselves.

    They are ranks, as vLLM counts them, whose sockets' ports follow each other, too.
    """

    def replicas(pod: Pod, values: Values) -> tuple[Sequence[ReplicaSpec], Sequence[str]]:
        at_each = [replicas_in(pod, values | {HTTP_PORT: str(port)}, rank) for rank, port in enumerate(http_ports)]
        found = [spec for specs, _ in at_each for spec in specs]
        if len(http_ports) > 1:
            found = [replace(spec, name=f"{spec.name}-{spec.url.rpartition(':')[2]}") for spec in found]
        return found, list(dict.fromkeys(problem for _, problems in at_each for problem in problems))

    kind = KIND._replace(make=replicas) if http_ports else KIND
    return Collection(kind, f"pods {namespace}/{selector}", selector)


def replicas_in(pod: Pod, values: Values, rank: int = 0) -> tuple[Sequence[ReplicaSpec], Sequence[str]]:
    # A terminating pod serves until its end, ready or not.
    is_ready = any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())
    if not ((is_ready or pod.is_ending) and pod.status.phase == "Running" and pod.status.pod_ip):
        return (), ()
    try:
        annotations = annotations_in(values)
        ports = ports_of(pod) | annotations.ports
        if (http := ports.get(HTTP)) is None:
            raise BadSpec(f"it has no port named {HTTP}; name the container's port, or annotate {PREFIX}http-port")
        host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
        sockets = {name: f"tcp://{host}:{ports[name] + rank}" for name in SOCKETS if name in ports}
        known = {
            "name": pod.metadata.name,
            "url": f"http://{host}:{http}",
            "draining": pod.is_ending,
            "incarnation": incarnation_of(pod, http),
        }
        spec = spec_of({**annotations.fields, **(sockets if annotations.has_events else {"events": OFF}), **known})
    except BadSpec as error:
        return (), [f"cannot be used: {error}"]
    return [spec], ()


def ports_of(pod: Pod) -> dict[str, int]:
    """Ports by name, the first of each. A pod's only port is for HTTP, whatever its name."""
    found = [port for container in _lasting(pod) for port in container.ports or () if port.protocol == "TCP"]
    if len(found) == 1:
        return {HTTP: found[0].container_port}
    return {port.name: port.container_port for port in reversed(found) if port.name}


def incarnation_of(pod: Pod, http: int) -> str:
    """The pod's uid and the run of its serving container: a container restarts without its pod."""
    answering = {each.name for each in _lasting(pod) if any(port.container_port == http for port in each.ports or ())}
    statuses = [*(pod.status.container_statuses or ()), *(pod.status.init_container_statuses or ())]
    runs = [
        # Restart counts may begin again with the node. Container ids do not, but some virtual nodes have none.
        status.container_id or str(status.restart_count)
        for status in sorted(statuses, key=lambda status: status.name)
        if status.name in (answering or {container.name for container in pod.spec.containers or ()})
    ]
    return "/".join([pod.metadata.uid, *runs])


def _lasting(pod: Pod) -> Iterable[Container]:
    """All containers except init containers that end before the others start."""
    yield from pod.spec.containers or ()
    yield from (each for each in pod.spec.init_containers or () if each.restart_policy == "Always")


KIND = Kind("pods", "", "v1", "the pod", Pod, replicas_in)


# ---- label selectors

_KEY = r"(?:[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
_LABEL = re.compile(f"{_KEY}={_VALUE}")
_ONE = re.compile(
    rf"\s*({_KEY}\s*(==?|!=)\s*{_VALUE}|{_KEY}\s+(not)?in\s*\(\s*{_VALUE}(\s*,\s*{_VALUE})*\s*\)|{_KEY}\s*[<>]\s*[0-9]{{1,19}}|!?\s*{_KEY})\s*"
)


def selector_of(labels: Mapping[str, str]) -> str:
    """The selector of pods with all of these labels; raise ValueError if it would select others, or every pod."""
    for key, value in labels.items():
        if not _LABEL.fullmatch(f"{key}={value}"):
            raise ValueError(f"{key!r}: {value!r} is not a label; write a key and a value as in a pod's labels")
    if not labels:
        raise ValueError("without a label every pod would be selected; name at least one")
    return ",".join(f"{key}={value}" for key, value in labels.items())


def check_selector(selector: str) -> None:
    """Raise ValueError if the API server would refuse the selector, or if it selects every pod."""
    for part in re.split(r",(?![^(]*\))", selector):  # commas outside parentheses
        if not _ONE.fullmatch(part):
            raise ValueError(f"{part.strip()!r} in {selector!r} is not a selector; write app=model, or app in (a,b)")
