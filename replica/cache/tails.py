"""The beginnings of blocks: the longest run of tokens that any block with the same parent begins with.

For its sake the last block of a request, which is not full, is kept as a *tail*: it has a parent and tokens like a
named block, but no name, so it is found only here. It queues like a cached block, and ends when its slot is handed out
or when it is full and named.
"""

import numpy as np
from numpy.typing import NDArray

from events.blocks import TOKEN_BYTES
from replica.cache.chain import Chain
from replica.cache.contents import NOT_NAMED, Contents
from replica.cache.names import NOBODY, Slots

FEW = 64  # blocks whose tokens are compared all at once


def find_beginning(contents: Contents, chain: Chain, index: int, identity: int) -> tuple[int, int]:
    """Find the block that begins as the chain's block `index` does, and how many tokens they share; 0: there is none.

    `identity` is that of the block before. The chain's last token does not count: it must be computed to go on.
    """
    start = index * contents.block_size
    count = min(contents.block_size, len(chain) - 1 - start)
    if count <= 0:
        return NOBODY, 0
    return longest_run(contents, identity, _tokens(chain, start, count), chain.exact.get(index))


def keep_tail(contents: Contents, chain: Chain, slot: int, computed: int) -> None:
    """Let the computed tokens of the block after the chain's named ones be found, which they do not fill."""
    assert chain.identity is not None
    index, start = chain.named, chain.named * contents.block_size
    assert computed - start < contents.block_size, f"a block before token {computed} is full and has no name"
    exact, tokens = chain.exact.get(index), _tokens(chain, start, computed - start)
    contents.parent[slot], contents.filled[slot] = NOT_NAMED, 0
    contents.exact.pop(slot, None)
    contents.origins.pop(slot, None)
    if longest_run(contents, chain.identity, tokens, exact)[1] == len(tokens):
        return  # another block holds all of it: this one is free as soon as its request ends
    contents.parent[slot], contents.filled[slot] = chain.identity, len(tokens)
    contents.rows[slot, : len(tokens)] = tokens
    if exact is not None:
        contents.exact[slot] = exact


def longest_run(contents: Contents, parent: int, own: NDArray[np.uint32], exact: bytes | None) -> tuple[int, int]:
    """Find the block after the parent that begins with most of these tokens, and with how many."""
    # A scan of all slots: 10 us for 27,000. A table of children would cost that much at every naming and eviction.
    slots = np.flatnonzero(contents.many_parents[: contents.num_blocks] == parent)
    slots = slots[_column(contents, 0, slots) == own[0]]
    if contents.exact or exact is not None:
        slots = np.array([slot for slot in slots.tolist() if contents.exact.get(slot) == exact], np.intp)
    if not slots.size:
        return NOBODY, 0
    shared = 1
    while slots.size > FEW and shared < len(own):  # thousands may begin a prompt alike; most part soon
        longer = (_column(contents, shared, slots) == own[shared]) & (contents.many_filled.take(slots) > shared)
        if not longer.any():
            return int(slots[0]), shared
        slots = slots[longer]
        shared += 1
    differs = np.ones((len(slots), len(own) + 1), np.bool_)  # one more, where every run ends
    np.not_equal(contents.rows.take(slots, axis=0)[:, : len(own)], own, out=differs[:, :-1])
    runs = np.minimum(differs.argmax(axis=1), contents.many_filled[slots])
    best = int(runs.argmax())
    return int(slots[best]), int(runs[best])


def _tokens(chain: Chain, start: int, count: int) -> NDArray[np.uint32]:
    return np.frombuffer(chain.tokens, np.uint32, count, start * TOKEN_BYTES)


def _column(contents: Contents, offset: int, slots: Slots) -> NDArray[np.uint32]:
    """The token at this place of each of the blocks."""
    return contents.rows.reshape(-1).take(slots * contents.block_size + offset)
