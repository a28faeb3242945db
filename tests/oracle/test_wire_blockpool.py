"""Event streams of real block managers: after every call the resolver equals the engine's cache."""

from pathlib import Path
from typing import Any

import pytest

from events.blocks import block_keys, root_key
from events.cache.resolver import Resolver
from events.messages import Decoder
from tests.events.resident import copies as resident_copies
from tests.oracle.test_wire import assert_means
from tests.oracle.vectors import Record, file_params, read, unhex

MODEL = "model"

each_trace = pytest.mark.parametrize("path", file_params("blockpool/*.jsonl"))


def load(path: Path) -> tuple[Record, list[Record], Record]:
    lines = read(path)
    meta, final = lines[0], lines[-1]
    assert (meta["kind"], final["kind"]) == ("meta", "final")
    return meta, lines[1:-1], final


def apply(resolver: Resolver, decoder: Decoder, op: Record) -> None:
    if "payload_hex" in op:
        resolver.apply(decoder.decode(bytes.fromhex(op["payload_hex"])).events)
        resolver.check()


def counted(resolver: Resolver) -> tuple[int, int]:
    copies = [count for pool in resident_copies(resolver).values() for count in pool.values()]
    return len(copies), sum(copies)


def resident(resolver: Resolver) -> list[tuple[Any, int, int]]:
    pools = resident_copies(resolver).items()
    return sorted(((h, group, count) for (_, group), pool in pools for h, count in pool.items()), key=repr)


@each_trace
def test_payload_of_every_call_decodes_to_its_events(path: Path) -> None:
    decoder = Decoder()
    for op in load(path)[1]:
        if "payload_hex" in op:
            batch = decoder.decode(bytes.fromhex(op["payload_hex"]))
            for event, normalized in zip(batch.events, op["events"], strict=True):
                assert_means(event, normalized, decoder)
        else:
            assert op["events"] == []


@each_trace
def test_resident_hashes_and_copies_are_the_engines_after_every_call(path: Path) -> None:
    _, ops, final = load(path)
    resolver, decoder = Resolver(MODEL), Decoder()
    for number, op in enumerate(ops):
        apply(resolver, decoder, op)
        assert counted(resolver) == (op["cached_hashes"], op["cached_copies"]), f"op {number}: {op['op']}"
    assert resolver.inexact is None
    assert resident(resolver) == sorted(((h, group, count) for h, group, count in unhex(final["resident"])), key=repr)


@each_trace
def test_counting_a_report_as_a_copy_would_be_wrong(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: taken for stores, the reports of such a trace drift, and only of such a trace."""
    monkeypatch.setattr("events.cache.orphans.Reports.like", lambda *_: False)
    _, ops, _ = load(path)
    resolver, decoder = Resolver(MODEL), Decoder()
    drifted = False
    for op in ops:
        apply(resolver, decoder, op)
        drifted |= counted(resolver)[1] != op["cached_copies"]
    views_match = all(op["copy_count_view_matches"] for op in ops)
    assert drifted != views_match


@each_trace
def test_blocks_matched_before_a_call_are_what_the_engine_then_hits(path: Path) -> None:
    meta, ops, _ = load(path)
    resolver, decoder = Resolver(MODEL), Decoder()
    adapters: dict[str, Record] = {}
    compared = 0
    for number, op in enumerate(ops):
        if "tokens" in op and op["result"].get("hit_blocks") is not None:
            hit, matched = op["result"]["hit_blocks"], matched_blocks(resolver, op, meta["block_size"])
            lora = op["lora"]
            # The engine also tells adapters of one name apart by their path, which its events do not say.
            told_apart = lora is None or adapters.setdefault(lora["name"], lora) == lora
            assert hit == matched if told_apart else hit <= matched, f"op {number}"
            compared += 1
        apply(resolver, decoder, op)
    assert compared or not any("tokens" in op for op in ops)


def matched_blocks(resolver: Resolver, op: Record, block_size: int) -> int:
    root = root_key(MODEL, op["lora"]["name"] if op["lora"] else None, op["cache_salt"], block_size)
    keys = block_keys(op["tokens"], block_size, root)
    return resolver.matched(keys[: (len(op["tokens"]) - 1) // block_size])  # the last token is always computed
