"""Collectives of one replica's ranks, which are processes of one machine: through memory that they share.

Each rank writes its tensor to a buffer of its own, tells all others over sockets, and reads theirs once they have told
it. A rank writes to the same buffer again only two collectives later. Until then every other rank has told it of the
collective between, and so has read the first.

In float32 a row's result has to be the same to the last bit whatever batch it stands in (decision 0009), so partial
results are added rank by rank.
"""

import mmap
import socket
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from replica.parallel.shares import Share

BUFFER_BYTES = 1 << 20  # longer tensors go in pieces, which stay in the processor's cache
# Ranks reach a collective at nearly the same time; one that comes so late hangs.
TIMEOUT_S = 300.0
TURN = b"."


class RankLostError(ConnectionError):
    """Another rank has died or hangs."""


class Group:
    """The connections to all other ranks; each collective is called by all of them, in the same order."""

    def __init__(self, share: Share, memory_fd: int, peers: Sequence[socket.socket]) -> None:
        """The memory is of `memory_size`; peers are in the order of ranks, without this one."""
        memory = mmap.mmap(memory_fd, memory_size(share.size))
        self._rank = share.rank
        self._buffers = torch.frombuffer(memory, dtype=torch.uint8).view(2, share.size, BUFFER_BYTES)
        self._turn = 0
        self._peers = peers
        for peer in peers:
            peer.settimeout(TIMEOUT_S)

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks, added in their order. May reuse `partial`."""
        partial = partial.contiguous()
        for piece in _pieces(partial):
            first, second, *others = self._exchanged(piece)
            torch.add(first, second, out=piece)
            for other in others:
                piece += other
        return partial

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape, on the first one, and none on the others."""
        gathered = [part.new_empty(part.shape) for _ in range(self._buffers.shape[1])] if self._rank == 0 else []
        targets = [_pieces(tensor) for tensor in gathered]
        for number, piece in enumerate(_pieces(part.contiguous())):
            for target, sent in zip(targets, self._exchanged(piece), strict=False):
                target[number].copy_(sent)
        return gathered

    def broadcast(self, rows: Tensor) -> Tensor:
        """Return the first rank's rows. May write to those of the others."""
        rows = rows.contiguous()
        for piece in _pieces(rows):
            sent = self._exchanged(piece)[0]
            if self._rank:
                piece.copy_(sent)
        return rows

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _exchanged(self, piece: Tensor) -> list[Tensor]:
        """Return the pieces of all ranks, until the next exchange but one."""
        buffers = self._buffers[self._turn, :, : piece.nbytes].view(piece.dtype).unbind()
        self._turn ^= 1
        buffers[self._rank].copy_(piece)
        try:
            for peer in self._peers:
                peer.send(TURN)
            for peer in self._peers:
                if not peer.recv(1):
                    raise RankLostError("another rank has ended")
        except OSError as error:
            raise RankLostError(str(error)) from error
        return list(buffers)


def connected(size: int) -> list[list[socket.socket]]:
    """Return each rank's sockets to all others, in their order."""
    peers: list[list[socket.socket]] = [[] for _ in range(size)]
    for one, other in combinations(range(size), 2):
        pair = socket.socketpair()
        peers[one].append(pair[0])
        peers[other].append(pair[1])
    return peers


def memory_size(ranks: int) -> int:
    return 2 * ranks * BUFFER_BYTES


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = tensor.view(-1).split(BUFFER_BYTES // tensor.itemsize)
    return pieces
