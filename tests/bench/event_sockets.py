"""Measure a publisher's CPU and memory (before, peak, after) while peers misuse its sockets.

The publisher has a process of its own, the peers have another; a consumer that behaves asks for a replay every second.
"""

import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from events.blocks import block_keys, root_key
from events.messages import BlockStored, KnownEvent
from events.native import SNAPSHOT_REQUEST, Load
from events.publisher import Publisher, PublisherConfig
from tests.bench.measure import resident_bytes

BATCHES = 10_000
BLOCK, BLOCKS_PER_BATCH = 16, 16
ROOT = root_key("m", None, None, BLOCK)
ATTACK_S = 12.0
ANY = "tcp://127.0.0.1:0"
SILENT, HAMMERING, SUBSCRIBING = 60, 20, 1


def run(rounds: int) -> None:
    del rounds  # each is some ten seconds long
    print("| peers | before, MB | peak, MB | 5 s after they left, MB | CPU of the publisher | honest replay, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    attacks: dict[str, Callable[[dict[str, str]], None]] = {
        "none": nobody,
        f"{SILENT} that ask and do not read": silent,
        f"{HAMMERING} that ask without end": hammering,
        f"{SUBSCRIBING} that subscribes to topics of 1,000 bytes without end": subscribing,
    }
    for name, attack in attacks.items():
        measure(name, attack)


def measure(name: str, attack: Callable[[dict[str, str]], None]) -> None:
    command = [sys.executable, "-c", "from tests.bench.event_sockets import publish; publish()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as publisher:
        endpoints = json.loads(answer(publisher, ""))
        before = json.loads(answer(publisher, "figures"))
        peers = multiprocessing.get_context("spawn").Process(target=attack, args=(endpoints,))
        peers.start()
        most, cpu_s, replays = watched(publisher, endpoints, before)
        peers.kill()
        peers.join()
        time.sleep(5)
        after = json.loads(answer(publisher, "figures"))["mb"]
        answer(publisher, "end")
    share = f"{cpu_s / ATTACK_S:.0%} of a core"
    honest = f"{statistics.median(replays):.2f}" if replays else "none"
    print(f"| {name} | {before['mb']:.0f} | **{most:.0f}** | {after:.0f} | {share} | {honest} |", flush=True)


def answer(publisher: "subprocess.Popen[str]", question: str) -> str:
    assert publisher.stdin is not None and publisher.stdout is not None
    if question:
        publisher.stdin.write(f"{question}\n")
        publisher.stdin.flush()
    return publisher.stdout.readline()


def watched(
    publisher: "subprocess.Popen[str]", endpoints: dict[str, str], before: dict[str, Any]
) -> tuple[float, float, list[float]]:
    most, replays = before["mb"], []
    ends = time.monotonic() + ATTACK_S
    found = before
    while time.monotonic() < ends:
        began = time.monotonic()
        if replayed(endpoints["replay"], ends):
            replays.append(time.monotonic() - began)
        found = json.loads(answer(publisher, "figures"))
        most = max(most, found["mb"])
        time.sleep(max(0.0, min(1.0 - (time.monotonic() - began), ends - time.monotonic())))
    return most, found["cpu_s"] - before["cpu_s"], replays


def replayed(endpoint: str, until_s: float) -> bool:
    """Request a replay of the last tenth on a new connection, as a consumer after a gap does."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send_multipart([b"", (BATCHES * 9 // 10).to_bytes(8, "big")])
        while socket.poll(max(0, int((until_s - time.monotonic()) * 1000))):
            if socket.recv_multipart()[-1] == b"":
                return True
    return False


# ---- the publisher's process


def stored(number: int) -> list[KnownEvent]:
    chance = random.Random(number)
    tokens = [chance.randrange(150_000) for _ in range(BLOCK * BLOCKS_PER_BATCH)]
    return [BlockStored(list(block_keys(tokens, BLOCK, ROOT)), None, tokens, BLOCK, None, "GPU", None)]


def publish() -> None:
    config = PublisherConfig(events=ANY, replay=ANY, status=ANY, snapshot=ANY, topic="kv@replica@model")
    with Publisher(config) as publisher:
        for number in range(BATCHES):
            publisher.publish(stored(number))
        while publisher.seq < BATCHES - 1:
            publisher.report(Load())
            time.sleep(0.05)
        ends = publisher.endpoints
        print(
            json.dumps({name: getattr(ends, name) for name in ("events", "replay", "status", "snapshot")}), flush=True
        )
        for question in sys.stdin:
            if question.strip() == "end":
                print("ended", flush=True)
                return
            print(json.dumps({"mb": resident_bytes() / 1e6, "cpu_s": time.process_time()}), flush=True)
            publisher.publish(stored(0))
            publisher.report(Load())


# ---- the peers' process


def nobody(_: dict[str, str]) -> None:
    time.sleep(2 * ATTACK_S)


def silent(endpoints: dict[str, str]) -> None:
    sockets = [asked(endpoints) for _ in range(SILENT)]
    while sockets:
        time.sleep(1)


def hammering(endpoints: dict[str, str]) -> None:
    peers = [asked(endpoints) for _ in range(HAMMERING)]
    while True:
        for replay, snapshot in peers:
            for socket, request in ((replay, bytes(8)), (snapshot, SNAPSHOT_REQUEST)):
                for _ in range(10):
                    if socket.poll(0, zmq.POLLOUT):
                        socket.send_multipart([b"", request])


def asked(endpoints: dict[str, str]) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
    sockets = []
    for name, request in (("replay", bytes(8)), ("snapshot", SNAPSHOT_REQUEST)):
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvhwm = 1
        socket.rcvbuf = 4096
        socket.connect(endpoints[name])
        socket.send_multipart([b"", request])
        sockets.append(socket)
    return sockets[0], sockets[1]


def subscribing(endpoints: dict[str, str]) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XSUB)
    socket.linger = 0
    socket.connect(endpoints["events"])
    with Path("/dev/urandom").open("rb") as noise:
        while True:
            if socket.poll(1000, zmq.POLLOUT):
                socket.send(b"\x01" + noise.read(1000))
