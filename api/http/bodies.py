"""Bodies of requests: the memory that all take together."""

from collections.abc import Mapping
from typing import Any

from api.errors import ApiError, invalid, queue_full, quoted
from api.process.settings import Unusable

SMALL_BYTES = 24 * 1024  # not counted: the number of connections is limited
MEDIUM_BYTES = 1024 * 1024
LARGEST_BODY_BYTES = 128 * 1024 * 1024  # above any configured limit: a reading process has twice as much memory
MAX_DIGITS = 19  # 2**63 bytes have this many
LARGE_SHARE = 0.75  # the rest of the limit is kept for bodies of at most MEDIUM_BYTES


class Bodies:
    """Counts bodies from their first byte until their requests end."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def check(self, size: int, held_bytes: int = 0) -> None:
        """Raise ApiError 429 unless a body of this size fits, of which `held_bytes` are counted already."""
        if size <= SMALL_BYTES:
            return
        limit = self.limit_bytes if size <= MEDIUM_BYTES else int(self.limit_bytes * LARGE_SHARE)
        taken = self.used_bytes - held_bytes
        if taken + size > limit:
            room = f"there is no room for {size:,} more within {limit:,}"
            error = queue_full(f"bodies of other requests take {taken:,} bytes, and {room}; try again", 1)
            error.headers["Connection"] = "close"  # the rest of it is not worth reading
            raise error

    def claim(self, size: int, held_bytes: int) -> int:
        """Count a body that grew to this size, and return its counted bytes; raise ApiError as `check` does."""
        if size > held_bytes:
            self.check(size, held_bytes)
        counted = size if size > SMALL_BYTES else 0
        self.used_bytes += counted - held_bytes
        return counted

    def release(self, held_bytes: int) -> None:
        self.used_bytes -= held_bytes


def declared_size(value: bytes | str) -> int | None:
    """Parse a Content-Length; None if it is no number. Raises ApiError 400 for too many digits."""
    if not (value.isascii() and value.isdigit()):
        return None
    if len(value) > MAX_DIGITS:  # parsers accept leading zeros, and `int` limits them
        raise invalid(f"Content-Length has {len(value):,} digits; write at most {MAX_DIGITS}")
    return int(value)


def check_limits(values: Mapping[str, Any]) -> None:
    """Raise Unusable if a body of the largest size could find no room, or could not be read."""
    largest, together = values["max_body_bytes"], values["max_bodies_bytes"]
    if largest > LARGEST_BODY_BYTES:
        raise Unusable(f"max_body_bytes {largest} is too large; give {LARGEST_BODY_BYTES} or less")
    if together < 2 * largest:
        fix = f"give {2 * largest} or more, or make max_body_bytes smaller"
        raise Unusable(f"max_bodies_bytes {together} has no room for two bodies of max_body_bytes {largest}; {fix}")


def check_coding(coding: str) -> None:
    """Raise ApiError 415 for a body that is compressed, as its Content-Encoding says."""
    if coding.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding is {quoted(coding)}; send the body as it is"
        raise ApiError(415, message, code="content_encoding_unknown", headers={"Accept-Encoding": "identity"})
