"""Recordings of streams: everything that came by the sockets, with the time it came.

    file   = MAGIC, then frames; the first frame's body is the Header, every other one's a Record
    frame  = MARK, u32 length of the body, u32 CRC-32 of the body, the body as msgpack; little-endian

A file is only ever appended to. What a crash has cut off or a disk has damaged is found by its checksum, reported with
its offset, and skipped up to the next frame that is whole. Rules for editing: new fields go last, with a default;
nothing is renamed; a reader refuses only a MAGIC it does not know.

A recording holds prompts (as token ids), so it is created readable by its owner alone. One of a mirror holds keys.
"""

import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import msgspec

from events.messages import Frames
from events.source import Header, Record, Source
from events.subscriber import Tap
from events.view import CacheView

MAGIC = b"\x89WREC1\r\n"
MARK = b"\xa5\x5aWR"
HEAD_BYTES = len(MARK) + 8
FLUSH_EVERY_S = 1.0
# A tick is marked after it has changed something: its deadlines must be over at the recorded time, rounding included.
TICK_LATE_S = 1e-6


class BadRecording(ValueError):
    """A file that is no recording."""


class Damage(NamedTuple):
    """A part of the file that cannot be used."""

    offset: int
    length: int
    reason: str

    def __str__(self) -> str:
        return f"{self.length} bytes at offset {self.offset}: {self.reason}"


class Recorder:
    """Writes a recording. Use as a context manager, or call `close`.

    An existing file is refused, unless `force` replaces it.
    """

    def __init__(self, path: str | Path, sources: Sequence[Source], *, force: bool = False) -> None:
        self.path = Path(path)
        self.records = 0
        sources = [msgspec.structs.replace(source, curve=None) for source in sources]
        # Times never run backwards, whatever happens to the clock.
        self._zero_s = time.time() - time.monotonic()
        self._flushed_s = time.monotonic()
        if force:
            self.path.unlink(missing_ok=True)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise FileExistsError(f"{self.path} exists; --force replaces it") from error
        self._file = os.fdopen(descriptor, "wb", buffering=2**20)
        self._file.write(MAGIC)
        self.written_bytes = len(MAGIC)
        try:
            tool = f"warmroute {version('warmroute')}"
        except PackageNotFoundError:
            tool = "warmroute"
        self._append(Header(sources, time.time(), tool))
        self._file.flush()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tap(self, source: int) -> Tap:
        """Record everything that a subscriber receives from this source."""

        def tap(kind: str, frames: Frames) -> None:
            self.write(Record(self._zero_s + time.monotonic(), source, kind, frames))

        return tap

    def write(self, record: Record) -> None:
        self._append(record)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Flush recent records to disk; call it now and then."""
        now_s = time.monotonic()
        if now_s - self._flushed_s >= FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _append(self, message: Header | Record) -> None:
        body = msgspec.msgpack.encode(message)
        head = MARK + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
        self._file.write(head + body)
        self.written_bytes += len(head) + len(body)
        self.records += isinstance(message, Record)


class Moment(NamedTuple):
    """A point of a recording: a time of day, seconds after its first message, or a sequence number."""

    time_s: float | None = None
    after_s: float | None = None
    seq: int | None = None

    def within(self, recording: "Recording") -> "Moment":
        """The same moment, by the recorder's clock if it is a time."""
        if self.after_s is None:
            return self
        return Moment(self.after_s + next((record.time for record in recording.records()), 0.0))


class Recording:
    """A recording that is read. `damage` tells what of it could not be used, as far as it was read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        self.size = size
        self._damage: dict[int, Damage] = {}
        if self._data[: len(MAGIC)] != MAGIC:
            raise BadRecording(f"{self.path} is not a recording of warmroute (it starts with {self._data[:8]!r})")
        body = self._body(len(MAGIC))
        try:
            self.header = msgspec.msgpack.decode(body or b"", type=Header)
        except msgspec.DecodeError as error:
            raise BadRecording(f"{self.path}: the header cannot be read: {error}") from error
        self.sources = self.header.sources
        self._start = len(MAGIC) + HEAD_BYTES + len(body or b"")

    @property
    def damage(self) -> list[Damage]:
        return sorted(self._damage.values())

    def records(self, source: Source | None = None) -> Iterator[Record]:
        """All records, or those of one source."""
        number = None if source is None else [own.name for own in self.sources].index(source.name)
        decode = msgspec.msgpack.Decoder(Record).decode
        offset = self._start
        while offset < self.size:
            try:
                if (body := self._body(offset)) is None:
                    raise msgspec.DecodeError("the frame is not whole")
                record = decode(body)
            except msgspec.DecodeError:
                found = self._data.find(MARK, offset + 1)
                while found >= 0 and self._body(found) is None:
                    found = self._data.find(MARK, found + 1)
                what = "damaged; it was skipped"
                if found < 0:
                    found, what = self.size, "the end is cut off or damaged; it was left out"
                self._damage[offset] = Damage(offset, found - offset, what)
                offset = found
                continue
            offset += HEAD_BYTES + len(body)
            if number in (None, record.source):
                yield record

    def replay_into(
        self,
        view: CacheView,
        source: Source,
        until: Moment | None = None,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        """Feed the frames that the recorder got, in the same order and at the recorded times.

        `on_record` is called before each record of the source is fed.
        """
        until = (until or Moment()).within(self)
        for record in self.records(source):
            if until.time_s is not None and record.time > until.time_s:
                return
            if on_record is not None:
                on_record(record)
            feed_record(view, record)
            if until.seq is not None and view.stream.last_seq >= until.seq:
                return

    def _body(self, offset: int) -> bytes | None:
        """The body of the frame at this offset, if it is whole."""
        data, start = self._data, offset + HEAD_BYTES
        if data[offset : offset + len(MARK)] != MARK:
            return None
        length = int.from_bytes(data[offset + 4 : offset + 8], "little")
        body = data[start : start + length]
        whole = len(body) == length and zlib.crc32(body) == int.from_bytes(data[offset + 8 : start], "little")
        return body if whole and start <= self.size else None


def feed_record(view: CacheView, record: Record) -> None:
    """Give one record to the view of its source; the requests that follow were sent back then."""
    at_s = record.time + TICK_LATE_S if record.kind == "tick" else record.time
    for request in view.receive(record.kind, record.frames, at_s):
        view.asked(type(request).__name__.lower())
