"""Block tables, inputs, graph sizes and memory shares, each separately."""

from array import array

import numpy as np
import pytest
import torch

from replica.cache.chain import Chain
from replica.device.accelerator import Memory
from replica.device.build import GRAPH_BYTES, Needs, blocks_that_fit, graphs_bytes
from replica.device.inputs import (
    UPDATE_BYTES,
    BlockTables,
    Counts,
    Inputs,
    Staging,
)
from replica.device.sizes import MAX_MIXED, Size, decode_sizes, mixed_sizes, size_for
from replica.messages import Sampling
from replica.runners.request import Request
from tests.replica.device.hosts import HostAccelerator


def request(number: int, blocks: list[int]) -> Request:
    made = Request(number, Chain(array("I", [1]), 4, "m"), 1, Sampling(max_tokens=1), (0.0, number))
    made.blocks = blocks
    return made


class Watched(HostAccelerator):
    """Its host memory can be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[torch.Tensor] = []

    def host_bytes(self, size: int) -> torch.Tensor:
        self.hosts.append(super().host_bytes(size))
        return self.hosts[-1]


def row(tables: BlockTables, number: int, length: int) -> list[int]:
    tables.deliver()
    on_host, on_device = tables.mirror[number, :length].tolist(), tables.table[number, :length].tolist()
    assert on_host == on_device
    return list(on_host)


# ---- tables


def test_a_seat_is_kept_and_gets_only_what_is_new() -> None:
    tables = BlockTables(3, 8, HostAccelerator())
    one = request(1, [5, 6])
    (number,) = tables.of([one])
    assert row(tables, number, 2) == [5, 6]
    one.blocks += [9]
    tables.table[number, 0] = 77  # nobody writes here again
    assert tables.of([one]) == [number]
    tables.deliver()
    assert tables.table[number, :3].tolist() == [77, 6, 9]


def test_a_request_that_starts_over_gets_its_new_blocks() -> None:
    tables = BlockTables(1, 8, HostAccelerator())
    one = request(1, [5, 6, 7])
    (number,) = tables.of([one])
    one.blocks = [3, 4]
    assert tables.of([one]) == [number]
    assert row(tables, number, 2) == [3, 4]


def test_many_new_blocks_at_once_arrive() -> None:
    count = UPDATE_BYTES // 16 + 9
    tables = BlockTables(1, count, HostAccelerator())
    (number,) = tables.of([request(1, list(range(count)))])
    assert row(tables, number, count) == list(range(count))


def test_new_blocks_are_not_written_where_the_device_may_still_read() -> None:
    accelerator = Watched()
    tables, one = BlockTables(1, 8, accelerator), request(1, [])
    for block in (5, 6):
        one.blocks += [block]
        tables.of([one])
        tables.deliver()
    assert sorted(int(host[8]) for host in accelerator.hosts) == [5, 6]  # behind the place


# ---- inputs


def test_inputs_arrive_and_what_is_not_given_is_zero() -> None:
    staging = Staging(Counts(9, 4, 3), HostAccelerator())
    for counts in (Counts(9, 4, 3), Counts(9, 4), Counts(5, 3, 1), Counts(1, 1)):
        arrays = {name: np.arange(1, 2) for name in Inputs._fields}
        inputs = staging.send(counts, arrays)
        for name, found in inputs._asdict().items():
            assert found.tolist() == [1, *[0] * counts.rows][: len(found)], name
        assert len(inputs.positions) == counts.rows and len(inputs.starts) == counts.sequences + 1
        assert len(inputs.tiles) == 3 * counts.tiles and len(inputs.adapted) == (counts.rows if counts.tiles else 0)


def test_a_step_does_not_write_where_the_device_may_still_read() -> None:
    accelerator, counts = Watched(), Counts(2, 2)
    staging = Staging(counts, accelerator)
    for value in (1, 2):
        staging.send(counts, {name: np.array([value]) for name in Inputs._fields})
    assert sorted(int(host[0]) for host in accelerator.hosts) == [1, 2]


def test_inputs_of_a_graph_are_always_in_the_same_place() -> None:
    staging = Staging(Counts(8, 8), HostAccelerator())
    fixed = staging.fixed(Counts(4, 4))
    for counts in (Counts(8, 8), Counts(4, 4)):
        sent = staging.send(counts, {name: np.arange(1) for name in Inputs._fields})
    assert all(one.data_ptr() == other.data_ptr() for one, other in zip(fixed, sent, strict=True))


# ---- sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 16, 100, 256, 300, 1024])
def test_a_ladder_ends_at_the_largest_and_wastes_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == tuple(sorted(set(sizes))) and sizes[0] == 1 and sizes[-1] == largest
    for requests in range(1, largest + 1):
        size = size_for(sizes, requests)
        assert size is not None and requests <= size <= max(requests + 15, 2 * requests - 1)
    assert size_for(sizes, largest + 1) is None
    assert size_for((), 1) is None


LARGE, SMALL = 200_000_000, 20_000_000  # parameters of a layer


@pytest.mark.parametrize("largest", [1, 15, 16, 40, 64, 300, 512, 1900, 16_384])
def test_steps_with_prompts_have_one_of_their_own(largest: int) -> None:
    sizes = mixed_sizes(largest, SMALL)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == min(largest, MAX_MIXED)
    for rows in range(1, sizes[-1] + 1):
        size = size_for(sizes, rows)
        assert size is not None and rows <= size <= max(16, rows + 63, rows * 5 // 4)


# ---- memory


GB = 10**9
NEEDS = Needs(step=8 * GB, graphs=2 * GB)


def test_several_share_a_gpu_by_their_parts_of_it() -> None:
    """Memory of the first one is not counted for the second one."""
    left = 80 * GB - 36 * GB
    one = Memory(80 * GB, 80 * GB, 0), Memory(70 * GB, 80 * GB, 10 * GB)
    other = Memory(left, 80 * GB, 0), Memory(left - 10 * GB, 80 * GB, 10 * GB)
    first, second = (blocks_that_fit(*memory, 0.45, NEEDS, 16, 10**5) for memory in (one, other))
    assert first == second == 16 * GB // (16 * 10**5) - 1


def test_without_memory_left_the_error_names_its_users() -> None:
    before, loaded = Memory(20 * GB, 24 * GB, 0), Memory(5 * GB, 24 * GB, 15 * GB)
    said = r"0.9 of the GPU's 24.0 GB may be used .* others hold 4.0 GB; weights take 15.0 GB, a step 8.0 GB"
    with pytest.raises(MemoryError, match=said):
        blocks_that_fit(before, loaded, 0.9, NEEDS, 16, 10**5)


def test_graphs_are_counted_by_the_two_largest() -> None:
    sizes = [Size(True, rows, adapted=adapted) for rows in range(5, 0, -1) for adapted in (True, False)]
    assert graphs_bytes([100, 7], sizes) == 100 + 9 * 7 + 15 * GRAPH_BYTES
    assert graphs_bytes([100], sizes[1:2]) == 100 + GRAPH_BYTES
    assert graphs_bytes([], []) == 0
