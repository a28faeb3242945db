"""The pool with lower media against the dumb model of it: lists of slots, and contents as whole token prefixes.

Saves, loads and writes end in any number, at any time, and some fail. What the events of all media say is compared with
what is there, in the publisher's own copy, in a consumer's, and in a router's index.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from numpy.typing import NDArray

from events.cache.resolver import Resolver
from events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from events.mirror import Mirror
from replica.cache.block_pool import NONE_KNOWN
from replica.cache.contents import Contents
from replica.cache.lower import DIRTY_FRACTION, DISK, HOST, LowerTiers
from replica.cache.moves import Save, Write, Written
from replica.cache.tier import Tier
from router.placement.index import PrefixIndex
from tests.replica.cache.test_block_pool_property import MODEL, Content, Held, Model, World, indices, keys_of
from tests.replica.careless import run_careless


class Entry(NamedTuple):
    """A named block or slot; a content that is forgotten everywhere and comes again gets another identity."""

    key: int
    content: Content
    identity: int
    parent: int


class Medium:
    """A lower medium on the blackboard."""

    def __init__(self, first: int, slots: int) -> None:
        self.slots = slots
        self.queue = list(range(first, first + slots))
        self.named: dict[int, Entry] = {}
        self.holders: Counter[int] = Counter()

    def find(self, key: int) -> int | None:
        return next((slot for slot, entry in self.named.items() if entry.key == key), None)

    def has(self, entry: Entry) -> bool:
        return any((one.key, one.identity) == (entry.key, entry.identity) for one in self.named.values())

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for slot in taken:
            self.named.pop(slot, None)
            self.holders[slot] = 1
        return taken

    def hold(self, slots: Sequence[int]) -> None:
        self.holders.update(slots)
        self.queue = [slot for slot in self.queue if slot not in slots]

    def release(self, slots: Sequence[int], *, next_to_go: bool = False) -> None:
        self.holders.subtract(slots)
        freed = [slot for slot in slots if not self.holders[slot]]
        named = [slot for slot in freed if slot in self.named]
        empty = [slot for slot in freed if slot not in self.named]
        self.queue = [*empty, *named, *self.queue] if next_to_go else [*empty, *self.queue, *named]

    def refresh(self, slots: Sequence[int]) -> None:
        own = [slot for slot in slots if not self.holders[slot]]
        self.queue = [*(slot for slot in self.queue if slot not in own), *own]

    def drop(self, slots: Sequence[int]) -> None:
        own = [slot for slot in slots if not self.holders[slot]]
        self.queue = [*own, *(slot for slot in self.queue if slot not in own)]
        for slot in slots:
            del self.named[slot]


class TieredModel(Model):
    def __init__(self, num_blocks: int, size: int, host_slots: int, disk_slots: int) -> None:
        super().__init__(num_blocks, size)
        self.host = Medium(num_blocks, host_slots)
        self.disk = Medium(num_blocks + host_slots, disk_slots)
        self.identities: dict[int, tuple[int, int]] = {}  # of the pool's named blocks, and their parents'
        self.last_identity = 0
        self.saves: list[Save] = []
        self.writing = 0
        self.erasures: set[int] = set()

    @property
    def media(self) -> list[Medium]:
        return [self.host, self.disk]

    def medium(self, slot: int) -> Medium:
        return self.host if slot < self.disk_first else self.disk

    @property
    def disk_first(self) -> int:
        return len(self.references) + self.host.slots

    def entry(self, slot: int) -> Entry:
        if slot in self.named:
            return Entry(*self.named[slot], *self.identities[slot])
        return self.medium(slot).named[slot]

    def find(self, key: int) -> int | None:
        if self.holders.get(key):
            return self.holders[key][0]
        found = [slot for medium in self.media if (slot := medium.find(key)) is not None]
        return found[0] if found else None

    def match_all(self, request: Held, limit: int) -> tuple[list[int], list[int]]:
        """The pool's blocks, and the slots after them."""
        found: list[int] = []
        identity = 0
        for index, key in enumerate(request.chain.keys[:limit]):
            slot = self.find(key)
            if slot is None or self.entry(slot)[1::2] != (request.content(index), identity):
                break
            identity = self.entry(slot).identity
            found.append(slot)
        own = [slot < len(self.references) for slot in found] + [False]
        hits = own.index(False)
        later = [*own[hits:-1], True].index(True)
        return found[:hits], found[hits : hits + later]

    def take(self, hits: list[int], new: int) -> list[int] | None:
        before = {block: Entry(*self.named[block], *self.identities[block]) for block in self.named}
        taken = super().take(hits, new)
        gone: dict[int, int] = {}  # the last copies of their contents, by key
        for block in (taken or [])[len(hits) :]:
            if block in before and before[block].key not in self.holders:
                gone.pop(before[block].key, None)
                gone[before[block].key] = block
        blocks = [*gone.values()][::-1]
        self.save(blocks, [before[block] for block in blocks])
        return taken

    def save(self, blocks: list[int], entries: list[Entry]) -> None:
        host = self.host
        same = [entry for entry in entries if host.has(entry)]
        host.refresh([slot for entry in same[::-1] if (slot := host.find(entry.key)) is not None])
        pairs = [(block, entry) for block, entry in zip(blocks, entries, strict=True) if entry not in same]
        host.drop([slot for _, entry in pairs if (slot := host.find(entry.key)) is not None])
        slots = host.take(len(pairs))
        pairs = pairs[: len(slots)]
        host.named |= {slot: entry for slot, (_, entry) in zip(slots, pairs, strict=True)}
        self.saves += [Save(block, slot) for slot, (block, _) in zip(slots, pairs, strict=True)][::-1]

    def store(self, request: Held, start: int, stop: int) -> int:
        parent = request.chain.identity
        assert parent is not None
        early: list[int] = []
        for index in range(start, stop):
            key, block = request.chain.keys[index], request.blocks[index]
            holders = self.holders.setdefault(key, [])
            wanted = request.content(index), parent
            if not holders:
                early.append(block)
                lower = [slot for medium in self.media if (slot := medium.find(key)) is not None]
                known = [entry for slot in lower if (entry := self.entry(slot))[1::2] == wanted]
                self.last_identity += not known
                identity = known[0].identity if known else self.last_identity
            elif self.entry(holders[0])[1::2] == wanted:
                identity = self.entry(holders[0]).identity
            else:
                stop = index
                break
            holders.append(block)
            self.tails.pop(block, None)
            self.named[block] = key, request.content(index)
            self.identities[block] = identity, parent
            parent = identity
        if self.disk.slots:
            kept = [block for block in early if not self.disk.has(self.entry(block))]
            self.save(kept, [self.entry(block) for block in kept])
        return stop

    def saved(self, saves: Sequence[Save]) -> list[tuple[int, int]]:
        writes: list[tuple[int, int]] = []
        if self.disk.slots:
            sources = [slot for _, slot in saves if slot in self.host.named]
            sources = [slot for slot in sources if not self.disk.has(self.host.named[slot])]
            room = max(0, min(int(self.host.slots * DIRTY_FRACTION) - self.writing, len(self.disk.queue)))
            sources = sources[max(0, len(sources) - room) :]
            self.forget([at for slot in sources if (at := self.disk.find(self.host.named[slot].key)) is not None])
            targets = self.disk.take(len(sources))
            self.erasures -= set(targets)
            self.host.hold(sources)
            self.writing += len(sources)
            writes = list(zip(sources, targets, strict=True))
        self.host.release([slot for _, slot in saves])
        return writes

    def written(self, outcomes: Sequence[Written]) -> None:
        for (source, slot, _), done in outcomes:
            entry = self.host.named.get(source)
            if done and entry is not None and self.disk.find(entry.key) is None:
                self.disk.named[slot] = entry
            else:
                self.erasures.add(slot)
        self.writing -= len(outcomes)
        self.host.release([write.source for write, _ in outcomes])
        self.disk.release([write.slot for write, _ in outcomes])

    def forget(self, slots: Sequence[int]) -> None:
        for medium in self.media:
            own = [slot for slot in slots if slot in medium.named]
            medium.drop(own)
            self.erasures.update(own if medium is self.disk else ())

    def hold(self, slots: Sequence[int]) -> None:
        for medium in self.media:
            medium.hold([slot for slot in slots if self.medium(slot) is medium])

    def end_holds(self, slots: Sequence[int], *, loaded: bool) -> None:
        for medium in self.media:
            own = [slot for slot in slots[::-1] if self.medium(slot) is medium]
            medium.release(own, next_to_go=loaded and medium is self.host)

    def take_erasures(self) -> set[int]:
        ready = {slot for slot in self.erasures if not self.disk.holders[slot]}
        self.erasures -= ready
        return ready


class Loading(NamedTuple):
    request: Held
    slots: list[int]


class TieredWorld(World):
    @initialize(
        num_blocks=st.integers(1, 12),
        size=st.integers(1, 4),
        bits=st.integers(1, 4),
        at_once=st.booleans(),
        partial=st.booleans(),
        host_slots=st.integers(2, 12),
        disk_slots=st.sampled_from([0, 4, 20]),
    )
    def begin(
        self, num_blocks: int, size: int, bits: int, at_once: bool, partial: bool, host_slots: int, disk_slots: int
    ) -> None:
        self.pool = self.pool_type(num_blocks, size, partial=partial, host_slots=host_slots, disk_slots=disk_slots)
        assert self.pool.lower is not None
        self.lower: LowerTiers = self.pool.lower
        self.model: TieredModel = TieredModel(num_blocks, size, host_slots, disk_slots)
        self.mask = (1 << bits) - 1 if self.weak else 2**64 - 1
        self.at_once = at_once
        self.requests = []
        self.preempted = []
        self.past = []
        self.loading: list[Loading] = []
        self.saves: list[Save] = []
        self.writes: list[Write] = []
        self.said: dict[str, set[int]] = {"GPU": set(), HOST: set(), DISK: set()}
        self.known: dict[int, object] = {}  # what the pool's event said of a key
        self.resolver = Resolver(MODEL, native=not self.weak)
        self.mirror = Mirror()
        self.index = PrefixIndex()
        self.replica = self.index.add()

    # ---- requests

    def start(self, request: Held) -> None:
        chain, size = request.chain, self.pool.block_size
        match = self.pool.match(chain)
        hits, slots = self.model.match_all(request, (len(chain) - 1) // size)
        assert (match.blocks, list(match.lower)) == (hits, slots)
        self.lower.hold(slots)
        self.model.hold(slots)
        found = match.blocks if slots else match.blocks + self.adopted(request, match)
        new = -(-len(chain) // size) - len(found)
        blocks = self.pool.take(found, new)
        assert blocks == self.model.take(found, new)
        if blocks is None:
            self.lower.release(slots, loaded=False)
            self.model.end_holds(slots, loaded=False)
            return
        request.blocks[:] = blocks
        self.past.append(chain)
        chain.named, chain.identity = len(match.blocks), match.identity
        if slots:
            self.loading.append(Loading(request, slots))
        else:
            self.requests.append(request)

    @precondition(lambda self: self.loading)
    @rule(which=indices, count=st.integers(0, 9), is_lost=st.booleans(), is_cancelled=st.booleans())
    def blocks_come(self, which: int, count: int, is_lost: bool, is_cancelled: bool) -> None:
        """In any order, and not always all of them; then there may be something else in the next slot."""
        request, slots = self.loading.pop(which % len(self.loading))
        came = min(count, len(slots))
        lost = slots[came : came + 1] if is_lost else []
        self.fill(request, came)
        self.lower.drop(lost)
        self.model.forget(lost)
        self.lower.release(slots, loaded=True)
        self.model.end_holds(slots, loaded=True)
        self.requests.append(request)
        if is_cancelled:
            self.stop(len(self.requests) - 1)

    def fill(self, request: Held, count: int) -> None:
        chain = request.chain
        stop = min(chain.named + count, len(chain.keys), len(request.blocks))
        for end in [stop] if self.at_once else range(chain.named + 1, stop + 1):
            if chain.identity is None:
                break
            expected = self.model.store(request, chain.named, end)
            self.pool.store(chain, request.blocks, end)
            assert chain.named == expected
            assert (chain.identity is None) == (expected < end)

    @rule(documents=st.lists(st.tuples(st.integers(2, 4), st.integers(1, 30)), min_size=1, max_size=4))
    def documents_come_and_go(self, documents: list[tuple[int, int]]) -> None:
        """Long prompts with one beginning, which take the place of others."""
        for document, length in documents:
            before = len(self.requests)
            self.arrive([document] * length)
            if len(self.requests) > before:
                self.fill(self.requests[-1], 100)
                self.stop(before)
            self.pool_equals_the_model()
            self.saves_end(100)
            self.all_writes_end([True] * len(self.writes))

    # ---- moves

    @rule(count=st.integers(1, 20))
    def saves_end(self, count: int) -> None:
        done, self.saves = self.saves[:count], self.saves[count:]
        writes = self.lower.saved(done)
        assert [(write.source, write.slot) for write in writes] == self.model.saved(done)
        for write in writes:
            entry = self.model.host.named[write.source]
            assert write.record[:3] == (entry.key, entry.identity, entry.parent)
        self.writes += writes
        self.erase()

    @precondition(lambda self: self.writes)
    @rule(done=st.lists(st.booleans(), min_size=1, max_size=20))
    def writes_end(self, done: list[bool]) -> None:
        self.all_writes_end(done)

    def all_writes_end(self, done: list[bool]) -> None:
        ended = [Written(write, well) for write, well in zip(self.writes, done, strict=False)]
        del self.writes[: len(ended)]
        self.lower.written(ended)
        self.model.written(ended)
        self.erase()

    def erase(self) -> None:
        erased = self.lower.take_erasures()
        assert len(erased) == len(set(erased))
        assert set(erased) == self.model.take_erasures()
        assert not {write.slot for write in self.writes}.intersection(erased)

    @rule()
    def reset(self) -> None:
        done = not any(self.model.references)
        assert self.pool.reset() == done
        if done:
            model = self.model
            model.erasures.clear()  # the mover clears the whole disk
            for records in (model.named, model.tails, model.holders, model.host.named, model.disk.named):
                records.clear()

    # ---- what is said

    def hear(self) -> None:
        lower, model = self.lower, self.model
        saves = lower.take_saves()
        assert saves == model.saves
        self.saves += saves
        model.saves.clear()
        tiers = {tier.medium: tier for tier in lower.tiers}
        for medium, its in (("CPU", model.host), ("STORAGE", model.disk)):
            if medium in tiers:
                self.compare(tiers[medium], its)
        events = self.pool.take_events()
        for event in events:
            self.note(event)
        resident = {"GPU": self.pool.resident(), HOST: set[int](), DISK: set[int]()}
        resident |= {medium: tier.resident() for medium, tier in tiers.items()}
        assert self.said == resident
        self.mirror.apply(events)
        assert {name[0]: set(pool.blocks) for name, pool in self.mirror.pools.items() if pool.blocks} == {
            medium: keys for medium, keys in resident.items() if keys
        }
        if not self.weak:
            self.consume(events, resident)

    def compare(self, tier: Tier, its: Medium) -> None:
        assert [slot + tier.first for slot in tier._queue] == its.queue
        assert tier.resident() == {entry.key for entry in its.named.values()}
        contents = self.pool._contents
        for slot, entry in its.named.items():
            assert tier.find(entry.key) == slot
            assert (contents.identity[slot], contents.parent[slot]) == entry[2:]

    def note(self, event: object) -> None:
        if isinstance(event, AllBlocksCleared):
            for keys in self.said.values():
                keys.clear()
        elif isinstance(event, BlockRemoved):
            assert self.said[event.medium or ""] >= keys_of(event)
            self.said[event.medium or ""] -= keys_of(event)
        else:
            assert isinstance(event, BlockStored)
            assert self.said[event.medium or ""].isdisjoint(keys_of(event))
            self.said[event.medium or ""] |= keys_of(event)
            if not self.weak:
                self.note_content(event)

    def note_content(self, event: BlockStored) -> None:
        """All media say the same of a block, and nobody says it of one whose parent was never announced."""
        parent, size = event.parent_block_hash, event.block_size
        assert parent is None or parent in self.known
        assert len(event.token_ids) == size * len(event.block_hashes)
        for index, key in enumerate(event.block_hashes):
            tokens = list(event.token_ids[index * size : (index + 1) * size])
            own = event.extra_keys[index] if event.extra_keys else None
            said = parent, tokens, own, event.lora_name
            assert isinstance(key, int)
            assert self.known.setdefault(key, said) == said
            parent = key

    def consume(self, events: list[Any], resident: dict[str, set[int]]) -> None:
        for change in self.resolver.apply(events):
            self.index.apply(self.replica, change)
        self.resolver.check()
        assert self.resolver.lost is None
        assert self.resolver.digest() == self.mirror.digest()
        for medium, keys in resident.items():
            assert self.resolver.keys(medium) == keys
            holders = self.index.pools.get((medium, 0))
            assert set(() if holders is None else holders.of(self.replica)) == keys
        again = Resolver(MODEL, native=True)
        again.apply(list(self.mirror.events()))
        assert again.digest() == self.mirror.digest()


class WeakTieredWorld(TieredWorld):
    weak = True


TestTieredPool = TieredWorld.TestCase
TestTieredPoolWithCollisions = WeakTieredWorld.TestCase


# ---- negative controls: each leaves out one precaution, and the property must notice


def trusting(_: Contents, __: object, slots: Sequence[int], *___: int) -> int:
    """Believe that a key decides alone."""
    return len(slots)


def unheld(_: LowerTiers, __: Sequence[int]) -> None:
    """Let what is being loaded be given up."""


def anew(_: LowerTiers, __: object, ___: int) -> int:
    """Give a content that is in a lower medium another identity."""
    return 0


def all_anew(_: LowerTiers, __: object, ___: int, ____: int) -> NDArray[np.int64]:
    return NONE_KNOWN


@pytest.mark.parametrize(
    ("world", "owner", "name", "careless"),
    [
        (TieredWorld, LowerTiers, "hold", unheld),
        pytest.param(WeakTieredWorld, Contents, "count_same", trusting, marks=pytest.mark.grid),
        pytest.param(TieredWorld, LowerTiers, "identity", anew, marks=pytest.mark.grid),
        pytest.param(TieredWorld, LowerTiers, "identities", all_anew, marks=pytest.mark.grid),
    ],
)
def test_the_property_fails_without_a_precaution(
    monkeypatch: pytest.MonkeyPatch, world: type[TieredWorld], owner: type, name: str, careless: object
) -> None:
    monkeypatch.setattr(owner, name, careless)
    with pytest.raises(AssertionError):
        run_careless(world)
