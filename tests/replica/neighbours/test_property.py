"""Properties of the protocol's pure parts, and of holds against a dumb model."""

import threading
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from replica.cache.moves import Pull
from replica.neighbours.holds import Held
from replica.neighbours.messages import Block, Lost, Offer, encode
from replica.neighbours.reader import check_header, read_of
from replica.neighbours.sealed import READER, SOURCE, Challenge, NotProven, Session, reply_to
from tests.replica.engines import admit, chain
from tests.replica.neighbours.liars import true_block
from tests.replica.neighbours.replicas import BLOCK_BYTES, Engine, neighbour_config, tokens_of, wanted

# ---- what comes

FIELDS: dict[str, st.SearchStrategy[object]] = {
    "index": st.integers(-1, 9),
    "tokens": st.binary(max_size=20),
    "exact": st.none() | st.binary(max_size=4),
    "size": st.sampled_from([-1, 0, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2**62]),
}
changes = st.none() | st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), FIELDS[name]))


@given(st.integers(0, 3), st.integers(1, 6), st.lists(changes, min_size=6, max_size=6))
def test_only_the_header_that_is_due_is_taken(start: int, count: int, changed: list[tuple[str, object] | None]) -> None:
    """Blocks come with changed headers; a change to what was there is none. Checksums are of payloads, which follow."""
    want = wanted(start + count, start, cache_salt="s")
    request = read_of(want, neighbour_config(), 1.0)
    for number in range(count):
        true, _ = true_block(request, start + number)
        change = changed[number]
        sent = true if change is None else msgspec.structs.replace(true, **{change[0]: change[1]})
        assert is_taken(want, sent, number) == (sent == true)
        assert not is_taken(want, true, number + 1)


def is_taken(want: Pull, header: Block, came: int) -> bool:
    try:
        check_header(want, header, came, BLOCK_BYTES)
    except Lost:
        return False
    return True


# ---- seals


def sessions() -> tuple[Session, Session]:
    challenge = Challenge(b"secret")
    reply, reader = reply_to(b"secret", challenge.sent)
    return challenge.accept(reply), reader


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_only_the_next_body_as_it_was_sealed_is_taken(bodies: list[bytes], data: st.DataObject) -> None:
    """A listener in between may drop, repeat, reorder, change or send back what it sees."""
    source, reader = sessions()
    frames = [(reader.seal(body), body) for body in bodies]
    frames += [(source.seal(body), body) for body in bodies]
    delivered = data.draw(st.lists(st.sampled_from(frames), max_size=8)) if frames else []
    for number, (seal, body) in enumerate(delivered):
        is_next = number < len(bodies) and (seal, body) == frames[number]
        if is_next:
            source.check(seal, body)
            continue
        with pytest.raises(NotProven):
            source.check(seal, body)
        break


@given(st.binary(max_size=120) | st.integers(0, 71))
def test_no_other_reply_is_a_proof(other: bytes | int) -> None:
    challenge = Challenge(b"secret")
    reply, _ = reply_to(b"secret", challenge.sent)
    if isinstance(other, int):
        other = reply[:other] + bytes([reply[other] ^ 1]) + reply[other + 1 :]
    with pytest.raises(NotProven):
        challenge.accept(other)
    challenge.accept(reply)


def test_a_proof_is_no_seal_and_one_direction_is_not_the_other() -> None:
    key = bytes(32)
    body = encode(Offer(0))
    seals = {Session(key, own, peer).seal(body) for own, peer in ((SOURCE, READER), (READER, SOURCE))}
    assert len(seals) == 2


def test_a_source_without_the_secret_is_found_out_by_its_first_frame() -> None:
    _, reader = reply_to(b"secret", Challenge(b"another").sent)
    liar = Session(bytes(32), SOURCE, READER)
    with pytest.raises(NotProven):
        reader.check(liar.seal(b"welcome"), b"welcome")


# ---- holds

NUM_BLOCKS = 24
PROMPTS = 4  # of different lengths, without a common prefix
LENGTHS = (3, 5, 8, 12)


class HoldsMachine(RuleBasedStateMachine):
    """Requests run and blocks are evicted, while readers hold and give back."""

    @initialize(share=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def begin(self, share: float) -> None:
        self.engine = Engine(NUM_BLOCKS, share=share)
        self.most = int(NUM_BLOCKS * share)
        self.running: list[Sequence[int]] = []
        self.held: list[tuple[Held, list[bytes]]] = []

    def contents(self, blocks: Sequence[int]) -> list[bytes]:
        return [self.engine.memory.rows[block].tobytes() for block in blocks]

    @rule(number=st.integers(0, PROMPTS - 1))
    def compute(self, number: int) -> None:
        prompt = chain([*tokens_of(LENGTHS[number], 1000 * number), 1])
        if len(prompt.keys) + 1 <= self.engine.pool.free:
            self.engine.serve(prompt)

    @rule(blocks=st.integers(1, 10))
    def run(self, blocks: int) -> None:
        if blocks <= self.engine.pool.free:
            taken = admit(self.engine.pool, chain(range(9000, 9000 + 4 * blocks)), look_up=False)
            self.engine.memory.rows[taken] = 255
            self.running.append(taken)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 100))
    def end(self, index: int) -> None:
        self.engine.pool.release(self.running.pop(index % len(self.running)))

    @rule(number=st.integers(0, PROMPTS - 1), start=st.integers(0, 3))
    def hold(self, number: int, start: int) -> None:
        pool, free = self.engine.pool, self.engine.pool.free
        want = wanted(LENGTHS[number], min(start, LENGTHS[number] - 1), first=1000 * number)
        there = pool.match(want.chain).blocks[want.start :]
        answers: list[Held] = []
        asks = threading.Thread(
            target=lambda: answers.append(self.engine.holds.hold(want.chain, want.start, want.stop, 10.0))
        )
        asks.start()
        self.engine.turn(10.0)
        asks.join()
        [held] = answers
        assert list(held.blocks) == there[: len(held.blocks)], "they are the leading ones"
        assert bool(held.reason) == (bool(there) and not held.blocks)
        assert pool.free >= free - free // 2, "half of what was free is left"
        self.held.append((held, self.contents(held.blocks)))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def give_back(self, index: int) -> None:
        held, contents = self.held.pop(index % len(self.held))
        assert self.contents(held.blocks) == contents, "what is held has stayed as it was"
        self.engine.holds.give_back(held)
        self.engine.holds.serve()

    @invariant()
    def is_consistent(self) -> None:
        if not hasattr(self, "engine"):
            return
        pool, holds = self.engine.pool, self.engine.holds
        pool.check()
        assert holds.held == sum(len(held.blocks) for held, _ in self.held) <= self.most
        users = [block for held, _ in self.held for block in held.blocks] + [b for own in self.running for b in own]
        assert all(pool.references(block) == users.count(block) for block in range(NUM_BLOCKS))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.holds.close()


def test_holds_keep_blocks_and_leave_room() -> None:
    run_machine(HoldsMachine)


def test_a_hold_that_nobody_waits_for_any_more_holds_nothing() -> None:
    engine = Engine(NUM_BLOCKS, share=1.0)
    engine.serve(chain([*tokens_of(3), 1]))
    want = wanted(3)
    assert engine.holds.hold(want.chain, 0, 3, 0.0) == Held((), "busy")
    engine.holds.serve()
    assert not engine.holds.references
    engine.holds.close()
    assert engine.holds.hold(want.chain, 0, 3, 10.0) == Held((), "busy"), "the engine has ended"
