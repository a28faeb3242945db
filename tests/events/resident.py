"""Copies that a resolver holds, as tests compare them."""

from events.cache.resolver import Resolver
from events.messages import Hash


def copies(resolver: Resolver) -> dict[tuple[str, int], dict[Hash, int]]:
    """Copies of every resident hash, by (medium, group)."""
    return {
        name: {block_hash: 1 + pool.copies.get(block_hash, 0) for block_hash in pool.resident}
        for name, pool in resolver.pools.items()
        if len(pool)
    }
