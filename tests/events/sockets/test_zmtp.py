"""The protocol of event sockets, cut into pieces of any size, and what breaks its rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.sockets.zmtp import COMMAND, GREETING, MAX_PARTS, MORE, Zmtp, ZmtpError, frame, message

READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00", COMMAND)
MAX_BYTES = 1000


def subscriber() -> Zmtp:
    made = Zmtp(b"SUB", MAX_BYTES)
    made.feed(GREETING + READY)
    assert made.take(10) == [] and made.ready
    return made


@given(
    st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=5),
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_messages_are_the_same_however_they_are_cut(messages: list[list[bytes]], cuts: list[int], turn: int) -> None:
    sent = GREETING + READY + b"".join(frame(b"\x07UNKNOWN", COMMAND) + message(parts) for parts in messages)
    zmtp, received = Zmtp(b"SUB", MAX_BYTES), []
    while sent:
        cut = cuts.pop() if cuts else len(sent)
        zmtp.feed(sent[:cut])
        sent = sent[cut:]
        zmtp.more = True
        while zmtp.more:
            received += zmtp.take(turn)
    assert received == messages


def test_a_heartbeat_is_answered_with_its_context() -> None:
    zmtp = subscriber()
    zmtp.feed(frame(b"\x04PING\x00\x0acontext", COMMAND))
    assert zmtp.take(10) == []
    assert zmtp.reply == frame(b"\x04PONGcontext", COMMAND)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(b"", MORE) * MAX_PARTS, f"more than {MAX_PARTS} parts"),
        (bytes([2]) + (MAX_BYTES + 1).to_bytes(8, "big"), "more than 1,000 bytes"),
        (frame(bytes(600), MORE) + frame(bytes(401))[:9], "more than 1,000 bytes"),
        (bytes([COMMAND | 2]) + b"\xff" * 8, "more than 1,000 bytes"),
        (frame(b"\x05ERROR\x06get out", COMMAND), "get out"),
    ],
)
def test_what_is_too_much_ends_the_connection_before_it_is_read(sent: bytes, why: str) -> None:
    zmtp = subscriber()
    zmtp.feed(sent)
    with pytest.raises(ZmtpError, match=why):
        zmtp.take(100)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        GREETING[:10] + b"\x01",
        GREETING.replace(b"NULL\0", b"CURVE"),
        GREETING + frame(b"event"),
        GREETING + READY.replace(b"PUB", b"REQ"),
        GREETING + frame(b"\x04PING\x00\x00", COMMAND),
        GREETING + frame(b"", COMMAND),
        GREETING + frame(b"\x05READY\xff", COMMAND),
    ],
)
def test_another_handshake_is_none(sent: bytes) -> None:
    zmtp = Zmtp(b"SUB", MAX_BYTES)
    zmtp.feed(sent)
    with pytest.raises(ZmtpError):
        zmtp.take(10)
