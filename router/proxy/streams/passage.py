"""Passes the events of a running stream on as they come, by one call for each read of the replica's socket.

A replica's connection has a passage for its protocol from the end of one event on; for anything else than another event
that only goes on it gets its own protocol again.
"""

import asyncio

from api.native import FRAME
from router.members.upstream import Connection
from router.proxy.attempt import BODY, MARK, MAX_ANSWER_IDS, MAX_CHOICES, Attempt
from router.proxy.streams.events import LONGEST_END, SentEvents


def let_pass(attempt: Attempt, events: SentEvents) -> None:
    """Let whole events pass from now on if one has just ended, or else none."""
    sending, frames = attempt.sending, attempt.frames
    if sending is None or sending.connection is None:
        return  # a gateway has the connection
    if not events.is_between or (frames is not None and frames.rest):
        sending.passage = None
    elif sending.passage is None:
        kind = Passage if frames is None else FramePassage
        sending.passage = kind(sending.connection, attempt, events.mark)


class Passage(asyncio.Protocol):
    """For chunks that are one event: of one line, longer than any last one, and with nothing to be read in it."""

    def __init__(self, connection: Connection, attempt: Attempt, mark: bytes) -> None:
        """`mark`: it has this if it gives the answer up."""
        self._connection, self._attempt, self._mark = connection, attempt, mark
        self._upstream, self._exchange, self._report = attempt.member.upstream, attempt.owner.exchange, attempt.report
        self._write = self._exchange.chunk_writer()

    def data_received(self, data: bytes) -> None:
        end = len(data) - 2
        start = 4 if end < 260 else 5 if end < 4101 else 6
        report = self._report
        if (
            end - start < LONGEST_END
            or not data.startswith(b"%x\r\n" % (end - start))
            or data.find(b"\n", start) != end - 2
            or not data.endswith(b"\n\r\n")
            or data.find(MARK) >= 0
            or data.find(self._mark) >= 0
            or report is None
        ):
            self._give_back(data)
            return
        self._attempt.spoken, self._upstream.spoken = BODY, True
        report.events += 1
        try:
            if self._write is not None:
                self._exchange.sent_bytes += end - start
                self._write(data)
            else:
                self._exchange.send(data[start:end])
        except Exception:  # it ends this request alone
            self._attempt.crash()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def _give_back(self, data: bytes) -> None:
        self._connection.transport.set_protocol(self._connection)
        self._connection.data_received(data)


class FramePassage(Passage):
    """For chunks that are one frame with such an event, and token ids."""

    def data_received(self, data: bytes) -> None:
        attempt, end = self._attempt, len(data) - 2
        start = 4 if end < 260 else 5 if end < 4101 else 6
        if end - start < FRAME.size or not data.startswith(b"%x\r\n" % (end - start)):
            self._give_back(data)
            return
        index, count, event_bytes = FRAME.unpack_from(data, start)
        event = start + FRAME.size + 4 * count
        if (
            event + event_bytes != end
            or event_bytes < LONGEST_END
            or data.find(b"\n", event) != end - 2
            or not data.endswith(b"\n\r\n")
            or index >= MAX_CHOICES
            or attempt.generated + count > MAX_ANSWER_IDS
        ):
            self._give_back(data)
            return
        attempt.spoken, self._upstream.spoken = BODY, True
        if count:
            attempt.generated += count
            attempt.token_ids.setdefault(index, []).append(data[event - 4 * count : event])
        try:
            self._exchange.send(data[event:end])
        except Exception:  # it ends this request alone
            attempt.crash()
