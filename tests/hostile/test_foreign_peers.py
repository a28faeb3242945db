"""A peer without keys: another user of the machine takes the port that it should have."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.workers.peer_links import TOPIC
from tests.hostile.nobody import NOBODY
from tests.router.loopback import until
from tests.router.scripted import Scripted, says, served
from tests.router.workers.test_peer_links import ANY

PEER = f"""
import os, sys, time, msgspec, zmq
from router.placement.outbox import PeerBatch
socket = zmq.Context().socket(zmq.PUB)
os.setuid(int(sys.argv[2]))
socket.bind(sys.argv[1])
print(socket.get(zmq.LAST_ENDPOINT).rstrip(bytes(1)).decode(), flush=True)
number = 0
while True:
    batch = PeerBatch(router=int(sys.argv[2]) + 1, number=number, at_s=time.time())
    socket.send_multipart([{TOPIC!r}, msgspec.msgpack.encode(batch)])
    number += 1
    time.sleep(0.05)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def peer_of(user: int, at: str = "tcp://127.0.0.1:*") -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", PEER, at, str(user)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


async def test_a_peer_of_another_user_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    with peer_of(NOBODY) as theirs, peer_of(0) as ours:  # the second is the control
        async with served(Scripted("r0", says(b"{}")), peer_listen=ANY, peers=(theirs, ours)) as running:
            links = running.front.links
            assert links is not None
            await until(lambda: set(links.inbox.peers) == {1}, "ours is heard, and only that")
            assert f"the peer {theirs} is not heard: a program of user {NOBODY} listens there" in caplog.text
