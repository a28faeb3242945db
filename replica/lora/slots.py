"""The adapters that a device computes with, each in a slot of tables that kernels and graphs read."""

from collections.abc import Callable, Collection
from weakref import ref

import torch
from torch import Tensor

from kernels.adapters import ROOM, Table, Tiles, blank
from kernels.pointwise import Pointwise
from replica.lora.adapter import Adapter, Adapters, Place

NONE = 0  # the slot of an adapter that changes nothing
ANY = ""  # its name, which none that is loaded has


class Slots:
    """Adapters come into a slot when a step first has rows of them, and stay while they are loaded."""

    def __init__(self, adapters: Adapters, most: int, device: torch.device) -> None:
        """`most`: adapters that may be loaded at a time."""
        places = [(layer, place) for place in Place for layer in range(adapters.layers)]
        self._numbers = blank(len(places), 1 + most, device)
        self.tables = {
            (layer, place): Table(numbers, adapters.evenness[place])
            for (layer, place), numbers in zip(places, self._numbers, strict=True)
        }
        self._adapters = adapters
        # An adapter that is unloaded gives its memory back at once. Its slot has no rows from then on.
        self._held: list[Callable[[], Adapter | None]] = [lambda: None] * (1 + most)

    def room(self, names: Collection[str]) -> int:
        """Return the room for ranks that a step with these adapters needs, or a graph's if that is more.

        A step with `ANY` rehearses one with the widest.
        """
        loaded = self._adapters.loaded
        return max([ROOM, *(loaded[name].room for name in (loaded if ANY in names else names))])

    def of(self, name: str) -> int:
        """Return the adapter's slot, which it takes now if it has none."""
        if name == ANY:
            return NONE
        adapter = self._adapters.loaded[name]
        for slot, held in enumerate(self._held):
            if held() is adapter:
                return slot
        there = {id(one) for one in self._adapters.loaded.values()}
        free = next(slot for slot in range(1, len(self._held)) if id(self._held[slot]()) not in there)
        self._held[free] = ref(adapter)
        # The device's order puts it behind the steps that may still read the slot.
        numbers = [table.put(free, adapter.changes.get(where)) for where, table in self.tables.items()]
        self._numbers[:, free] = torch.tensor(numbers)
        return free


class SlottedRows:
    """The rows of a device's step with adapters; a graph knows them only when it is replayed."""

    def __init__(self, slots: Slots, tiles: Tiles, room: int, pointwise: Pointwise) -> None:
        self._tables = slots.tables
        self._tiles = tiles
        self._room = room
        self._pointwise = pointwise

    def add(self, layer: int, place: Place, inputs: Tensor, product: Tensor) -> None:
        self._pointwise.adapt(inputs, product, self._tables[layer, place], self._tiles, self._room)
