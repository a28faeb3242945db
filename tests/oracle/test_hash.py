"""Block hashes of real engines, resolved to keys: the same prompt has the same keys with any engine's hash."""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

import pytest

from events.blocks import block_keys, root_key
from events.cache.resolver import Resolver
from events.messages import BlockStored, ExtraKeys, Hash
from tests.oracle.vectors import Record, own_extras, params, records, unhex

MODEL = "model"

# What decides a chain: tokens, block size, LoRA name, salt, and what stands in the blocks besides tokens.
Identity: TypeAlias = tuple[tuple[int, ...], int, str | None, str | None, str]


@dataclass
class Chain:
    """One prompt, and its hashes in the forms that an engine may send."""

    name: str
    token_ids: list[int]
    block_size: int
    lora: str | None
    salt: str | None
    digests: list[bytes]
    ints: list[int]
    forms: list[list[Hash]]
    extra_keys: ExtraKeys | None = None
    cache_salt: str | None = None

    @property
    def identity(self) -> Identity:
        extras = repr(sorted(own_extras(self.extra_keys).items()))
        return tuple(self.token_ids), self.block_size, self.lora, self.salt, extras

    @cached_property
    def keys(self) -> list[int]:
        root = root_key(MODEL, self.lora, self.salt, self.block_size)
        return block_keys(self.token_ids, self.block_size, root, own_extras(self.extra_keys))

    def stored(self, hashes: list[Hash], first: int = 0, last: int | None = None) -> BlockStored:
        """Blocks `first` to `last` as the engine announces them."""
        last = len(hashes) if last is None else last
        extra_keys = self.extra_keys[first:last] if self.extra_keys else None
        return BlockStored(
            hashes[first:last],
            hashes[first - 1] if first else None,
            self.token_ids[first * self.block_size : last * self.block_size],
            self.block_size,
            None,
            "GPU",
            self.lora,
            extra_keys if extra_keys and any(extra_keys) else None,
            cache_salt=self.cache_salt if first == 0 else None,
        )


def vllm_chain(record: Record) -> Chain:
    """Names of its parts: algorithm, seed, tokens, variant, block size and lookahead."""
    name = "-".join(
        str(record.get(part)) for part in ("algo", "pythonhashseed", "tokens_name", "variant", "block_size")
    )
    lora = record.get("lora")
    digests = [bytes.fromhex(digest) for digest in record["block_hashes"]]
    ints: list[int] = record["event_int64"]
    return Chain(
        f"{name}-{record.get('num_hash_lookahead_tokens')}",
        record["token_ids"],
        record["block_size"],
        lora["name"] if lora else None,
        record.get("salt"),
        digests,
        ints,
        [list(ints), list(digests)],
        unhex(record["event_extra_keys"]),
    )


def sglang_chain(record: Record) -> Chain:
    """Besides the plain form there are those in which LoRA and salt are part of the hash."""
    forms = [form for field, form in record.items() if field == "int64" or field.startswith("event_")]
    return Chain(
        f"page{record['page_size']}-{record['extra_key']}-{record['cache_salt']}",
        record["token_ids"],
        record["page_size"],
        record["extra_key"],
        record["cache_salt"],
        [bytes.fromhex(digest) for digest in record["sha256_hex"]],
        record["int64"],
        forms,
        cache_salt=record["cache_salt"],
    )


VLLM = [vllm_chain(record) for record in records("hash_chains*.jsonl")]
SGLANG = [sglang_chain(record) for record in records("sglang_hash_chains*.jsonl")]
CHAINS = [chain for chain in VLLM + SGLANG if chain.ints]
SAME = [list(group) for _, group in groupby(sorted(CHAINS, key=lambda c: repr(c.identity)), lambda c: c.identity)]


def named(chains: list[Chain]) -> list[Any]:
    return params((chain.name, chain) for chain in chains)


@pytest.mark.parametrize("chain", named(VLLM))
def test_vllm_event_hash_is_the_low_64_bits_of_the_digest(chain: Chain) -> None:
    assert chain.ints == [int.from_bytes(digest, "big") % 2**64 for digest in chain.digests]


@pytest.mark.parametrize("chain", named(SGLANG))
def test_sglang_event_hash_is_the_high_64_bits_of_the_digest_signed(chain: Chain) -> None:
    assert chain.ints == [int.from_bytes(digest[:8], "big", signed=True) for digest in chain.digests]


@pytest.mark.parametrize("chain", named(CHAINS))
def test_announced_chain_gets_the_keys_of_its_tokens(chain: Chain) -> None:
    for hashes in chain.forms:
        resolver = Resolver(MODEL)
        resolver.apply([chain.stored(hashes)])
        resolver.check()
        assert (resolver.keys(), resolver.inexact) == (set(chain.keys), None)
        assert resolver.matched(chain.keys) == len(hashes)


@pytest.mark.parametrize("chain", named(CHAINS))
def test_chain_announced_block_by_block_gets_the_same_keys_in_any_order(chain: Chain) -> None:
    for hashes in chain.forms:
        blocks = [chain.stored(hashes, index, index + 1) for index in range(len(hashes))]
        for order in (blocks, blocks[::-1]):
            resolver = Resolver(MODEL)
            resolver.apply(order)
            resolver.check()
            assert (resolver.keys(), resolver.orphan_blocks) == (set(chain.keys), 0)


@pytest.mark.parametrize("group", params((group[0].name, group) for group in SAME if len(group) > 1))
def test_engines_that_hash_differently_hold_the_same_keys(group: list[Chain]) -> None:
    for chain in group:
        for hashes in chain.forms:
            resolver = Resolver(MODEL)
            resolver.apply([chain.stored(hashes)])
            assert resolver.matched(group[0].keys) == len(group[0].keys) == len(hashes)


def test_hash_chains_that_differ_in_salt_lora_or_block_size_share_no_key() -> None:
    by_key: dict[int, tuple[object, ...]] = {}
    for group in SAME:
        tokens, block_size, *others = group[0].identity
        for index, key in enumerate(group[0].keys):
            prefix = (tokens[: (index + 1) * block_size], block_size, *others)
            assert by_key.setdefault(key, prefix) == prefix


def test_one_engine_holds_hash_chains_of_all_tenants_apart() -> None:
    resolver = Resolver(MODEL)
    for group in SAME:
        # The last form is the one that tells tenants apart in every engine: the full digest, or all names hashed in.
        resolver.apply([group[0].stored(group[0].forms[-1])])
    resolver.check()
    assert resolver.keys() == {key for group in SAME for key in group[0].keys}
    assert resolver.inexact is None
