"""Small disk files, and records whose payload follows from their identity."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from replica.disk.file import DiskFile, open_disk_file
from replica.disk.record import Record

BLOCK_SIZE = 2
PAYLOAD_BYTES = 5000  # no whole number of pages
NUM_SLOTS = 6
SEEN = b"\x99" * PAYLOAD_BYTES  # in a buffer before anything is read into it


def opened(folder: Path, *, num_slots: int = NUM_SLOTS, kv_layout: str = "layout", payload_bytes: int = 0) -> DiskFile:
    return open_disk_file(
        folder,
        kv_layout=kv_layout,
        block_size=BLOCK_SIZE,
        payload_bytes=payload_bytes or PAYLOAD_BYTES,
        num_slots=num_slots,
    )


def record(identity: int, parent: int = 0, exact: bytes | None = None) -> Record:
    return Record(2**64 - identity, identity, parent, identity.to_bytes(8, "little"), exact)


def payload(identity: int, size: int = PAYLOAD_BYTES) -> memoryview:
    pattern = b"%020d" % identity
    return memoryview((pattern * (size // len(pattern) + 1))[:size])


def write(file: DiskFile, slot: int, written: Record) -> bool:
    return file.write(slot, written, payload(written.identity, file.layout.payload_bytes))


def read(file: DiskFile, slot: int, expected: Record) -> bool:
    """Read, and verify that a payload that is said to be right is right."""
    into = memoryview(bytearray(file.layout.payload_bytes))
    if not file.read(slot, expected, into):
        return False
    assert into == payload(expected.identity, file.layout.payload_bytes), "a wrong payload was returned"
    return True


@contextmanager
def in_place_of(path: Path, device: str, flags: int = os.O_RDWR) -> Iterator[None]:
    """Let all descriptors of a file lead to another one meanwhile, whose errors are real."""
    replaced = _descriptors(path)
    with ExitStack() as undo:
        other = os.open(device, flags)
        undo.callback(os.close, other)
        for descriptor in replaced:
            kept = os.dup(descriptor)
            undo.callback(os.close, kept)
            undo.callback(os.dup2, kept, descriptor, inheritable=False)
            os.dup2(other, descriptor, inheritable=False)
        yield


def _descriptors(path: Path) -> list[int]:
    links = {int(link.name): link for link in Path("/proc/self/fd").iterdir()}
    found = [number for number, link in links.items() if link.is_symlink() and os.readlink(link) == str(path)]
    assert found, f"{path} is not open"
    return found
