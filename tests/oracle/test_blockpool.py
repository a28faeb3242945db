"""Our block pool against a real KVCacheManager: the same hits, failures, counts and resident blocks, op by op.

vLLM names blocks when it schedules them, we when they are filled; so the adapter takes and stores in one op.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from events.cache.resolver import Resolver
from events.messages import BlockRemoved, BlockStored, Hash, KnownEvent
from replica.cache.block_pool import BlockPool
from replica.cache.chain import Chain
from replica.cache.contents import NOT_NAMED
from replica.cache.names import Match
from tests.oracle.test_wire_blockpool import each_trace, load
from tests.oracle.vectors import Record, unhex

MODEL = "model"
OWN_TRACES = sorted((Path(__file__).parent.parent / "data" / "vectors" / "blockpool").glob("*.jsonl"))


class Held:
    """A request of the trace: its chain, its blocks, and how many of its tokens are computed."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.blocks: list[int] = []
        self.computed = 0


class Adapter:
    """Run a trace's ops on our pool, and return the trace's kind of `result`."""

    def __init__(self, meta: Record, pool: type[BlockPool] = BlockPool) -> None:
        self.size: int = meta["block_size"]
        self.pool = pool(meta["usable_blocks"], self.size)
        self.requests: dict[str, Held] = {}

    def chain(self, op: Record) -> Chain:
        """The engine also tells adapters of one name apart by their path; ours have names only."""
        lora = op["lora"] and "\n".join([op["lora"]["name"], op["lora"]["path"]])
        return Chain(op["tokens"], self.size, MODEL, lora_name=lora, cache_salt=op["cache_salt"])

    def do(self, op: Record) -> Record:
        result: Record = getattr(self, op["op"])(op)
        return result

    def probe(self, op: Record) -> Record:
        return {"hit_blocks": len(self.pool.match(self.chain(op)).blocks)}

    def admit(self, op: Record) -> Record:
        held = Held(self.chain(op))
        result = self.resume(op, held)
        if result["ok"]:
            self.requests[op["req"]] = held
        return result

    def resume(self, op: Record, held: Held | None = None) -> Record:
        held = held or self.requests[op["req"]]
        match = self.pool.match(held.chain)
        held.computed = len(match.blocks) * self.size
        count = len(held.chain) - held.computed if op["chunk"] is None else op["chunk"]
        return {"hit_blocks": len(match.blocks), "ok": self.advance(held, count, match)}

    def prefill_more(self, op: Record) -> Record:
        held = self.requests[op["req"]]
        return {"ok": self.advance(held, len(held.chain) - held.computed if op["chunk"] is None else op["chunk"])}

    def decode(self, op: Record) -> Record:
        held = self.requests[op["req"]]
        held.chain.append(op["token"])
        return {"ok": self.advance(held, 1)}

    def advance(self, held: Held, count: int, match: Match | None = None) -> bool:
        """Take the blocks for `count` more tokens, and name the filled ones; False if there is no room."""
        computed = min(held.computed + count, len(held.chain))
        hits = [] if match is None else match.blocks
        missing = -(-computed // self.size) - len(held.blocks) - len(hits)
        blocks = self.pool.take(hits, max(0, missing))
        if blocks is None:
            return False
        held.blocks += blocks
        if match is not None:
            held.chain.named, held.chain.identity = len(hits), match.identity
        held.computed = computed
        self.pool.store(held.chain, held.blocks, computed // self.size)
        return True

    def preempt(self, op: Record) -> Record:
        held = self.requests[op["req"]]
        self.pool.release(held.blocks)
        held.blocks, held.computed = [], 0
        held.chain.named, held.chain.identity = 0, 0
        return {}

    def free(self, op: Record) -> Record:
        self.pool.release(self.requests.pop(op["req"]).blocks)
        return {}

    def reset(self, _: Record) -> Record:
        return {"ok": self.pool.reset()}


class Names:
    """Map from engine hashes to our keys, learned from the chain whose blocks the engine announces."""

    def __init__(self) -> None:
        self.key_of: dict[Hash, int] = {}
        self.hash_of: dict[int, Hash] = {}

    def learn(self, event: Record, chain: Chain) -> int:
        """Name the event's blocks; returns the index of the first of them in the chain."""
        parent = event["parent_block_hash"]
        start = 0 if parent is None else chain.keys.index(self.key_of[unhex(parent)]) + 1
        size = chain.block_size
        assert event["token_ids"] == chain.tokens[start * size : start * size + len(event["token_ids"])].tolist()
        for offset, block_hash in enumerate(unhex(event["block_hashes"])):
            key = chain.keys[start + offset]
            assert self.key_of.setdefault(block_hash, key) == key, "one hash maps to two of our keys"
            assert self.hash_of.setdefault(key, block_hash) == block_hash, "one of our keys maps to two hashes"
        return start


class Truth:
    """The engine's cache, by our keys: one more copy per store, one less per removal."""

    def __init__(self) -> None:
        self.names = Names()
        self.copies: Counter[int] = Counter()

    def follow(self, op: Record, adapter: Adapter) -> None:
        hits = op["result"].get("hit_blocks", 0) if op["op"] in ("admit", "resume") else 0
        for event in op["events"]:
            if event["type"] == "BlockStored":
                chain = adapter.requests[op["req"]].chain
                start = self.names.learn(event, chain)
                for index in range(start, start + len(event["block_hashes"])):
                    self.copies[chain.keys[index]] += index >= hits  # a hit that is announced again is no new copy
            elif event["type"] == "BlockRemoved":
                self.copies -= Counter(self.names.key_of[unhex(block_hash)] for block_hash in event["block_hashes"])
            else:
                self.copies.clear()


class Replay:
    """Replay of one trace on one kind of pool; each op is compared with the engine's result."""

    def __init__(self, path: Path, pool: type[BlockPool] = BlockPool) -> None:
        self.meta, self.ops, self.final = load(path)
        if self.meta["groups"] != "full" or self.meta["prefix_cache_retention_interval"] is not None:
            pytest.skip("with several groups a hit needs all of them, and some keep only part of a prefix")
        self.adapter = Adapter(self.meta, pool)
        self.truth = Truth()
        self.resolver = Resolver(MODEL, native=True)
        self.events: list[KnownEvent] = []

    def run(self) -> None:
        for number, op in enumerate(self.ops):
            ours = self.adapter.do(op)
            self.adapter.pool.check()
            self.compare(op, ours, f"op {number}: {op['op']} {op.get('req', '')}")

    def compare(self, op: Record, ours: Record, where: str) -> None:
        pool = self.adapter.pool
        self.truth.follow(op, self.adapter)
        assert ours == {name: op["result"][name] for name in ours}, where
        assert pool.free == op["free_blocks"], where
        assert len(pool.resident()) == op["cached_hashes"], where
        assert pool.named == op["cached_copies"], where
        assert pool.resident() == set(self.truth.copies), where
        fresh = pool.take_events()
        self.events += fresh
        self.resolver.apply(fresh)
        self.resolver.check()
        assert self.resolver.lost is None, where
        assert self.resolver.keys() == pool.resident(), where


def copies(pool: BlockPool) -> dict[int, int]:
    """Number of blocks that hold each resident key."""
    others = pool._names.copies
    return {key: 1 + len(others.get(key, ())) for key in pool.resident()}


@each_trace
def test_hits_failures_counts_and_resident_blocks_are_the_engines_after_every_call(path: Path) -> None:
    replay = Replay(path)
    replay.run()
    expected = {replay.truth.names.key_of[unhex(named)]: count for named, _, count in replay.final["resident"]}
    assert copies(replay.adapter.pool) == expected
    assert dict(replay.truth.copies) == expected


@each_trace
def test_blocks_are_handed_out_and_queue_in_the_engines_order(path: Path) -> None:
    """Ours count from 0, the engine's from 1, because its null block is number 0."""
    replay = Replay(path)
    adapter = replay.adapter
    for number, op in enumerate(replay.ops):
        held_before = list(adapter.requests[op["req"]].blocks) if op.get("req") in adapter.requests else []
        adapter.do(op)
        new = op["result"].get("new_block_ids")
        if new is not None and new[0]:
            hits = [block - 1 for block in op["result"].get("hit_block_ids", [[]])[0]]
            taken = [*held_before, *hits, *(block - 1 for block in new[0])]
            assert adapter.requests[op["req"]].blocks == taken, f"op {number}"
    assert [block + 1 for block in adapter.pool.free_queue()] == replay.final["free_order_block_ids"]


@each_trace
def test_a_block_is_announced_at_its_first_copy_and_removed_at_its_last_only(path: Path) -> None:
    replay = Replay(path)
    replay.run()
    present: set[int | bytes] = set()
    for event in replay.events:
        if isinstance(event, BlockStored):
            assert present.isdisjoint(event.block_hashes)
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            present.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert present.issuperset(event.block_hashes)
            present.difference_update(event.block_hashes)
        else:
            present.clear()


@each_trace
def test_events_as_another_router_reads_them_describe_the_same_chains(path: Path) -> None:
    """The resolver, unaware that our hashes are block keys, derives the same keys from tokens and parents."""
    replay = Replay(path)
    replay.run()
    resolver = Resolver(MODEL)
    resolver.apply(replay.events)
    resolver.check()
    assert resolver.orphan_blocks == 0
    assert resolver.keys() == replay.adapter.pool.resident()


# ---- negative controls: a pool with one wrong rule must disagree with the engine somewhere


class HeadFirst(BlockPool):
    """Releases the head of a request first, so that the likeliest shared blocks are evicted first."""

    def release(self, blocks: Sequence[int], keep: int | None = None) -> None:  # noqa: ARG002
        super().release(list(blocks)[::-1])


class UnnamedLast(BlockPool):
    """Queues blocks without a name behind the cached ones, which are then evicted although there is free memory."""

    def release(self, blocks: Sequence[int], keep: int | None = None) -> None:  # noqa: ARG002
        super().release([block for block in blocks if self._contents.parent[block] != NOT_NAMED])
        unnamed = [block for block in blocks if self._contents.parent[block] == NOT_NAMED]
        for block in unnamed:
            self._references[block] -= 1
        self._queue.append(np.array(unnamed, np.intp))


class Eager(BlockPool):
    """Forgets a block with its last reference."""

    def release(self, blocks: Sequence[int], keep: int | None = None) -> None:  # noqa: ARG002
        super().release(blocks)
        unused = [block for block in blocks if not self.references(block) and self._contents.parent[block] != NOT_NAMED]
        self._evict(np.array(unused, np.intp))


class WholePrompt(BlockPool):
    """Hits the whole of a prompt, and leaves nothing to compute."""

    def match(self, chain: Chain) -> Match:
        longer = Chain([*chain.tokens, 0], chain.block_size, MODEL)
        longer.keys, longer.exact = chain.keys, chain.exact
        return super().match(longer)


def disagrees(path: Path, pool: type[BlockPool]) -> bool:
    """Return True if the pool disagrees with the trace; False also for a trace that is not for pools like ours."""
    try:
        Replay(path, pool).run()
    except AssertionError:
        return True
    except pytest.skip.Exception:
        return False
    return False


@pytest.mark.parametrize("pool", [HeadFirst, UnnamedLast, Eager, WholePrompt])
def test_a_pool_with_one_wrong_rule_disagrees_with_some_trace(pool: type[BlockPool]) -> None:
    """Only the traces in the repository count: those of another directory need not touch every rule."""
    assert any(disagrees(path, pool) for path in OWN_TRACES), f"{pool.__name__}: {pool.__doc__}"


def test_tokens_that_differ_from_the_engines_are_noticed() -> None:
    chain = Chain(range(4), 4, MODEL)
    with pytest.raises(AssertionError):
        Names().learn({"parent_block_hash": None, "block_hashes": [7], "token_ids": [0, 1, 2, 4]}, chain)
