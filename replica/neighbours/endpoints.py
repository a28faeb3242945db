"""Endpoints of replicas that are read: tcp://HOST:PORT."""

import re

_ENDPOINT = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|(\*|[\w.-]{1,253})):(\d{1,5})")


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split an endpoint, with 0.0.0.0 for *; raise ValueError if it is none."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found[3]) > 65535:
        raise ValueError(f"{endpoint!r} is not an endpoint; write tcp://HOST:PORT")
    host = found[1] or found[2]
    return "0.0.0.0" if host == "*" else host, int(found[3])
