"""An InferencePool (Gateway API Inference Extension): its pods' labels and ports."""

import re

from msgspec import Struct, field

from router.members.discovery.collection import Collection, Kind
from router.members.discovery.labels import MAX_PORT, Metadata
from router.members.discovery.pods import selector_of

GROUP = "inference.networking.k8s.io"
MAX_PORTS = 8  # the kind's own limit
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class Port(Struct):
    number: int = 0


class Selector(Struct, rename="camel"):
    match_labels: dict[str, str] = {}


class PoolSpec(Struct, rename="camel"):
    selector: Selector = field(default_factory=Selector)
    target_ports: list[Port] = []


class InferencePool(Struct):
    """`spec.endpointPickerRef` is the gateway's business, its failureMode included."""

    metadata: Metadata
    spec: PoolSpec = field(default_factory=PoolSpec)


class Target(Struct, frozen=True):
    """The pods of a pool, or why it names none."""

    name: str
    selector: str = ""
    ports: tuple[int, ...] = ()
    unusable: str = ""


def check_name(name: str) -> None:
    """Raise ValueError if no object can have the name: it becomes part of a selector."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an InferencePool; write its metadata.name")


def pool_of(namespace: str, name: str) -> Collection[InferencePool, Target]:
    return Collection(KIND, f"pool {namespace}/{name}", f"metadata.name={name}")


def target_of(pool: InferencePool) -> Target:
    name, ports = pool.metadata.name, [port.number for port in pool.spec.target_ports]
    if not 0 < len(ports) <= MAX_PORTS or len(set(ports)) < len(ports) or not all(0 < one <= MAX_PORT for one in ports):
        advice = f"write 1 to {MAX_PORTS} different ones, from 1 to {MAX_PORT}"
        return Target(name, unusable=f"its targetPorts are {ports[: MAX_PORTS + 1]}; {advice}")
    try:
        return Target(name, selector_of(pool.spec.selector.match_labels), tuple(ports))
    except ValueError as error:
        return Target(name, unusable=f"its selector.matchLabels: {error}")


KIND = Kind(
    "inferencepools",
    GROUP,
    "v1",
    "the InferencePool",
    InferencePool,
    lambda pool, _: ([target_of(pool)], ()),
    selects_by="fieldSelector",
)
