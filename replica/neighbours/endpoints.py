"""Endpoints of replicas that are read: tcp://HOST:PORT."""

import re

_ENDPOINT = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|([\w.-]{1,253})):(\d{1,5})")


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Split an endpoint; raise ValueError if it is none."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or int(found[3]) > 65535:
        raise ValueError(f"{endpoint!r} is not an endpoint; write tcp://HOST:PORT")
    return found[1] or found[2], int(found[3])
