"""The KV-cache groups of a replica, and the prefix of a prompt that all of them accept.

A model whose layers attend differently keeps one group of blocks for each kind of layer, and a prefix is a hit only
where every group can go on from its end:

    full     every block of the prefix is held
    window   the last `blocks` blocks of the prefix are held, or all of it
    state    the block that ends the prefix is held

All groups share one chain of keys, of the greatest block size that divides all of theirs: the unit. A group's block is
named by the key at its end.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from math import gcd, lcm
from operator import and_, or_
from typing import NamedTuple, TypeAlias

from events.cache.extras import MAX_LOOKAHEAD, has_pairs, lookahead_of
from events.messages import BlockStored, decode_tokens

FULL, WINDOW, STATE = "full", "window", "state"
RULES = {
    "full_attention": FULL,
    "mla_attention": FULL,
    "sink_full_attention": FULL,
    "sliding_window": WINDOW,
    "sliding_window_mla": WINDOW,
    "mamba": STATE,
}
MAX_GROUPS = 32
MAX_SIZES = 4  # block sizes of one group: its own, and parts of a block
MAX_KNOWN = 256  # combinations of fields that need no second look
MAX_BLOCK = 2**20  # tokens

# The masks of holders of these keys in a group.
MasksOf: TypeAlias = Callable[[int, Sequence[int]], list[int]]


# An event's words about its group: medium, number, kind, window, block size, tokens ahead or none, and pairs or none.
Said: TypeAlias = tuple[str | None, int | None, str | None, int | None, int, bool, bool]


def said_of(event: BlockStored) -> Said:
    return (
        event.medium,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.block_size,
        event.lookahead_token_ids is None,
        has_pairs(event),
    )


class Group(NamedTuple):
    """One group, as far as it matters for a hit."""

    group: int
    rule: str
    units: int  # units of one of its blocks
    blocks: int = 0  # the blocks of its window


class Layout(NamedTuple):
    """The groups of a replica. `parts`: a hit may end inside of a group's block."""

    unit: int  # tokens
    groups: tuple[Group, ...]
    parts: bool = False
    lookahead: int = 0  # tokens after a block that its key covers, too
    pairs: bool = False  # a prompt is looked up without its last token, and every block by the token after it

    @property
    def step(self) -> int:
        """Units between two prefixes that may be a hit."""
        return 1 if self.parts else lcm(*(group.units for group in self.groups))

    @property
    def whole(self) -> bool:
        return all(group.rule == FULL for group in self.groups)


class Spec(NamedTuple):
    kind: str | None
    window: int | None
    sizes: frozenset[int]

    @property
    def size(self) -> int:
        return max(self.sizes)


class Groups:
    """Learns the groups of one replica from its events.

    `layout` is None while all blocks are in one group that keeps whole prefixes. `doubt` is the reason for which a hit
    cannot be predicted from the groups, if there is one.
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.doubt: str | None = None
        self.sparse = False  # no group names all blocks
        self._specs: dict[int, Spec] = {}
        self.known: set[Said] = set()  # words that need no second look
        self._lookahead = 0
        self._pairs = False
        self._unit = 0  # divides every size that was ever seen; 0: none was
        self._too_many: str | None = None

    @property
    def key_sizes(self) -> tuple[int, ...]:
        """The sizes of the blocks that keys stand for."""
        if self.layout is not None:
            return (self.layout.unit, -self.layout.lookahead)
        sizes = {size for spec in self._specs.values() for size in spec.sizes}
        return (*sizes, 0) if sizes else ()

    def learn(self, event: BlockStored) -> bool:
        """Note the event's group; return True if the layout is another one now."""
        said = said_of(event)
        if said in self.known:
            return False
        if len(self.known) >= MAX_KNOWN:
            self.doubt = self._too_many = f"its events name more than {MAX_KNOWN} media, groups and kinds"
            return False
        self.known.add(said)
        size, kind, window = event.block_size, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        if event.medium not in (None, "GPU") or not 1 <= size <= MAX_BLOCK:
            return False  # a tier that names blocks by hash alone does not say its size
        number, before = event.group_idx or 0, self.layout
        old = self._specs.get(number)
        sizes = (old.sizes if old is not None else frozenset()) | {size}
        if (old is None and len(self._specs) >= MAX_GROUPS) or len(sizes) > MAX_SIZES:
            self.doubt = self._too_many = f"it has over {MAX_GROUPS} groups, or one with over {MAX_SIZES} block sizes"
            return False
        if not event.block_hashes:
            with suppress(ValueError):
                event = decode_tokens(event)  # a mirror tells by them that there are pairs
        self._lookahead = max(self._lookahead, min(lookahead_of(event), MAX_LOOKAHEAD))
        self._pairs = self._pairs or has_pairs(event)
        if old is not None and kind is None:
            kind, window = old.kind, old.window
        self._specs[number] = Spec(kind, window, sizes)
        self.layout, doubt = self._arranged()
        self.doubt = self._too_many or doubt
        self.sparse = self.layout is not None and all(group.rule != FULL for group in self.layout.groups)
        return self.layout != before

    def forget(self) -> None:
        """Another process may have other groups. The unit stays: any that divides all sizes will do."""
        self._specs.clear()
        self.known.clear()
        self._lookahead = 0
        self._pairs = False
        self.doubt = self._too_many = None
        self.sparse = False

    def _arranged(self) -> tuple[Layout | None, str | None]:
        first = self._specs.get(0)
        if len(self._specs) == 1 and first is not None and (first.kind is None or RULES.get(first.kind) == FULL):
            if not self._lookahead:
                return None, None
            self._unit = gcd(self._unit, *first.sizes)
            only = Group(0, FULL, first.size // self._unit)
            return Layout(self._unit, (only,), lookahead=self._lookahead, pairs=self._pairs), None
        self._unit = gcd(self._unit, *(size for spec in self._specs.values() for size in spec.sizes))
        groups, doubts = [], []
        for number, spec in sorted(self._specs.items()):
            rule, units = RULES.get(spec.kind or ""), spec.size // self._unit
            if spec.kind is None:
                doubts.append(f"group {number} does not say what kind of attention it serves")
            elif rule is None:
                kind = spec.kind[:40]
                doubts.append(f"group {number} is of the kind {kind}, whose hits cannot be predicted from its events")
            elif rule != WINDOW:
                groups.append(Group(number, rule, units))
            elif spec.window is None or spec.window < 1:
                doubts.append(f"group {number} ({spec.kind}) does not say how long its window is")
            else:
                groups.append(Group(number, rule, units, max(1, -(-(spec.window - 1) // spec.size))))
        if not groups:  # the least that can be claimed
            groups = [Group(number, FULL, spec.size // self._unit) for number, spec in sorted(self._specs.items())]
        groups.sort(key=lambda group: group.rule != FULL)  # they end the search early
        # As vLLM decides it: states may be looked up inside of their blocks if no window has larger ones.
        smallest = gcd(*(size for spec in self._specs.values() for size in spec.sizes))
        rules = [(RULES.get(spec.kind or ""), spec.size) for spec in self._specs.values()]
        parts = (
            len(rules) > 1
            and any(rule == STATE and size > smallest for rule, size in rules)
            and all(rule != WINDOW or size == smallest for rule, size in rules)
        )
        layout = Layout(self._unit, tuple(groups), parts, self._lookahead, self._pairs)
        return layout, doubts[0] if doubts else None


def hits(layout: Layout, keys: Sequence[int], masks_of: MasksOf, slots: int) -> dict[int, int]:
    """The longest prefix of these keys that every group of the slot accepts, in units, by slot."""
    matched: dict[int, int] = {}
    step = layout.step
    accepted = _accepted(layout, keys, masks_of, slots)
    left, last = slots, 0
    for boundary in range(len(accepted), 0, -1):
        mask = accepted[boundary - 1]
        if mask != last:
            last = mask
            found = left & mask
            if found:
                left ^= found
                while found:
                    lowest = found & -found
                    matched[lowest.bit_length() - 1] = boundary * step
                    found ^= lowest
                if not left:
                    break
    return matched


def _accepted(layout: Layout, keys: Sequence[int], masks_of: MasksOf, slots: int) -> list[int]:
    """For every prefix that may be a hit, the shortest first, the slots whose groups all accept it."""
    step = layout.step
    accepted = [slots] * (len(keys) // step)
    for number, rule, units, blocks in layout.groups:
        keys = keys[: len(accepted) * step]
        if rule == STATE:
            own = masks_of(number, keys[step - 1 :: step])
        elif rule == WINDOW:
            own, width = masks_of(number, keys[units - 1 :: units]), 1
            # A mask stands for itself and those of the blocks before it, this many together; near the start for fewer.
            while width < min(blocks, len(own)):
                shift = min(width, blocks - width)
                own = [*own[:shift], *map(and_, islice(own, shift, None), own)]
                width += shift
            own = own[step // units - 1 :: step // units]
        elif layout.parts:
            # Prefixes of whole blocks and then of a part of one. A held block covers its shorter parts, too.
            masks = masks_of(number, keys)
            whole = accumulate(masks[units - 1 :: units], and_, initial=slots)
            before = [mask for mask in whole for _ in range(units)][1 : len(masks) + 1]
            held = list(map(and_, before, masks))
            own = list(accumulate(reversed(held), or_))[::-1]
        else:
            own = list(accumulate(masks_of(number, keys[units - 1 :: units]), and_))
            own = own[step // units - 1 :: step // units]
        accepted = list(map(and_, accepted, own))
        if rule == FULL:  # none beyond the first that nobody accepts
            del accepted[sum(map(bool, accepted)) :]
        if not accepted:
            break
    return accepted
