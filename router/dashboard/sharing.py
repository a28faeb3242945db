"""The prefixes that recent prompts share, and the replicas that hold them (docs/router-api.md describes the fields)."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from router.members.members import Members
from router.placement.index import APPROXIMATE
from router.placement.placement import Placement
from router.placement.prices import GPU
from router.prompts.prefixes.recent import RecentPrompt
from router.prompts.prefixes.tree import Prefix, Run, Shared, Tree, most_shared
from router.prompts.prompt import APPROXIMATE_BLOCK_BYTES, BYTES_PER_TOKEN
from router.records.history import History
from router.workers.colleagues import Colleagues
from router.workers.questions import RECENT

MAX_PREFIXES = 200
MAX_NAMES = 20  # the most replicas that are named; `held_by` counts all of them
SHOWN_CHARACTERS = 200
AT_A_TIME = 64  # prompts
LONGEST_WORD = 32  # a length in bytes
_GAPS = (b" ", b"\n", b"\0")
_ROLE = re.compile("\0([^\0]*)\0")


class KeySpace(NamedTuple):
    """The kind of block keys; only keys of one kind can be compared."""

    model: str
    block_size: int
    lookahead: int = 0  # tokens after a block that its key covers, too

    @property
    def block_tokens(self) -> int:
        return self.block_size or APPROXIMATE_BLOCK_BYTES // BYTES_PER_TOKEN


def _sharing(routed: Sequence[RecentPrompt], limit: int) -> tuple[list[Run], dict[Run, KeySpace]]:
    """The runs that save the most tokens, parents first, and the kinds of those at the root."""
    trees: dict[KeySpace, Tree] = {}
    for number, one in enumerate(routed):
        kind = KeySpace(one.model, one.block_size, one.lookahead)
        tree = trees.get(kind)
        if tree is None:
            tree = trees[kind] = Tree()
        tree.add(one.keys, one.at_s, one.text)
        if not number % AT_A_TIME:
            time.sleep(0)  # release the interpreter, so that requests need not wait long for it
    runs = most_shared({tree: kind.block_tokens for kind, tree in trees.items()}, limit)
    kinds = {run: kind for kind, tree in trees.items() for run in runs if run.parent is tree.root}
    for tree in trees.values():
        tree.release()
    return runs, kinds


@dataclass(slots=True, eq=False)
class SharedPrefixes:
    members: Members
    placement: Placement
    history: History
    colleagues: Colleagues | None
    now_s: Callable[[], float]
    texts: bool  # whether they may be shown

    async def shared(self, limit: int) -> Shared:
        routed = self.history.recent.all()
        if self.colleagues is not None:
            for there in (await self.colleagues.told(RECENT)).values():
                routed += there
            routed.sort(key=attrgetter("at_s"))
        chosen, kinds = await asyncio.to_thread(_sharing, routed, min(limit, MAX_PREFIXES))
        now_s = self.now_s()
        beginnings: list[Prefix] = []
        made: dict[Run, Prefix] = {}
        for run in chosen:
            await asyncio.sleep(0)  # requests come first
            path = run.path()
            prefix = made[run] = self._prefix(kinds[path[0]], path)
            above = made.get(path[-2]) if len(path) > 1 else None
            (beginnings if above is None else above.below).append(prefix)
        return Shared(
            prompts=len(routed),
            span_s=round(now_s - routed[0].at_s, 3) if routed else 0.0,
            texts=self.texts,
            prefixes=beginnings,
        )

    def _prefix(self, kind: KeySpace, path: Sequence[Run]) -> Prefix:
        run = path[-1]
        before = sum(len(each.keys) for each in path[:-1])
        keys = list(chain.from_iterable(each.keys for each in path))
        holders: list[tuple[str, str]] = []  # a name and the slowest source: events tell it, or the prompts sent there
        if (model := self.members.models.get(kind.model)) is not None:
            slots = model.all_slots if kind.block_size == APPROXIMATE else model.slots
            index = self.placement.index_of(kind.block_size)
            matches = index.match(
                keys, slots.get(kind.block_size, 0), ahead=lambda one: keys if one == kind.lookahead else []
            )
            holders = sorted(
                (one.name, matches.source(one.slot))
                for one in model.members
                # It holds as much of a prefix of this length as its groups can ever use.
                if 0 < matches.lower.get(one.slot, 0) == index.longest_hit(one.slot, len(keys))
            )
        return Prefix(
            model=kind.model,
            exact=kind.block_size != APPROXIMATE,
            begin=before * kind.block_tokens,
            tokens=len(run.keys) * kind.block_tokens,
            prompts=run.prompts,
            idle_s=round(self.now_s() - run.last_s, 3),
            held_by=len(holders),
            replicas=[name for name, _ in holders[:MAX_NAMES]],
            text=text_of(path),
            below=[],
            id=f"{kind.model} {run.keys[0]:016x}",
            sources={name: source for name, source in holders[:MAX_NAMES] if source != GPU},
        )


def text_of(path: Sequence[Run]) -> str | None:
    """The text that the last run adds to the runs before it, as far as it is kept."""
    whole = path[-1].text
    begin = len(path[-2].text or b"") if len(path) > 1 else 0
    if whole is None or len(whole) == begin:
        return None
    word = max(whole.rfind(gap, 0, begin) for gap in _GAPS) + 1  # two different words may begin alike
    own = whole[word if begin - word < LONGEST_WORD else begin :]
    text = _ROLE.sub(r"\n\1: ", own.decode(errors="ignore")).replace("\0", " ").strip()
    return text[:SHOWN_CHARACTERS] or None
