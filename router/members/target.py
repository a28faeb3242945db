"""The address of a replica, parsed from its URL."""

from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit


class Target(NamedTuple):
    host: str
    port: int
    tls: bool
    path: str  # before every path of the API; empty or without a slash at its end

    @property
    def is_address(self) -> bool:
        """True if the host is an IP address."""
        try:
            ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"


def parse_target(url: str) -> Target:
    """Parse a replica's URL, with or without /v1; the ValueError quotes it and shows the expected form."""
    try:
        parts = urlsplit(url)
        port = parts.port
        usable = parts.scheme in ("http", "https") and parts.hostname and port != 0
    except ValueError:  # a bad port or address
        usable = False
    if not usable or parts.query or parts.fragment or parts.username or not parts.hostname:
        raise ValueError(f"{url!r} is no replica's URL; write http://HOST:PORT or https://HOST:PORT")
    tls = parts.scheme == "https"
    return Target(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))
