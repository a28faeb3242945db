"""Events as a decoder may give them: every field has the right type, and any value at all."""

from typing import Any

from hypothesis import strategies as st

from events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KnownEvent

INT64 = st.integers(-(2**63), 2**64 - 1)
SMALL = st.integers(-2, 6)
INTS = SMALL | INT64
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
SCALARS = st.none() | st.booleans() | INTS | st.floats() | TEXT | st.binary(max_size=4)
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))

HASHES = SMALL | INT64 | st.binary(max_size=2)
TOKENS = SMALL | INT64 | TEXT | st.sampled_from(["1", "99999999999"]) | st.tuples(INTS, INTS)
PARTS = TEXT | st.binary(max_size=3) | st.tuples(TEXT, INTS).map(list) | ANYTHING
MM_KEY = st.fixed_dictionaries({"type": st.just("mm_key"), "hash": TEXT | ANYTHING, "start_offset": INTS | ANYTHING})
MEDIA = st.none() | st.sampled_from(["GPU", "CPU", "DISK"])
GROUPS = st.none() | st.integers(0, 2) | INT64
KINDS = st.none() | st.sampled_from(["full_attention", "sliding_window", "mamba"]) | TEXT


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def stored_blocks(draw: st.DrawFn) -> BlockStored:
    """Often with as many tokens as its hashes need, so that it gets past the first check."""
    hashes = draw(st.lists(HASHES, max_size=4))
    block_size = draw(st.integers(1, 2) | INTS)
    paired = 0 < block_size <= 2 and draw(st.booleans())
    size = block_size * len(hashes)
    plain_tokens = st.lists(st.integers(0, 3), min_size=size if paired else 0, max_size=size if paired else 8)
    return BlockStored(
        hashes,
        draw(optional(HASHES)),
        draw(plain_tokens | st.lists(TOKENS, max_size=8)),
        block_size,
        draw(optional(INTS)),
        draw(MEDIA),
        draw(optional(TEXT)),
        draw(optional(st.lists(optional(st.lists(PARTS, max_size=4)), max_size=4))),
        draw(GROUPS),
        draw(KINDS),
        draw(optional(INTS)),
        draw(optional(TEXT)),
        draw(optional(TEXT)),
        draw(optional(TEXT)),
        draw(optional(st.lists(st.lists(INTS, max_size=2), max_size=2))),
        draw(optional(TEXT)),
        draw(optional(st.dictionaries(TEXT | st.just("cache_salt"), ANYTHING, max_size=2))),
        draw(optional(st.lists(ANYTHING | st.lists(MM_KEY | ANYTHING, max_size=2), max_size=4))),
    )


removed_blocks = st.builds(BlockRemoved, st.lists(HASHES, max_size=4), MEDIA, GROUPS, optional(TEXT), optional(TEXT))
EVENTS: st.SearchStrategy[KnownEvent] = st.one_of(
    stored_blocks(), stored_blocks(), removed_blocks, st.builds(AllBlocksCleared)
)
BATCHES = st.builds(EventBatch, st.floats(allow_nan=False), st.lists(EVENTS, max_size=5), optional(INT64))
