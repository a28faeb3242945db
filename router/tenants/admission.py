"""Admission: the one function that guards every route, the raw ones included, by the roles in the route tables.

It runs for every request: no needless allocation, no clock, no I/O.
"""

import itertools
import logging
import secrets
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import TypeAlias

from msgspec import Struct
from starlette.types import Scope

from api.errors import ApiError, unauthorized
from api.http.keys import KEY_HEADERS, shown_key
from api.http.routes import Role
from router.tenants.charges import Account, Charge, account_of
from router.tenants.keys import Key, find
from router.tenants.limits import Use
from router.tenants.shared_limits import SharedLimits

log = logging.getLogger(__name__)

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]  # names in lower case, as ASGI has them

ANYONE, CLIENT = Role.ANYONE, Role.CLIENT  # every request is compared with them

MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 100
MAX_REQUEST_ID = 128

_VISIBLE = bytes(range(33, 127))


class Admitted(Struct, gc=False):
    """An admitted request; pass it to `release` once, when it has ended."""

    request_id: str
    id_line: bytes = b""  # the header of this id, for the replica and for the client
    key: Key | None = None  # None: no keys are in use, or the path is open
    charge: Charge | None = None  # None: its key has no limits
    shows_key: bool = False  # its headers contain a key of ours, which replicas must not see
    admin: bool = False  # sees everything, where others see a part

    def cache_salt(self, given: str | None) -> str | None:
        """The salt of the request's block keys, derived from the client's own."""
        return given if self.key is None else self.key.salted(given)


class Admission:
    """Guards routes. Unless a key is demanded, keys matter only for administration.

    Without an administrator's key, only clients on this machine may administer.
    """

    def __init__(
        self, keys: Iterable[Key] = (), *, demand_key: bool = False, shared: SharedLimits | None = None
    ) -> None:
        """`shared`: what all workers of the router count together; None: there is only this one."""
        self.keys: dict[bytes, Key] = {}  # keyed by their digests
        self.shared = shared or SharedLimits()
        self._demand_key = demand_key
        self._admin_exists = False
        self.has_tenants = False  # several clients may have shares of the replicas
        self.accounts: dict[str, Account] = {}  # accounts of the keys with limits, by name
        self._prefix = f"req-{secrets.token_hex(6)}-"
        self._numbers = itertools.count(1)
        self.use(keys)

    def use(self, keys: Iterable[Key]) -> None:
        """Replace the keys; what keys of the same name have used is kept."""
        self.keys = {key.digest: key for key in keys}
        clients = [key for key in self.keys.values() if not key.admin]
        self._admin_exists = len(clients) < len(self.keys)
        self.has_tenants = len(clients) > 1 or any(key.tenant_header is not None for key in clients)
        found = ((key.name, account_of(key, self.shared)) for key in self.keys.values())
        self.accounts = {name: account for name, account in found if account is not None}

    def admit(self, scope: Scope, who: Role, now_s: float) -> Admitted:
        """Admit a request, or raise ApiError 401, 403, 429 or 431."""
        headers: Headers = scope["headers"]
        by_name = dict(headers)  # no loop of ours over the headers: usually there are more than ten
        request_id, key_headers = by_name.get(b"x-request-id"), 0
        if not KEY_HEADERS.isdisjoint(by_name):
            key_headers = sum([name in KEY_HEADERS for name, _ in headers])
        header_bytes = sum(map(len, itertools.chain.from_iterable(headers)))
        if header_bytes > MAX_HEADER_BYTES or len(headers) > MAX_HEADERS:
            found, most = (
                f"{len(headers)} headers of {header_bytes} bytes",
                f"{MAX_HEADERS} of {MAX_HEADER_BYTES} bytes",
            )
            raise ApiError(431, f"the request has {found}; at most {most} are taken", code="headers_too_large")
        if request_id and len(request_id) <= MAX_REQUEST_ID and not request_id.translate(None, _VISIBLE):
            given_id = request_id.decode("ascii")
        else:
            given_id = f"{self._prefix}{next(self._numbers)}"
        admitted = Admitted(given_id, b"x-request-id: %b\r\n" % given_id.encode())
        if who is ANYONE and not key_headers and self._admin_exists:
            return admitted
        key = None
        if key_headers and self.keys:
            given = shown_key(headers)
            key = None if given is None else find(self.keys, given)
            admitted.shows_key = key is not None or key_headers > 1  # any of several may be ours
        if who is CLIENT and not self._demand_key:
            return admitted
        if key is None and self._demand_key and who is not ANYONE:
            raise unauthorized()
        if who is not CLIENT:
            if self._admin_exists:
                admitted.admin = key is not None and key.admin
                refused = "needs the admin key; send that one as 'Authorization: Bearer KEY'"
            else:
                client = scope["client"]  # the peer; None for a Unix socket
                admitted.admin = is_local(headers, client[0] if client else None, scope["http_version"])
                refused = "is only for clients on the router's own machine; start it with --admin-key"
            if not admitted.admin and who is Role.ADMINISTRATOR:
                if self._admin_exists and key is None:
                    raise unauthorized()
                raise ApiError(403, f"{scope['path']} {refused}", code="admin_key_required")
            if who is ANYONE:
                return admitted
        elif key is not None and (account := self.accounts.get(key.name)) is not None:
            admitted.charge = account.admit(now_s)
        admitted.key = key
        return admitted

    def release(self, admitted: Admitted, used: Use | None = None, now_s: float = 0.0) -> None:
        """End a request, which has used these tokens."""
        charge, admitted.charge = admitted.charge, None
        if charge is not None:
            charge.close(used, now_s)

    def knows(self, key: Key | None, *, admin: bool) -> bool:
        """Return whether the key would still be admitted; responses that go on for hours have to check this."""
        if key is not None:
            known = self.keys.get(key.digest)
            if known is None or known.admin != key.admin:
                return False
        return not (admin and self._admin_exists) or (key is not None and key.admin)

    def in_flight(self) -> dict[str, int]:
        """Running requests by key name; counted only for keys with a limit."""
        found = {}
        for name in self.accounts:
            with self.shared.opened(name) as state:
                if state.in_flight:
                    found[name] = state.in_flight
        return found

    def check(self) -> None:
        for name, running in self.in_flight().items():
            assert running > 0, f"{name} has {running} requests in flight"

    @property
    def has_salts(self) -> bool:
        """Tell whether some clients' caches and responses are kept apart from those of others."""
        return any(key.salt is not None for key in self.keys.values())


# ---- parts of a request


def is_local(headers: Headers, client: str | None, http_version: str = "1.1") -> bool:
    """Return whether the request comes from this machine, without a proxy, and from no other site's page.

    A proxy that does not announce itself cannot be told from a client on this machine.
    """
    if client is not None and not is_loopback(client):
        return False
    if http_version == "1.0":  # nginx's default towards its upstreams
        return False
    names: dict[bytes, bytes] = dict(headers)
    if sum(name == b"host" for name, _ in headers) != 1:
        return False
    if any(name in names for name in (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")):
        return False
    host = names[b"host"]
    # DNS rebinding: the page's owner may have pointed a name of its own at this machine.
    if not is_loopback(host_of(host.decode("latin-1"))):
        return False
    origin = names.get(b"origin")
    return origin is None or origin.partition(b"://")[2] == host


def host_of(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
