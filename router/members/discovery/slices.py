"""Replicas behind a Kubernetes service, from its EndpointSlices (discovery.k8s.io/v1)."""

from collections.abc import Sequence

from msgspec import Struct

from router.members.discovery.collection import Collection, Kind
from router.members.discovery.labels import HTTP, Metadata, Values, annotations_in, spec_at
from router.members.spec import BadSpec, ReplicaSpec


class Conditions(Struct):
    """Missing conditions are unknown; the API says to treat an unknown `ready` as true."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(Struct, rename="camel"):
    addresses: list[str]
    conditions: Conditions | None = None
    target_ref: TargetRef | None = None


class Port(Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class Slice(Struct, rename="camel"):
    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


def slices_of(namespace: str, service: str) -> Collection[Slice, ReplicaSpec]:
    return Collection(KIND, f"service {namespace}/{service}", f"kubernetes.io/service-name={service}")


def replicas_in(each: Slice, values: Values) -> tuple[Sequence[ReplicaSpec], Sequence[str]]:
    """The ready and the terminating replicas, and why other endpoints are invalid."""
    try:
        annotations = annotations_in(values)
    except BadSpec as error:
        return (), [f"cannot be used: {error}"]
    ports = {port.name or HTTP: port.port for port in each.ports or () if port.port and port.protocol in (None, "TCP")}
    if len(ports) == 1:  # it is for HTTP, whatever its name
        ports = {HTTP: next(iter(ports.values()))}
    ports |= annotations.ports
    replicas: list[ReplicaSpec] = []
    refused: list[str] = []
    for endpoint in each.endpoints or ():
        draining = is_draining(endpoint.conditions or Conditions())
        if draining is None or not endpoint.addresses:
            continue
        target, pod = endpoint.target_ref, {}
        if target is not None and target.kind == "Pod":
            pod = {"name": target.name, "incarnation": target.uid or None}
        try:
            replicas.append(spec_at(endpoint.addresses[0], ports, annotations, draining=draining, **pod))
        except BadSpec as error:
            refused.append(f"has an endpoint that cannot be used: {error}")
    return replicas, refused


def is_draining(conditions: Conditions) -> bool | None:
    """None: not ready. A terminating endpoint serves until its end, ready or not."""
    if conditions.terminating:
        return True
    return None if conditions.ready is False else False


KIND = Kind(
    "endpointslices",
    "discovery.k8s.io",
    "v1",
    "its slice",
    Slice,
    replicas_in,
    order=lambda each: (each.address_type, each.metadata.name),
)
