"""Limits of the picker's server that only broken or hostile gateways meet."""

import asyncio
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.router.http.picker.asking import asked, gateway
from tests.router.loopback import until
from tests.router.scripted import DEADLINE_S, named, served

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7


def frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readexactly(9)
    return head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_a_gateway_may_ping_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.picker.server.LEAST_PAUSE_MS", 0)
    async with served(named("one"), picker_listen="127.0.0.1:0") as running:
        assert running.front.picker is not None
        host, _, port = running.front.picker.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS) + frame(PING, b"12345678") * 20)
        kinds: list[int] = []
        async with asyncio.timeout(DEADLINE_S):
            while kinds.count(PING) < 20:
                kind, payload = await next_frame(reader)
                assert kind != GOAWAY, payload
                kinds.append(kind)
        writer.close()


async def test_a_body_that_is_picked_is_not_kept() -> None:
    async with served(named("one"), picker_listen="127.0.0.1:0") as running, gateway(running) as asking:
        stream = asking.stream()
        await stream.begin(asked("x" * 30_000))
        await stream.picked()
        [attempt] = running.router.attempts
        assert not attempt.owner.facts.body
        await stream.answer()
        await until(lambda: not running.router.bodies.used_bytes, "its bytes are given back")


def test_a_router_that_picks_may_start_processes() -> None:
    """As it does for large bodies. In a process of its own: gRPC has to be imported as a router does that."""
    script = "import router.http.picker.server; from tests.router.http.picker import starting; starting.main()"
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout == "{0}\n"
