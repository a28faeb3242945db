"""Free ports of loopback for the event sockets, four in a row for each replica."""

import socket

import click

EVENT_PORTS = 4  # events, replay, status, snapshot
LAST_PORT = 65535


class EventPorts:
    """Gives out ports from `first` on, none of them twice; 0: any free ones."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self) -> int:
        """The first of the next four free ports."""
        if not self._next:
            return 0
        start = free_ports(self._next)
        self._next = start + EVENT_PORTS
        return start


def free_ports(first: int) -> int:
    """The first of the next four free ports in a row, from here on."""
    for start in range(first, LAST_PORT - EVENT_PORTS + 2, EVENT_PORTS):
        if all(is_free(port) for port in range(start, start + EVENT_PORTS)):
            return start
    raise click.ClickException(f"no four free ports in a row from {first} on; choose another --events-port")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
