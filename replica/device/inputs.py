"""A step's inputs: written by the host into one piece of memory, sent in one copy, read on the device in views."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replica.device.accelerator import Accelerator

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


TYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int64,
    "positions": np.int64,
    "slots": np.int64,
    "table_rows": np.int64,
    "lengths": np.int32,
    "starts": np.int32,
    "last_rows": np.int64,
    "temperatures": np.float32,
    "top_ks": np.int32,
    "top_ps": np.float32,
    "min_ps": np.float32,
    "points": np.float64,
    "decoding": np.int32,
    "adapted": np.int32,
    "tiles": np.int32,
}
BY_ROW = ("token_ids", "positions", "slots")


def length_of(name: str, counts: Counts) -> int:
    if name in BY_ROW:
        return counts.rows
    lengths = {"decoding": 1, "adapted": counts.rows if counts.tiles else 0, "tiles": 3 * counts.tiles}
    return lengths.get(name, counts.sequences + (name == "starts"))


class ByteRange(NamedTuple):
    begin: int  # an offset in bytes
    end: int


def places_of(counts: Counts) -> dict[str, ByteRange]:
    places, begin = {}, 0
    for name, kind in TYPES.items():
        end = begin + length_of(name, counts) * np.dtype(kind).itemsize
        places[name] = ByteRange(begin, end)
        begin = -(-end // ALIGNED) * ALIGNED
    return places


def end_of(places: Mapping[str, ByteRange]) -> int:
    return max(place.end for place in places.values())


def packed(counts: Counts, arrays: Mapping[str, NDArray[Any]]) -> memoryview:
    """The bytes of all arrays in their places; all but the end of each is given, and the rest is zero."""
    places = places_of(counts)
    whole = np.zeros(end_of(places), np.uint8)
    for name, (begin, end) in places.items():
        given = arrays[name]
        whole[begin:end].view(TYPES[name])[: len(given)] = given
    return whole.data


class Staging:
    """Two pieces of host memory take turns: while the device may still read one, the next step goes into the other."""

    def __init__(self, largest: Counts, accelerator: Accelerator) -> None:
        size = end_of(places_of(largest))
        self._hosts = [accelerator.host_bytes(size) for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=accelerator.device)
        self._views: dict[Counts, Inputs] = {}  # views of those that graphs are made of

    @property
    def nbytes(self) -> int:
        return self._device.nbytes

    def send(self, counts: Counts, inputs: memoryview) -> Inputs:
        """Send packed arrays to the device."""
        self._hosts.reverse()
        size = len(inputs)
        self._hosts[0].numpy()[:size] = np.frombuffer(inputs, np.uint8)
        self._device[:size].copy_(self._hosts[0][:size], non_blocking=True)
        return self._views.get(counts) or self._views_of(places_of(counts))

    def fixed(self, counts: Counts) -> Inputs:
        """The memory that inputs of these counts always have."""
        return self._views.setdefault(counts, self._views_of(places_of(counts)))

    def _views_of(self, places: Mapping[str, ByteRange]) -> Inputs:
        kinds = {name: torch.from_numpy(np.zeros(0, kind)).dtype for name, kind in TYPES.items()}
        return Inputs(**{name: self._device[begin:end].view(kinds[name]) for name, (begin, end) in places.items()})
