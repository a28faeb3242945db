"""A step's inputs, and the block tables of all running requests, of which a step sends only the new entries.

Inputs are written by the host into one piece of memory, sent in one copy, and read on the device in views.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replica.device.accelerator import Accelerator
from replica.runners.request import Request

ALIGNED = 16  # bytes, so that kernels are compiled for that alone


class Counts(NamedTuple):
    """The numbers that decide how long the arrays are, and so where they lie."""

    rows: int
    sequences: int
    tiles: int = 0  # tiles of rows with adapters


class Inputs(NamedTuple):
    """On the device."""

    token_ids: Tensor  # ids by row; -1 - i is the token that the step before drew in its place i
    positions: Tensor
    slots: Tensor
    table_rows: Tensor  # rows by sequence
    lengths: Tensor
    starts: Tensor  # one more: the end
    last_rows: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    points: Tensor  # numbers in [0, 1) that draw the tokens
    decoding: Tensor  # one number: sequences
    adapted: Tensor  # the rows of `kernels.adapters.Tiles`
    tiles: Tensor  # and the tiles, three numbers each


class Place(NamedTuple):
    dtype: type[np.generic]
    begin: int  # an offset in bytes
    end: int


def places_of(counts: Counts) -> dict[str, Place]:
    rows, sequences, tiles = counts
    lengths: dict[str, tuple[type[np.generic], int]] = {
        "token_ids": (np.int64, rows),
        "positions": (np.int64, rows),
        "slots": (np.int64, rows),
        "table_rows": (np.int64, sequences),
        "lengths": (np.int32, sequences),
        "starts": (np.int32, sequences + 1),
        "last_rows": (np.int64, sequences),
        "temperatures": (np.float32, sequences),
        "top_ks": (np.int32, sequences),
        "top_ps": (np.float32, sequences),
        "min_ps": (np.float32, sequences),
        "points": (np.float64, sequences),
        "decoding": (np.int32, 1),
        "adapted": (np.int32, rows if tiles else 0),
        "tiles": (np.int32, 3 * tiles),
    }
    places, begin = {}, 0
    for name, (dtype, length) in lengths.items():
        end = begin + length * np.dtype(dtype).itemsize
        places[name] = Place(dtype, begin, end)
        begin = -(-end // ALIGNED) * ALIGNED
    return places


class Staging:
    """Two pieces of host memory take turns: while the device may still read one, the next step goes into the other."""

    def __init__(self, largest: Counts, accelerator: Accelerator) -> None:
        size = max(place.end for place in places_of(largest).values())
        self._hosts = [accelerator.host_bytes(size) for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=accelerator.device)
        self._views: dict[Counts, Inputs] = {}  # views of those that graphs are made of

    @property
    def nbytes(self) -> int:
        return self._device.nbytes

    def send(self, counts: Counts, arrays: Mapping[str, NDArray[Any]]) -> Inputs:
        """All but the end of each array is given, and the rest is zero."""
        self._hosts.reverse()
        places, host = places_of(counts), self._hosts[0].numpy()
        size = max(place.end for place in places.values())
        host[:size] = 0
        for name, (dtype, begin, end) in places.items():
            given = arrays[name]
            host[begin:end].view(dtype)[: len(given)] = given
        self._device[:size].copy_(self._hosts[0][:size], non_blocking=True)
        return self._views.get(counts) or self._views_of(places)

    def fixed(self, counts: Counts) -> Inputs:
        """The memory that inputs of these counts always have."""
        return self._views.setdefault(counts, self._views_of(places_of(counts)))

    def _views_of(self, places: Mapping[str, Place]) -> Inputs:
        return Inputs(
            **{
                name: self._device[begin:end].view(getattr(torch, np.dtype(dtype).name))
                for name, (dtype, begin, end) in places.items()
            }
        )


# ---- block tables

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
    """Tables for `count` requests of up to `width` blocks, and an empty row for padding."""

    def __init__(self, count: int, width: int, accelerator: Accelerator) -> None:
        self.table = torch.zeros(count + 1, width, dtype=torch.int32, device=accelerator.device)
        self.mirror = np.zeros((count + 1, width), np.int32)  # the host's
        self.width = width
        self.empty_row = count
        self._free = list(range(count))
        self._taken: dict[int, Row] = {}
        self._places: list[Numbers] = []
        self._blocks: list[Numbers] = []
        self._accelerator = accelerator
        self._hosts = [accelerator.host_bytes(UPDATE_BYTES) for _ in range(2)]  # used in turn, as the inputs' are

    def of(self, requests: Sequence[Request]) -> list[int]:
        """The row of each, with all of its blocks on the host; `deliver` tells the device."""
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

    def deliver(self) -> None:
        """Send what was written since the last call to the device, in the order of its work."""
        if not self._places:
            return
        news = np.concatenate((*self._places, *self._blocks))
        self._places.clear()
        self._blocks.clear()
        self._hosts.reverse()
        if self._hosts[0].numel() < news.nbytes:
            self._hosts[0] = self._accelerator.host_bytes(2 * news.nbytes)
        host = self._hosts[0][: news.nbytes]
        host.numpy().view(np.int64)[:] = news
        places, blocks = host.to(self.table.device, non_blocking=True).view(torch.int64).view(2, -1)
        self.table.view(-1)[places] = blocks.int()
