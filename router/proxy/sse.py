"""Cuts a stream of server-sent events into whole events; every byte stays in one of them."""

import re

MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"

# An event ends with two ends of lines, each CRLF, LF or CR. If a read ends within the second CRLF, its LF goes to the
# beginning of the next event, which means the same.
_ANY_END = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n?|\n)")
_END = re.compile(rb"\n\n")  # the usual one is found faster


class EventReader:
    """Reads events; raises ValueError for one longer than MAX_EVENT_BYTES."""

    def __init__(self) -> None:
        self.rest = b""  # the beginning of an event

    def feed(self, body: bytes) -> list[bytes]:
        looked_at = max(0, len(self.rest) - 3)  # an end may have begun there
        held = self.rest + body if self.rest else body
        events: list[bytes] = []
        start = 0
        for end in (_ANY_END if b"\r" in held else _END).finditer(held, looked_at):
            events.append(held[start : end.end()])
            start = end.end()
        self.rest = held[start:]
        if len(self.rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES:,} bytes")
        return events


def with_lf(text: bytes) -> bytes:
    """The same lines, each ended by LF."""
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in text else text


def payload_of(event: bytes) -> bytes | None:
    """The content of the event's only line, if that is `data`; None for comments and longer events."""
    line = event.strip()
    if not line.startswith(b"data:") or b"\n" in line or b"\r" in line:
        return None
    return line[5:].strip()
