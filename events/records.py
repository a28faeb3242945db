"""The records of a recording. New fields go last, with a default; nothing is renamed."""

from msgspec import Struct

from events.source import Source


class Header(Struct, frozen=True):
    sources: list[Source]
    created: float
    tool: str
    redacted: bool = False


class Record(Struct, array_like=True, frozen=True):
    """One message, or a mark without frames: "connected", "disconnected", "tick", "standstill" (see `subscriber.Tap`),
    or "session": the recorder was started again, with `--append`."""

    time: float
    source: int
    kind: str
    frames: list[bytes]

    @property
    def seq(self) -> int | None:
        """The sequence number of a live batch."""
        if self.kind != "events" or len(self.frames) != 3 or len(self.frames[1]) != 8:
            return None
        return int.from_bytes(self.frames[1], "big")
