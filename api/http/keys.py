"""The API key that a request shows."""

from collections.abc import Iterable

KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})  # the second is that of Anthropic's clients


def shown_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key in the one header that shows one; None if there is none, or if several headers do."""
    given = [header for header in headers if header[0] in KEY_HEADERS]
    if len(given) != 1:
        return None
    [(name, value)] = given
    return value.strip(b" ") if name == b"x-api-key" else bearer(value)


def bearer(authorization: bytes) -> bytes | None:
    scheme, _, key = authorization.partition(b" ")
    return key.strip(b" ") if scheme.lower() == b"bearer" else None
