"""The endpoints of peers: as given, or all addresses of a name, as of a headless service."""

import asyncio
import logging
import socket
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


def parse_endpoint(text: str) -> tuple[str, int] | None:
    """Return host and port, or None for a path; raise ValueError if it is neither."""
    kind, _, rest = text.partition("://")
    if kind == "ipc" and rest:
        return None
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no endpoint; write tcp://HOST:PORT or ipc://PATH")
    return host.strip("[]"), int(port)


class Names:
    """Looks the names up again each time; one that is not known now stands for what it stood for before."""

    def __init__(self, peers: Iterable[str]) -> None:
        self._found: dict[str, frozenset[str]] = {peer: frozenset() for peer in peers}
        self._unknown: set[str] = set()

    async def endpoints(self) -> frozenset[str]:
        for peer in self._found:
            try:
                place = parse_endpoint(peer)
                if place is None:
                    self._found[peer] = frozenset({peer} if Path(peer.removeprefix("ipc://")).exists() else ())
                else:
                    found = await asyncio.get_running_loop().getaddrinfo(*place, type=socket.SOCK_STREAM)
                    hosts = {str(address[0]) for *_, address in found}
                    at_port = (f"tcp://{f'[{host}]' if ':' in host else host}:{place[1]}" for host in hosts)
                    self._found[peer] = frozenset(at_port)
                self._unknown.discard(peer)
            except OSError as error:
                if peer not in self._unknown:
                    self._unknown.add(peer)
                    log.warning("the peer %s is not found: %s", peer, error)
        return frozenset().union(*self._found.values())
