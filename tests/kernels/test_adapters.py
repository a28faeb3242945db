"""Rows with adapters are cut into tiles, each of one adapter, of which there are no more than a graph has room for."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.adapters import TILE, Tiles, cut, most_tiles

ADAPTERS = 5
SLOTS = st.lists(
    st.tuples(st.integers(-1, ADAPTERS - 1), st.integers(1, 3 * TILE)).map(lambda run: [run[0]] * run[1]), max_size=12
).map(lambda runs: [slot for run in runs for slot in run])


@given(SLOTS)
def test_each_row_with_an_adapter_is_in_one_tile_of_its_adapter(slots: list[int]) -> None:
    rows, tiles = cut(np.array(slots, np.int32))
    found = [(slot, row) for slot, begin, end in tiles.tolist() for row in rows[begin:end].tolist()]
    assert sorted(found) == sorted((slot, row) for row, slot in enumerate(slots) if slot >= 0)
    assert all(0 < end - begin <= TILE for _, begin, end in tiles.tolist())
    assert len(tiles) <= most_tiles(len(slots), ADAPTERS)


@given(SLOTS)
def test_a_whole_adapters_rows_are_found_again(slots: list[int]) -> None:
    rows, tiles = cut(np.array(slots, np.int32))
    spare = np.pad(tiles, ((0, 2), (0, 0)))  # as graphs have them
    of_slots = Tiles(torch.from_numpy(rows), torch.from_numpy(spare)).by_slot
    found = [(slot, sorted(of_slot.tolist())) for slot, of_slot in of_slots]
    assert found == [(slot, [row for row, one in enumerate(slots) if one == slot]) for slot in sorted({*slots} - {-1})]
