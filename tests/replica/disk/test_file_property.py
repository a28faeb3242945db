"""The disk file against a dumb model, with damage at any byte and writes that power loss took back.

The model knows two facts of each slot: whose header lies there, and whose payload. A record can be read exactly if both
are its own.
"""

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from xxhash import xxh3_128_digest

from replica.disk.record import Header, Record
from tests.replica.disk.disks import NUM_SLOTS, opened, payload, read, record, write

PAYLOAD_BYTES = 4096 + 100
slots = st.integers(0, NUM_SLOTS - 1)
flips = st.integers(1, 255)
shares = st.floats(0, 1)  # a place, as a share of what there is


class DiskFileMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="disk-")
        self.file = opened(Path(self.folder.name), payload_bytes=PAYLOAD_BYTES)
        self.last = 0
        self.records: dict[int, Record] = {}
        self.forget()

    def forget(self) -> None:
        self.headers: list[Record | None] = [None] * NUM_SLOTS
        self.payloads: list[int | None] = [None] * NUM_SLOTS
        self.older: list[tuple[Record | None, bytes, int | None, bytes]] = [
            (None, bytes(self.file.layout.header_bytes), None, bytes(PAYLOAD_BYTES))
        ] * NUM_SLOTS

    def teardown(self) -> None:
        self.file.close()
        self.folder.cleanup()

    def new_record(self, parent: float, *, is_copy: bool) -> Record:
        """A child of one of all identities ever given, or the same content once more under a new identity."""
        self.last += 1
        chosen = round(parent * (self.last - 1))
        new = record(self.last, chosen, b"salt" if self.last % 3 == 0 else None)
        if is_copy and chosen in self.records:
            same = self.records[chosen]
            new = new._replace(parent=same.parent, tokens=same.tokens, exact=same.exact)
        self.records[self.last] = new
        return new

    # ---- the disk, past the file

    def peek(self, offset: int, size: int) -> bytes:
        with self.file.path.open("rb") as raw:
            raw.seek(offset)
            return raw.read(size).ljust(size, b"\0")

    def poke(self, offset: int, content: bytes) -> None:
        with self.file.path.open("r+b") as raw:
            raw.seek(offset)
            raw.write(content)

    def keep(self, slot: int) -> None:
        """Remember what lies in the slot, for a loss of power to bring it back."""
        layout = self.file.layout
        header = self.peek(layout.header_offset(slot), layout.header_bytes)
        self.older[slot] = (
            self.headers[slot],
            header,
            self.payloads[slot],
            self.peek(layout.payload_offset(slot), PAYLOAD_BYTES),
        )

    # ---- what the tier does

    @rule(slot=slots, parent=shares, is_copy=st.booleans())
    def write(self, slot: int, parent: float, is_copy: bool) -> None:
        self.keep(slot)
        new = self.new_record(parent, is_copy=is_copy)
        assert write(self.file, slot, new)
        self.headers[slot], self.payloads[slot] = new, new.identity

    @rule(slot=slots)
    def erase(self, slot: int) -> None:
        self.keep(slot)
        assert self.file.erase(slot)
        self.headers[slot] = None

    @rule()
    def clear(self) -> None:
        assert self.file.clear()
        self.forget()

    @rule()
    def restart(self) -> None:
        self.file.close()
        self.file = opened(Path(self.folder.name), payload_bytes=PAYLOAD_BYTES)

    # ---- what happens to it

    @rule(slot=slots, place=shares, flip=flips)
    def damage_header(self, slot: int, place: float, flip: int) -> None:
        if self.headers[slot] is None:
            return  # the same damage twice would repair it
        layout = self.file.layout
        offset = layout.header_offset(slot) + round(place * (layout.header_bytes - 1))
        self.poke(offset, bytes([self.peek(offset, 1)[0] ^ flip]))
        self.headers[slot] = None

    @rule(slot=slots, place=shares, flip=flips)
    def damage_payload(self, slot: int, place: float, flip: int) -> None:
        if self.payloads[slot] is None:
            return
        offset = self.file.layout.payload_offset(slot) + round(place * (PAYLOAD_BYTES - 1))
        self.poke(offset, bytes([self.peek(offset, 1)[0] ^ flip]))
        self.payloads[slot] = None

    @rule(slot=slots, parent=shares, cut=shares)
    def tear(self, slot: int, parent: float, cut: float) -> None:
        """Write as the file does, payload first, and stop at any byte."""
        self.keep(slot)
        layout, new = self.file.layout, self.new_record(parent, is_copy=False)
        text = bytes(payload(new.identity, PAYLOAD_BYTES))
        header = layout.encode_header(Header(new, xxh3_128_digest(text)), self.generation())
        count = round(cut * (len(text) + len(header)))
        before = self.older[slot]
        self.poke(layout.payload_offset(slot), text[:count])
        self.poke(layout.header_offset(slot), header[: max(0, count - len(text))])
        now = self.peek(layout.payload_offset(slot), PAYLOAD_BYTES), self.peek(layout.header_offset(slot), len(header))
        self.payloads[slot] = new.identity if now[0] == text else before[2] if now[0] == before[3] else None
        self.headers[slot] = new if now[1] == header else before[0] if now[1] == before[1] else None

    @rule(slot=slots)
    def lose_header(self, slot: int) -> None:
        self.poke(self.file.layout.header_offset(slot), self.older[slot][1])
        self.headers[slot] = self.older[slot][0]

    @rule(slot=slots)
    def lose_payload(self, slot: int) -> None:
        self.poke(self.file.layout.payload_offset(slot), self.older[slot][3])
        self.payloads[slot] = self.older[slot][2]

    @rule(cut=shares)
    def truncate(self, cut: float) -> None:
        """Behind its head; a file without one is empty, which another test shows."""
        self.file.close()
        size = 4096 + round(cut * (self.file.path.stat().st_size - 4096))
        os.truncate(self.file.path, size)
        self.restart()
        layout = self.file.layout
        for slot in range(NUM_SLOTS):
            if layout.header_offset(slot) + layout.header_bytes > size:
                header = self.peek(layout.header_offset(slot), layout.header_bytes)
                whole = self.headers[slot] is not None and layout.decode_header(memoryview(header), self.generation())
                self.headers[slot] = self.headers[slot] if whole else None
            if layout.payload_offset(slot) + PAYLOAD_BYTES > size and not self.ends_well(slot):
                self.payloads[slot] = None

    def generation(self) -> int:
        generation = self.file.layout.generation_in(self.peek(0, 4096), self.file._fingerprint)
        assert generation is not None
        return generation

    def ends_well(self, slot: int) -> bool:
        identity = self.payloads[slot]
        now = self.peek(self.file.layout.payload_offset(slot), PAYLOAD_BYTES)
        return identity is not None and now == bytes(payload(identity, PAYLOAD_BYTES))

    # ---- what must hold

    @invariant()
    def every_read_is_right_or_refused(self) -> None:
        for slot, (header, identity) in enumerate(zip(self.headers, self.payloads, strict=True)):
            expected = {each.identity: each for each in (header, self.older[slot][0]) if each is not None}
            if identity in self.records:
                expected[identity] = self.records[identity]
            for each in expected.values():
                is_whole = header == each and identity == each.identity
                assert read(self.file, slot, each) == is_whole

    @precondition(lambda self: any(self.headers))
    @invariant()
    def recovery_finds_what_a_chain_can_reach(self) -> None:
        records, last_identity = self.file.recover()
        assert all(self.headers[slot] == each for slot, each in records)
        reachable = {0}
        for _, each in records:
            assert each.parent in reachable and each.identity not in reachable
            reachable.add(each.identity)
        contents = {(each.parent, each.tokens, each.exact) for _, each in records}
        assert len(contents) == len(records)
        for each in filter(None, self.headers):
            assert each.identity <= last_identity
            is_known = each.identity in reachable or (each.parent, each.tokens, each.exact) in contents
            assert is_known or each.parent not in reachable


TestDiskFile = DiskFileMachine.TestCase
TestDiskFile.settings = settings(stateful_step_count=25)
