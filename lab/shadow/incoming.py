"""A request as it was seen: a mirrored copy, or a line of a file."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct, field

from router.log_lines import NO_BODY
from router.members.upstream import Header

MOST_S = 1e12  # since 1970
MOST_TOKENS = 10**9
NO_BODIES = "without its body a request cannot be placed; write the log with --log-prompts"
EXPECTED = 'write {"ts": seconds, "path": "/v1/chat/completions", "body": {...}}'

Name = Annotated[str, Meta(max_length=512)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=-MOST_S, le=MOST_S)]


class BadLine(ValueError):
    """A line without a request that can be placed."""


class Incoming(Struct, frozen=True, kw_only=True):
    ts: float  # when it came, seconds since 1970
    body: bytes
    path: str = ""  # empty: its fields tell the API
    headers: Sequence[Header] = ()
    request_id: str = ""
    replica: str | None = None  # that served it
    cached_tokens: int | None = None  # as the replica reported
    output_tokens: int | None = None
    ttft_s: float | None = None


class _Line(Struct, kw_only=True):
    """The fields that are read of a line, those of a router's request log included."""

    raw_body: Raw = field(default=NO_BODY, name="body")
    ts: Seconds | None = None
    path: Name = ""
    request_id: Name = ""
    replica: Name | None = None
    cached_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    ttft_s: Seconds | None = None


_decode = msgspec.json.Decoder(_Line).decode


def parse_line(line: bytes, now_ts: float) -> Incoming:
    """Parse a line; one that does not say when its request came has just come. Raise BadLine."""
    try:
        read = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"it is no request: {error}; {EXPECTED}") from error
    if not read.raw_body:
        raise BadLine(f"it has no body; {NO_BODIES}")
    return Incoming(
        ts=now_ts if read.ts is None else read.ts,
        body=bytes(read.raw_body),
        path=read.path,
        request_id=read.request_id,
        replica=read.replica,
        cached_tokens=read.cached_tokens,
        output_tokens=read.output_tokens,
        ttft_s=read.ttft_s,
    )
