"""The block tables of all running requests, on host and device: a step sends only their new entries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from replica.device.accelerator import Accelerator
from replica.runners.request import Request

Numbers: TypeAlias = NDArray[np.int64]

UPDATE_BYTES = 1 << 16  # most steps need no more; there is more memory for others


@dataclass(slots=True, eq=False)
class Row:
    """A row of the tables. Blocks of a request are only added to its list; when it gives them back, it gets another."""

    number: int
    request: Request
    blocks: list[int]
    written: int = 0

    @property
    def is_stale(self) -> bool:
        return self.request.blocks is not self.blocks


class BlockTables:
    """The host's side: tables for `count` requests of up to `width` blocks, and an empty row for padding."""

    def __init__(self, count: int, width: int) -> None:
        self.mirror = np.zeros((count + 1, width), np.int32)
        self.width = width
        self.empty_row = count
        self._free = list(range(count))
        self._taken: dict[int, Row] = {}
        self._places: list[Numbers] = []
        self._blocks: list[Numbers] = []

    def of(self, requests: Sequence[Request]) -> list[int]:
        """The row of each, with all of its blocks on the host; `news` tells the device."""
        numbers = []
        for request in requests:
            row = self._taken.get(request.id)
            if row is None or row.is_stale:
                if row is None and not self._free:  # the end of a request is not reported; its missing blocks show it
                    for ended in [taken for taken, its in self._taken.items() if its.is_stale]:
                        self._free.append(self._taken.pop(ended).number)
                number = self._free.pop() if row is None else row.number
                self._taken[request.id] = row = Row(number, request, request.blocks)
            if row.written < len(row.blocks):
                new = np.array(row.blocks[row.written :], np.int64)
                begin = row.written
                row.written += len(new)
                self.mirror[row.number, begin : row.written] = new
                first = row.number * self.width
                self._places.append(np.arange(first + begin, first + row.written))
                self._blocks.append(new)
            numbers.append(row.number)
        return numbers

    def news(self) -> memoryview:
        """Return what has been written since the last call: places in the table, and as many blocks."""
        if not self._places:
            return memoryview(b"")
        news = np.concatenate((*self._places, *self._blocks))
        self._places.clear()
        self._blocks.clear()
        return news.data.cast("B")


class DeviceTables:
    """The device's side."""

    def __init__(self, count: int, width: int, accelerator: Accelerator) -> None:
        self.table = torch.zeros(count + 1, width, dtype=torch.int32, device=accelerator.device)
        self._accelerator = accelerator
        self._hosts = [accelerator.host_bytes(UPDATE_BYTES) for _ in range(2)]  # used in turn, as the inputs' are

    def deliver(self, news: memoryview) -> None:
        """Send new entries to the device, in the order of its work."""
        if not news:
            return
        self._hosts.reverse()
        if self._hosts[0].numel() < len(news):
            self._hosts[0] = self._accelerator.host_bytes(2 * len(news))
        host = self._hosts[0][: len(news)]
        host.numpy()[:] = np.frombuffer(news, np.uint8)
        places, blocks = host.to(self.table.device, non_blocking=True).view(torch.int64).view(2, -1)
        self.table.view(-1)[places] = blocks.int()
