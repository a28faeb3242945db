"""The adapters that a device computes with, each in a slot of tables that kernels and graphs read."""

from collections.abc import Collection

import torch
from torch import Tensor

from kernels.adapters import ROOM, Table, Tiles, blank
from kernels.pointwise import Pointwise
from replica.lora.adapter import Adapters, Place

NONE = 0  # the slot of an adapter that changes nothing
ANY = ""  # its name, which none that is loaded has


class Slots:
    def __init__(self, adapters: Adapters, device: torch.device) -> None:
        loaded = adapters.loaded
        places = [(layer, place) for place in Place for layer in range(adapters.layers)]
        numbers = blank(len(places), 1 + len(loaded), device)
        self.tables = {
            (layer, place): Table(row, adapters.evenness[place])
            for (layer, place), row in zip(places, numbers, strict=True)
        }
        self.numbers = {name: slot for slot, name in enumerate(loaded, 1)} | {ANY: NONE}
        for slot, adapter in enumerate(loaded.values(), 1):
            numbers[:, slot] = torch.tensor([self.tables[each].put(slot, adapter.changes.get(each)) for each in places])
        self._rooms = {name: adapter.room for name, adapter in loaded.items()}

    def room(self, names: Collection[str]) -> int:
        """Return the room for ranks that a step with these adapters needs, or a graph's if that is more.

        A step with `ANY` rehearses one with the widest.
        """
        return max([ROOM, *(self._rooms[name] for name in (self._rooms if ANY in names else names))])


class SlottedRows:
    """The rows of a device's step with adapters; a graph knows them only when it is replayed."""

    def __init__(self, slots: Slots, tiles: Tiles, room: int, pointwise: Pointwise) -> None:
        self._tables = slots.tables
        self._tiles = tiles
        self._room = room
        self._pointwise = pointwise

    def add(self, layer: int, place: Place, inputs: Tensor, product: Tensor) -> None:
        self._pointwise.adapt(inputs, product, self._tables[layer, place], self._tiles, self._room)
