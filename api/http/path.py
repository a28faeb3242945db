"""Checks a request's head, and parses its target, once, before admission. What is ambiguous is refused."""

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias
from urllib.parse import quote, unquote_to_bytes

from api.errors import ApiError, invalid, quoted

MAX_PATH_BYTES = 2048

Segments: TypeAlias = tuple[str, ...]

_PCHAR = rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"  # RFC 3986, 3.3
_PATH = re.compile(rb"(?:/" + _PCHAR + rb"+)+|/")
_QUERY = re.compile(rb'[!-"$-~]*')  # no fragment: it is not sent (RFC 9110, 4.2.5)
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_UNESCAPED = "!$&'()*+,;=:@"

# A head with one Host header, none of these and no name twice needs no look of ours.
TO_CHECK = frozenset({b"transfer-encoding", b"expect"})


def waits_for_100(headers: Iterable[tuple[bytes, bytes]], *, is_old: bool) -> bool:
    """Raise ApiError for a head that servers read differently; return whether the client waits for 100 Continue."""
    waits, hosts = False, 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and value.strip(b" \t").lower() != b"chunked":
            # The parser reads `gzip, chunked` as chunked, and what comes out would be taken for the body.
            message = "a Transfer-Encoding other than chunked is not known here; send the body as it is, or chunked"
            raise ApiError(501, message, code="transfer_encoding_unknown")
        elif name == b"expect":
            # A client of 1.0 would take 100 for its answer (RFC 9110, 10.1.1).
            waits = value.lower() == b"100-continue" and not is_old
    if hosts != 1 and (hosts or not is_old):
        # The parser takes it, although servers read it differently.
        raise invalid(f"the request has {hosts} Host headers; send one (RFC 9112, 3.2)", code="invalid_host")
    return waits


class Target(NamedTuple):
    path: Segments  # decoded; a slash within one was written %2F
    query: bytes

    @property
    def raw(self) -> bytes:
        """The normalized spelling, the only one that is passed on."""
        raw = raw_path(self.path)
        return b"%b?%b" % (raw, self.query) if self.query else raw


def parse_target(raw: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> Target:
    """Parse a target; raise ApiError 400 that quotes it. An absolute target must repeat the Host in `headers`."""
    path, _, query = raw.partition(b"?")
    if not path.startswith(b"/"):
        absolute = _ABSOLUTE.fullmatch(path)  # http://HOST/PATH, which a server must accept (RFC 9112, 3.2.2)
        if absolute is None:
            raise _bad(path, "write a path that begins with '/'")
        authority, rest = absolute.groups()
        if [value.lower() for name, value in headers if name == b"host"] != [authority.lower()]:
            raise _bad(path, "its host is not that of the Host header; this server is no proxy")
        path = rest or b"/"
    if not _QUERY.fullmatch(query):
        raise _bad(raw, "its query has characters that a URL cannot have; percent-encode them")
    return Target(parse_path(path), query)


def parse_path(raw: bytes) -> Segments:
    """The decoded segments, none for the root; raise ApiError 400 if servers could read the path differently."""
    if len(raw) > MAX_PATH_BYTES:
        raise _bad(raw, f"the path has {len(raw)} bytes; at most {MAX_PATH_BYTES} are taken")
    if not _PATH.fullmatch(raw):
        raise _bad(raw, "write it without empty parts or a slash at its end, and percent-encode other characters")
    segments = []
    for part in raw[1:].split(b"/") if raw != b"/" else ():
        try:
            segment = unquote_to_bytes(part).decode()
        except UnicodeDecodeError:
            raise _bad(raw, "what it encodes is not UTF-8") from None
        if not segment.isprintable():
            raise _bad(raw, "it encodes a control character")
        if _ESCAPE.search(segment):
            raise _bad(raw, "it is encoded twice; encode it once")
        # Some servers leave out what follows a ';', and read '..;x' as '..'.
        if "\\" in segment or any(name.partition(";")[0] in ("", ".", "..") for name in segment.split("/")):
            raise _bad(raw, "'.', '..', '\\' and empty parts are not resolved; write the path they lead to")
        segments.append(segment)
    return tuple(segments)


def raw_path(path: Segments) -> bytes:
    return b"/" + b"/".join(quote(segment, safe=_UNESCAPED).encode() for segment in path)


def _bad(raw: bytes, why: str) -> ApiError:
    return invalid(f"the request's target is {quoted(raw.decode('latin-1'))}: {why}", code="invalid_path")
