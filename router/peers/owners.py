"""The users whose programs listen on this machine: without keys, only that tells peers from other programs."""

import re
import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from router.peers.names import parse_endpoint

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def listeners(endpoint: str) -> set[int]:
    """Return the ids of the users whose programs listen there; one at the address itself comes before one at all."""
    place = parse_endpoint(endpoint)
    assert place is not None, "it is no path"
    host, port = ip_address(place[0]), place[1]
    row = re.compile(rb"^ *\d+: ([0-9A-F]+):%04X [0-9A-F:]+ 0A(?: \S+){3} +(\d+)" % port, re.MULTILINE)
    exact: set[int] = set()
    anywhere: set[int] = set()
    for table in TABLES:
        for written, uid in row.findall(_content(table)):
            at = _address(written.decode())
            if at == host:
                exact.add(int(uid))
            elif at.is_unspecified:
                anywhere.add(int(uid))
    return exact or anywhere


def _content(table: str) -> bytes:
    try:
        return Path(table).read_bytes()
    except OSError:
        return b""


def _address(written: str) -> IPv4Address | IPv6Address:
    """Read an address as the kernel writes it: words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(written[at : at + 8]) for at in range(0, len(written), 8)]
    found = ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    return getattr(found, "ipv4_mapped", None) or found
