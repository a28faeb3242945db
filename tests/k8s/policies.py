"""An evaluator of NetworkPolicies (networking.k8s.io/v1), without a cluster: may one pod reach another?

Whether an ipBlock covers the addresses of pods is up to the cluster. `Rules.at_most` assumes that they do, to prove
that a connection is denied; `Rules.at_least` assumes that they do not, to prove that it is allowed. No pod has a
link-local address.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.k8s.rendered import NAMESPACE, Object, Pod, of_kind


class Place(NamedTuple):
    """A sender or receiver: a pod, or an address outside of the cluster."""

    namespace: str = NAMESPACE
    labels: Mapping[str, str] = {}
    namespace_labels: Mapping[str, str] = {}
    ports: Mapping[str, int] = {}  # by name
    address: str | None = None

    @property
    def all_namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace, **self.namespace_labels}


def place_of(pod: Pod) -> Place:
    return Place(labels=pod.labels, ports=pod.ports)


class Rules:
    """The policies of one namespace."""

    def __init__(self, objects: Sequence[Object], *, blocks_cover_pods: bool) -> None:
        self._policies = of_kind(list(objects), "NetworkPolicy")
        self._blocks_cover_pods = blocks_cover_pods

    @classmethod
    def at_most(cls, objects: Sequence[Object]) -> "Rules":
        return cls(objects, blocks_cover_pods=True)

    @classmethod
    def at_least(cls, objects: Sequence[Object]) -> "Rules":
        return cls(objects, blocks_cover_pods=False)

    def allow(self, source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
        return self.let_out(source, target, port, protocol) and self.let_in(source, target, port, protocol)

    def let_out(self, source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
        return self._one_way("Egress", source, target, port, protocol, target)

    def let_in(self, source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
        return self._one_way("Ingress", target, source, port, protocol, target)

    def _one_way(self, way: str, own: Place, other: Place, port: int, protocol: str, target: Place) -> bool:
        """Return True if no policy of this direction selects `own`, or a rule of one allows the connection."""
        if own.address is not None or own.namespace != NAMESPACE:
            return True
        specs = [each["spec"] for each in self._policies if selects(each["spec"]["podSelector"], own.labels)]
        specs = [spec for spec in specs if way in spec["policyTypes"]]
        peers = {"Ingress": "from", "Egress": "to"}[way]
        rules = [rule for spec in specs for rule in spec.get(way.lower(), [])]
        return not specs or any(
            self._is_peer(rule.get(peers), other) and _has_port(rule.get("ports"), port, protocol, target)
            for rule in rules
        )

    def _is_peer(self, peers: list[Object] | None, other: Place) -> bool:
        return not peers or any(self._matches(peer, other) for peer in peers)

    def _matches(self, peer: Object, other: Place) -> bool:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            covers_pods = self._blocks_cover_pods and not ipaddress.ip_network(block["cidr"]).is_link_local
            return covers_pods if other.address is None else _in_block(block, other.address)
        if other.address is not None:
            return False
        if "namespaceSelector" in peer:
            near = selects(peer["namespaceSelector"], other.all_namespace_labels)
        else:
            near = other.namespace == NAMESPACE
        return near and selects(peer.get("podSelector", {}), other.labels)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return True if the selector matches the labels; an empty one matches all."""
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return exact and all(_holds(each, labels) for each in selector.get("matchExpressions") or [])


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case operator:
            raise AssertionError(f"{operator} is no operator of label selectors")


def _in_block(block: Mapping[str, Any], address: str) -> bool:
    inside = ipaddress.ip_address(address)
    excepted = [ipaddress.ip_network(each) for each in block.get("except", [])]
    return inside in ipaddress.ip_network(block["cidr"]) and not any(inside in each for each in excepted)


def _has_port(ports: list[Object] | None, port: int, protocol: str, target: Place) -> bool:
    return not ports or any(_is_port(each, port, protocol, target) for each in ports)


def _is_port(each: Object, port: int, protocol: str, target: Place) -> bool:
    if each.get("protocol", "TCP") != protocol:
        return False
    first: str | int = each.get("port", port)
    if isinstance(first, str):
        return target.ports.get(first) == port
    last: int = each.get("endPort", first)
    return first <= port <= last
