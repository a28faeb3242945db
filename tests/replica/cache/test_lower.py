"""The order in which slots of lower media are given up, written and erased."""

from collections.abc import Sequence

from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.lower import LowerTiers
from replica.cache.moves import Write, Written
from replica.cache.tier import Tier
from replica.disk.record import Record, Recovered, Recovery
from tests.replica.engines import SIZE, admit, chain, serve


def tiered(num_blocks: int, host_slots: int, disk_slots: int = 0) -> tuple[BlockPool, LowerTiers]:
    pool = BlockPool(num_blocks, SIZE, host_slots=host_slots, disk_slots=disk_slots)
    assert pool.lower is not None
    return pool, pool.lower


def save(lower: LowerTiers) -> list[Write]:
    """Carry out what is to be saved; return what is to be written."""
    return lower.saved(lower.take_saves())


def write(lower: LowerTiers, writes: Sequence[Write], *, done: bool = True) -> None:
    lower.written([Written(one, done) for one in writes])


def disk_of(lower: LowerTiers) -> Tier:
    assert lower.disk is not None
    return lower.disk


def prompt(first: int, blocks: int) -> Chain:
    return chain(range(first, first + blocks * SIZE))


def evict(pool: BlockPool, blocks: int) -> None:
    """Have the first blocks of the free queue given up."""
    taken = pool.take((), blocks)
    assert taken is not None
    pool.release(taken)


def test_the_end_of_a_prompt_that_goes_to_the_host_in_parts_leaves_it_before_its_head() -> None:
    pool, lower = tiered(num_blocks=5, host_slots=4)
    own = prompt(0, 4)
    serve(pool, own)
    pool.take((), 1)  # the empty one
    for _ in range(2):
        pool.take((), 2)
    save(lower)
    assert lower.host.resident() == set(own.keys)
    lower.host.take(3)
    assert lower.host.resident() == {own.keys[0]}


def test_the_end_of_a_prompt_leaves_host_and_disk_before_its_head_also_once_it_is_written() -> None:
    pool, lower = tiered(num_blocks=5, host_slots=16, disk_slots=4)
    own = prompt(0, 4)
    serve(pool, own)
    writes = save(lower)
    write(lower, writes[:2])
    write(lower, writes[2:])
    disk = disk_of(lower)
    assert lower.host.resident() == disk.resident() == set(own.keys)
    lower.host.take(15)
    disk.take(3)
    assert lower.host.resident() == disk.resident() == {own.keys[0]}


def test_what_will_not_come_again_goes_to_no_lower_medium() -> None:
    pool, lower = tiered(num_blocks=2, host_slots=8, disk_slots=4)
    blocks = admit(pool, own := prompt(0, 2))
    pool.store(own, blocks, 2, lasting=False)
    pool.release(blocks, 0)
    evict(pool, 2)
    assert not lower.take_saves() and not lower.host.resident()


def test_a_slot_of_the_disk_is_not_erased_once_something_else_is_written_there() -> None:
    pool, lower = tiered(num_blocks=2, host_slots=8, disk_slots=1)
    first, second = prompt(0, 1), prompt(100, 1)
    serve(pool, first)
    write(lower, save(lower))
    slot = disk_of(lower).find(first.keys[0])
    lower.drop([slot])
    serve(pool, second)
    writes = save(lower)
    assert [one.slot for one in writes] == [slot]
    assert lower.take_erasures() == []
    write(lower, writes)
    assert disk_of(lower).resident() == set(second.keys)
    assert lower.take_erasures() == []


def test_of_two_records_with_one_key_the_first_is_restored() -> None:
    """Keys collide, and a disk may be made up."""
    pool, lower = tiered(num_blocks=2, host_slots=8, disk_slots=4)
    tokens = [chain(range(first, first + SIZE)).tokens.tobytes() for first in (0, 100)]
    records = [Record(7, identity, 0, content) for identity, content in enumerate(tokens, 1)]
    lower.restore(Recovery([Recovered(slot, record) for slot, record in enumerate(records)], 10))
    pool.check()
    assert disk_of(lower).resident() == {7}
    assert disk_of(lower).slots().tolist() == [disk_of(lower).first]


def test_a_prompt_that_a_neighbour_has_read_leaves_the_host_first_but_not_what_it_shares() -> None:
    pool, lower = tiered(num_blocks=8, host_slots=6)
    head = range(2 * SIZE)
    read, other = (chain([*head, *range(first, first + 2 * SIZE)]) for first in (100, 200))
    serve(pool, read)
    serve(pool, other)
    evict(pool, 8)
    save(lower)
    assert lower.host.resident() == {*read.keys, *other.keys}
    slots = [lower.host.find(key) for key in read.keys]
    lower.hold(slots)
    lower.release_read(slots)
    lower.host.take(2)
    assert lower.host.resident() == set(other.keys), "another prompt goes on from the head"
    lower.host.take(2)
    assert lower.host.resident() == set(other.keys[:2])
    pool.check()


def test_a_fork_is_remembered_while_a_block_moves_between_media() -> None:
    pool, lower = tiered(num_blocks=4, host_slots=12)
    head = range(2 * SIZE)
    for first in (100, 200):  # each loads the head again, or finds it
        own = chain([*head, *range(first, first + 2 * SIZE)])
        match = pool.match(own)
        lower.hold(match.lower)
        blocks = pool.take(match.blocks, 4 - len(match.blocks))
        assert blocks is not None
        save(lower)
        own.named, own.identity = len(match.blocks), match.identity
        pool.store(own, blocks, 4)
        lower.release(match.lower, loaded=True)
        pool.release(blocks)
        evict(pool, 4)
        save(lower)
    slots = [lower.host.find(key) for key in own.keys]
    lower.hold(slots)
    lower.release_read(slots)
    lower.host.take(10)  # six are empty, two the read prompt's own, two the other one's
    assert set(own.keys[:2]) <= lower.host.resident()
