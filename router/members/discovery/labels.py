"""Labels and annotations of a replica in Kubernetes, with keys that begin with `warmroute/`.

A new key is one row here, and one in docs/discovery.md.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias, get_args

from msgspec import Struct

from router.members.spec import OFF, SOCKETS, BadSpec, engines
from router.placement.cost import Role

PREFIX = "warmroute/"
HTTP = "http"
HTTP_PORT = "http-port"

TEXTS = {"engine": "engine", "model": "model", "role": "role", "topic": "topic"}
NUMBERS = {"block-size": "block_size", "max-model-len": "max_model_len"}
PORTS = {f"{name}-port": name for name in (HTTP, *SOCKETS)}
KEYS = (*TEXTS, *NUMBERS, "adapters", "resume", *PORTS)
MAX_PORT = 65535
ROLES = get_args(Role)
# A user who may create pods need not have access to the router's secrets and files.
WITHHELD = {
    "api-key-env": "would let a pod ask for the router's secrets; give the router --replica-api-key",
    "curve-server": "would let a pod name files of the router's; give the router --curve-server",
    "curve-secret": "would let a pod name files of the router's; give the router --curve-secret",
}

Values: TypeAlias = dict[str, str]  # values by key, without the prefix


class Metadata(Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Annotations(NamedTuple):
    fields: dict[str, Any]  # the fields of a ReplicaSpec
    ports: dict[str, int]  # ports by purpose
    has_events: bool


def values_in(metadata: Metadata) -> tuple[Values, list[str]]:
    """Our labels and annotations, and remarks about unknown keys. An annotation overrides a label."""
    own = {
        key.removeprefix(PREFIX): value
        for named in (metadata.labels, metadata.annotations)
        for key, value in (named or {}).items()
        if key.startswith(PREFIX)
    }
    remarks = []
    for key in [key for key in own if key not in KEYS]:
        near = get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
        why = WITHHELD.get(key, f"is not known; {hint}")
        remarks.append(f"has a key that is ignored: {PREFIX}{key} {why}")
    return {key: value for key, value in own.items() if key in KEYS}, remarks


def annotations_in(values: Mapping[str, str]) -> Annotations:
    """Parse the values; raise BadSpec for an invalid one."""
    for key, value in values.items():
        if not value:
            raise BadSpec(f"{PREFIX}{key} is empty; give it a value, or remove it")
    has_events = values.get("events-port") != OFF
    if not has_events:
        values = {key: value for key, value in values.items() if key != "events-port"}
    for key, known in (("engine", engines()), ("role", ROLES)):
        if values.get(key, known[0]) not in known:
            raise BadSpec(f"{PREFIX}{key} is {values[key]!r}; write {', '.join(known[:-1])} or {known[-1]}")
    fields: dict[str, Any] = {TEXTS[key]: value for key, value in values.items() if key in TEXTS}
    fields |= {NUMBERS[key]: _whole(key, value) for key, value in values.items() if key in NUMBERS}
    if "adapters" in values:
        fields["adapters"] = [name for part in values["adapters"].split(",") if (name := part.strip())]
    if "resume" in values:
        if (resume := values["resume"]) not in ("true", "false"):
            raise BadSpec(f"{PREFIX}resume is {resume!r}; write true or false")
        fields["resume"] = resume == "true"
    ports = {PORTS[key]: _whole(key, value, MAX_PORT) for key, value in values.items() if key in PORTS}
    return Annotations(fields, ports, has_events)


def _whole(key: str, value: str, most: int = 2**31 - 1) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 12 and 0 < int(value) <= most):
        raise BadSpec(f"{PREFIX}{key} is {value!r}; write a whole number from 1 to {most}")
    return int(value)
