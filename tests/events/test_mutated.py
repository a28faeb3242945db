"""Real payloads, changed anywhere: the outcome is a batch or BadBatch, soon, and the resolver stays consistent."""

import time
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from events.blocks import block_keys, root_key
from events.cache.resolver import Resolver
from events.messages import BadBatch, BlockRemoved, BlockStored, Decoder, EventBatch, encode_batch
from tests.events.strategies import ANYTHING
from tests.oracle.vectors import VECTORS, read

SLOW_S = 1.0
SMALL_BYTES = 1500
# Numbers of bytes that nobody has, what is no UTF-8 or no map's key, and nesting near the limits of msgspec and Python.
ODD = [*map(bytes.fromhex, ("ddffffffff", "dfffffffff", "dbffffffff", "c9ffffffff01", "c1", "a2fffe", "81810102"))]
ODD += [opening * depth + b"\xc0" for opening in (b"\x91", b"\x81\xa1x") for depth in (2, 490, 960, 1100, 3000)]
NAMES = st.sampled_from([*BlockStored.__struct_fields__, "type", "", "new", 0, None])
VALUES = ANYTHING | st.sampled_from(ODD).map(msgspec.Raw) | st.sampled_from(["BlockStored", "mamba", 2**63, []])


def payloads() -> list[bytes]:
    """The payloads of the vectors, and a native replica's, whose hashes are keys."""
    found: dict[bytes, None] = {}
    for path in sorted(VECTORS.rglob("*.jsonl")):
        for record in read(path):
            sent = record.get("payload_hex") or (record.get("frames") or [""])[-1]
            if sent and len(sent) <= 2 * SMALL_BYTES:
                found[bytes.fromhex(sent)] = None
    keys: list[Any] = block_keys(range(16), 4, root_key("", None, None, 4))
    whole, tail = (
        BlockStored(keys[n:], keys[n - 1] if n else None, list(range(4 * n, 16)), 4, None, "GPU", None) for n in (0, 2)
    )
    native = [EventBatch(0.0, [whole]), EventBatch(0.0, [tail, BlockRemoved(keys[1:3], "GPU")])]
    return [*found, *map(encode_batch, native)]


PAYLOADS = payloads()


def change(draw: st.DrawFn, tree: list[Any]) -> None:
    """Replace, delete, rename or repeat something, mostly inside of an event."""
    parent: Any = tree
    while True:
        at: Any = draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
        child = parent[at]
        if not isinstance(child, list | dict) or not child or draw(st.integers(0, 7)) == 0:
            break
        parent = child
    how = draw(st.sampled_from(["replace", "replace", "wrap", "delete", "move"]))
    if how == "delete":
        del parent[at]
    elif how != "move":
        parent[at] = draw(VALUES) if how == "replace" else [child]
    elif isinstance(parent, dict):
        parent[draw(NAMES)] = parent.pop(at)
    else:
        parent[at:at] = [child] * draw(st.sampled_from([1, 2, 50]))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    payload = draw(st.sampled_from(PAYLOADS))
    with suppress(msgspec.DecodeError, OverflowError):  # one vector is not msgpack; some integers have no room
        tree = [msgspec.msgpack.decode(payload)]
        for _ in range(draw(st.integers(0, 3))):
            if tree:
                change(draw, tree)
        payload = msgspec.msgpack.encode(tree[0]) if tree else b""
    if draw(st.integers(0, 7)) == 0:
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(payload))] * 2)))
        payload = payload[:at] + draw(st.sampled_from([b"", 2 * payload[at:end], *ODD])) + payload[end:]
    return payload


@given(st.lists(mutated(), min_size=1, max_size=12), st.booleans())
@settings(max_examples=10 * min(500, settings().max_examples))
def test_no_changed_payload_breaks_the_decoder_or_the_resolver(sent: list[bytes], native: bool) -> None:
    resolver, tolerant = Resolver(native=native, orphan_limit=1000), Decoder()
    tolerant.decode(msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]]]))
    started_s = time.process_time()
    for payload in sent:
        for decoder in (Decoder(skim=native), tolerant):
            with suppress(BadBatch):
                resolver.apply(decoder.decode(payload).events)
    resolver.check()
    assert time.process_time() - started_s < SLOW_S
