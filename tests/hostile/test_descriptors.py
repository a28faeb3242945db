"""Descriptors of peers that have left an event socket are given to other connections of the process."""

import socket as network
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import zmq

from events.sockets.peers import Peers, PublisherStats


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.002)


def is_open(socket: network.socket) -> bool:
    socket.setblocking(False)
    try:
        return socket.recv(1) != b""
    except BlockingIOError:
        return True


def test_connections_of_others_are_neither_counted_nor_shut() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket, ExitStack() as stack:
        socket.linger = 0
        watched = stack.enter_context(closing(Peers(socket, 2, PublisherStats())))
        socket.bind("tcp://127.0.0.1:0")
        port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        server = stack.enter_context(network.create_server(("127.0.0.1", 0)))
        peers = [network.create_connection(("127.0.0.1", port)) for _ in range(4)]
        for peer in peers:
            assert peer.recv(10)  # a greeting: it was accepted
        for peer in peers:
            peer.shutdown(network.SHUT_WR)
            while peer.recv(1000):
                pass  # until libzmq has closed its end
            peer.close()
        mine = []
        for _ in range(6):
            mine.append(stack.enter_context(network.create_connection(server.getsockname())))
            mine.append(stack.enter_context(server.accept()[0]))
        watched.watch()
        assert len(watched) == 0
        assert all(map(is_open, mine))


def test_peers_of_a_unix_socket_are_counted() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket, ExitStack() as stack:
        socket.linger = 0
        watched = stack.enter_context(closing(Peers(socket, 5, PublisherStats())))
        socket.bind("ipc://*")
        peers = [stack.enter_context(context.socket(zmq.SUB)) for _ in range(2)]
        for peer in peers:
            peer.connect(socket.getsockopt_string(zmq.LAST_ENDPOINT))

        def counted() -> bool:
            watched.watch()
            return len(watched) == 2

        until(counted)
