"""The adapters that a device's graphs can compute with, each in a slot of tables that graphs read."""

from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor

from kernels.adapters import Table
from kernels.pointwise import Pointwise
from replica.lora.adapter import Adapter, Adapters, Place

NONE = 0  # the slot of rows without an adapter


class Slots:
    """Adapters come into a slot when a step first has rows of them, and stay while they are loaded."""

    def __init__(self, adapters: Adapters, layers: int, most: int, device: torch.device) -> None:
        """`most`: adapters that may be loaded at a time."""
        self.tables = {(layer, place): Table(1 + most, device) for layer in range(layers) for place in Place}
        self._adapters = adapters
        # An adapter that is unloaded gives its memory back at once. Its slot has no rows from then on.
        self._held: list[Callable[[], Adapter | None]] = [lambda: None] * (1 + most)

    def fits(self, names: Sequence[str | None]) -> bool:
        """Tell whether graphs can compute with all of these."""
        return all(self._adapters.loaded[name].fits_tables for name in names if name is not None)

    def of(self, name: str | None) -> int:
        """Return the adapter's slot, which it takes now if it has none."""
        if name is None:
            return NONE
        adapter = self._adapters.loaded[name]
        for slot, held in enumerate(self._held):
            if held() is adapter:
                return slot
        there = {id(one) for one in self._adapters.loaded.values()}
        free = next(slot for slot in range(1, len(self._held)) if id(self._held[slot]()) not in there)
        self._held[free] = ref(adapter)
        for where, table in self.tables.items():
            table.put(free, adapter.changes.get(where))
        return free


class SlottedRows:
    """The rows of a graph's step, whose adapters are known only when it is replayed."""

    def __init__(self, slots: Slots, of_rows: Tensor, pointwise: Pointwise) -> None:
        self._tables = slots.tables
        self._of_rows = of_rows
        self._pointwise = pointwise

    def add(self, layer: int, place: Place, inputs: Tensor, product: Tensor) -> None:
        self._pointwise.adapt(inputs, product, self._tables[layer, place], self._of_rows)
