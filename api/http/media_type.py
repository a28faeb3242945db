"""The media type of a body, byte for byte (RFC 9110, 8.3.1), since `str.strip` removes more than blanks."""

from collections.abc import Iterable


def media_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The type in the only Content-Type, in small letters; empty for none, and for several, of which any may count."""
    types = [value for name, value in headers if name == b"content-type"]
    return types[0].partition(b";")[0].strip(b" \t").lower() if len(types) == 1 else b""
